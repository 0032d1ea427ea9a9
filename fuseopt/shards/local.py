"""Stand-in of an optimizer of DTensors that has their local parts.

The local optimizer has the class and the attributes of the optimizer. In place of
DTensors among parameters, gradients and state it has their local parts, plain tensors.
If a step treats each element alike, its result for these parts is that for the
DTensors, and needs no other process. `refresh` copies the optimizer's contents to the
local one. `outward` mirrors the writes to it; new state becomes DTensors, sharded as by
`zeros_like`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import weakref
from collections.abc import Mapping
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from .. import compat
from ..inputs.keys import NUMBERS, LanesDiffer
from ..inputs.parts import DTensorRecord
from ..inputs.pending_gradients import PendingGradients
from ..replicate.writes import Entries
from ..shadow.optimizer import Write
from ..shadow.stand_in import stand_in, unfused

_GRAD = attrgetter("grad")
_PARAMS = "params"
_CELLS = ("state", "param_groups")


class Part(NamedTuple):
    """Parameter of both optimizers. `whole` is the optimizer's, `local` its local part,
    and `param` the local optimizer's, with the memory of `local`. `spec` is None for a
    plain tensor; then all three are the parameter.
    """

    whole: torch.Tensor
    local: torch.Tensor
    param: torch.Tensor
    spec: Any


def part_of(t: Any, spec: Any, name: str) -> torch.Tensor:
    """Return the local part of a DTensor with a spec like `spec`.

    `name` describes the tensor in errors. Raises LanesDiffer for any other tensor.
    """
    if type(t) is not compat.dtensor_type():
        raise LanesDiffer(f"{name} of a DTensor is a {type(t).__name__}")
    tensor_spec = compat.spec_of(t)
    if not compat.alike(tensor_spec, spec):
        raise LanesDiffer(
            f"{name} of a parameter that is {_describe(spec)} is "
            f"{_describe(tensor_spec)}: another mesh, placement or size"
        )
    local = compat.arrived(compat.local_part(t))
    if type(local) is not torch.Tensor:
        raise LanesDiffer(f"a part of {name} is a {type(local).__name__}")
    return local


def _describe(spec: Any) -> str:
    return f"{tuple(spec.placements)} of {tuple(spec.tensor_meta.shape)}"


class LocalOptimizer:
    """See the module. `stand_in` is the local optimizer, `given` holds its gradients.

    Raises LanesDiffer for an optimizer that cannot have a stand-in.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.stand_in = stand_in(optimizer)
        self._owner = weakref.ref(optimizer)
        self._parts: dict[int, Part] = {}  # by the id of the parameter
        self._lists: list[list[torch.Tensor]] = []
        self._groups: list[dict[str, Any]] = []
        self._state: dict[Any, Any] = {}
        #: by the id of a parameter's state dict: that dict, and the local one
        self._states: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        #: by the id of a local container: the optimizer's, and the parameter of a state
        self._outside: dict[int, tuple[Any, Part | None]] = {}
        #: by the id of a local part in the state: its DTensor
        self._wholes: dict[int, torch.Tensor] = {}
        self._spread: list[Part] = []
        self._whole: list[torch.Tensor] = []
        #: specs of the gradients of the last call: another list once one has changed
        self.grad_specs: list[Any] = []
        self._watch = DTensorRecord()
        self.given = PendingGradients()
        self._known = False  # true if all is up to date, except what `_watch` compares
        self._wrote = False
        #: true if no parameter has a gradient
        self.idle = False

    # ---------------------------------------------------------------- before a step

    def refresh(self, optimizer: Optimizer, helper: ctypes.PyDLL | None = None) -> None:
        """Update the local optimizer from the optimizer. Gradients are in `given`,
        which sets them at the step.

        Raises LanesDiffer for state that is neither a DTensor nor plain data, or that
        is sharded differently than its parameter. `helper` is the guards' library.
        """
        unchanged = self._known and not self._wrote
        parts: list[Any] | None = self._watch.compare(helper) if unchanged else None
        if parts is not None:
            self.idle, self.given.grads = False, parts
            self.given.in_c = self._watch.in_c()
            return
        if not (unchanged and self._watch.same(helper)):
            self._known = False
            self._rebuild(optimizer)
            self._note(optimizer)
            self._known = True
        self._take_gradients()
        self._watch.begin(self.grad_specs)

    def again(self, helper: ctypes.PyDLL | None) -> list[Any] | None:
        """Return the parts of all gradients in a call like the last one, or None.

        The caller gives them to `given`.
        """
        if not self._known or self._wrote:
            return None
        parts = self._watch.compare(helper)
        if parts is not None:
            self.given.in_c = self._watch.in_c()
        return parts

    def count_gradients(self) -> None:
        """Increase the versions of gradients after `again`."""
        if not self._watch.count_gradients():
            compat.bump_versions(self.gradients())

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that are DTensors."""
        return [g for g in map(_GRAD, self._whole) if g is not None]

    def _take_gradients(self) -> None:
        grads = [*map(_GRAD, self._whole)]
        plain_are_none = (
            p.grad is None for p, _, _, spec in self._parts.values() if not spec
        )
        self.idle = not any(g is not None for g in grads) and all(plain_are_none)
        if not self.idle:
            self.given.grads = [*self._parts_of(grads)]

    def _parts_of(self, grads: list[Any]) -> list[torch.Tensor | None]:
        """Return the local parts of gradients; fast for unchanged specs."""
        if {*map(type, grads)} == {compat.dtensor_type()} and all(
            map(is_, map(compat.spec_of, grads), self.grad_specs)
        ):
            parts = [*map(compat.local_part, grads)]
            if {*map(type, parts)} == {torch.Tensor}:
                return parts
        new_parts = [
            None if g is None else part_of(g, part.spec, "the gradient")
            for g, part in zip(grads, self._spread, strict=True)
        ]
        # these equal the parameters' specs, so the next call does not compare them
        self.grad_specs = [
            part.spec if g is None else compat.spec_of(g)
            for g, part in zip(grads, self._spread, strict=True)
        ]
        return new_parts

    def _rebuild(self, optimizer: Optimizer) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        if type(groups) is not list or {*map(type, groups)} - {dict}:
            raise LanesDiffer("its groups are not a list of dicts")
        if type(state) not in (dict, collections.defaultdict):
            raise LanesDiffer(f"its state is a {type(state).__name__}")
        old_parts, self._parts = self._parts, {}
        for group in groups:
            if type(group[_PARAMS]) is not list:
                raise LanesDiffer("the parameters of a group are not a list")
            for p in group[_PARAMS]:
                if id(p) in self._parts:
                    raise LanesDiffer("a parameter is in its groups twice")
                self._parts[id(p)] = self._part(p, old_parts.get(id(p)))
        self._spread = [part for part in self._parts.values() if part.spec is not None]
        self.grad_specs = [part.spec for part in self._spread]
        self._whole = [part.whole for part in self._spread]
        self.given = PendingGradients([part.param for part in self._spread])
        self._outside = {}
        self._wholes = {}
        if type(self._state) is not type(state):
            self._state = state.copy()
        content = self._rebuild_state(state)
        self._state.clear()
        self._state.update(content)
        local_groups = self._groups = [
            self._groups[i] if i < len(self._groups) else {} for i in range(len(groups))
        ]
        self._lists = [
            self._lists[i] if i < len(self._lists) else [] for i in range(len(groups))
        ]
        for local_group, params, group in zip(
            local_groups, self._lists, groups, strict=True
        ):
            params[:] = [self._parts[id(p)].param for p in group[_PARAMS]]
            local_group.clear()
            local_group.update(group)
            local_group[_PARAMS] = params
            local_group.update(unfused(local_group))
            if "foreach" in local_group:
                local_group["foreach"] = self._form(optimizer, local_group)
            self._outside[id(local_group)] = group, None
            self._outside[id(params)] = group[_PARAMS], None
        attributes = vars(self.stand_in)
        group_list = attributes.get("param_groups", [])
        group_list[:] = local_groups
        new_attributes = {
            **vars(optimizer),
            "state": self._state,
            "param_groups": group_list,
        }
        attributes.clear()
        attributes.update(new_attributes)
        self._outside[id(self._state)] = state, None
        self._outside[id(group_list)] = groups, None
        self._outside[id(attributes)] = vars(optimizer), None

    @staticmethod
    def _form(optimizer: Optimizer, group: Mapping[str, Any]) -> Any:
        """Return the option `foreach` of a local group. torch's steps choose the
        foreach form by default for plain tensors on a GPU, but not for DTensors.
        """
        module = type(optimizer).step.__module__
        if group["foreach"] is None and module.startswith("torch.optim."):
            return False
        return group["foreach"]

    def _rebuild_state(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        old_states, self._states = self._states, {}
        content = {}
        for p, values in state.items():
            part = self._parts.get(id(p))
            if part is None:
                raise LanesDiffer(
                    "it has state for an object other than its parameters"
                )
            if type(values) is not dict:
                raise LanesDiffer("the state of a parameter is not a dict")
            _, local_values = old_states.get(id(values), (values, {}))
            new_values = {k: self._local_value(v, k, part) for k, v in values.items()}
            local_values.clear()
            local_values.update(new_values)
            self._states[id(values)] = values, local_values
            self._outside[id(local_values)] = values, part
            content[part.param] = local_values
        return content

    def _part(self, p: Any, old: Part | None) -> Part:
        kind = compat.dtensor_type()
        if not (kind is not None and isinstance(p, kind)):
            return Part(p, p, p, None)
        if type(p) is not kind:
            raise LanesDiffer(f"a parameter is a {type(p).__name__}")
        spec = compat.spec_of(p)
        if not compat.is_summed_up(spec):
            raise LanesDiffer(f"a parameter is {_describe(spec)}, a Partial placement")
        if not p.dim():
            raise LanesDiffer("a parameter is a DTensor without dimensions")
        local = part_of(p, spec, "a parameter")
        if local.is_contiguous() != p.is_contiguous():
            raise LanesDiffer("a local part is laid out differently from its parameter")
        if not p.is_leaf:
            raise LanesDiffer("a parameter is not a leaf")
        if (
            old is not None
            and old.whole is p
            and old.local is local
            and old.param.is_set_to(local)
            and old.param.dtype == local.dtype
        ):
            old.param.requires_grad_(p.requires_grad)
            return old._replace(spec=spec)
        param = torch.nn.Parameter(local.detach(), p.requires_grad)
        return Part(p, local, param, spec)

    def _local_value(self, value: Any, name: str, part: Part) -> Any:
        """Return the local optimizer's value for a value of a parameter's state."""
        kind = compat.dtensor_type()
        if part.spec is None or not isinstance(value, torch.Tensor):
            if kind is not None and isinstance(value, kind):
                raise LanesDiffer(
                    f"the state {name!r} of a plain parameter is a DTensor"
                )
            return value
        if value.dim() == 0 and type(value) is torch.Tensor:
            return value
        local = part_of(value, part.spec, f"the state {name!r}")
        if not _has_layout(local, part.local):
            raise LanesDiffer(f"a part of the state {name!r} has another size")
        self._wholes[id(local)] = value
        return local

    def _note(self, optimizer: Optimizer) -> None:
        """Watch the optimizer for changes from now on."""
        groups, local_groups = optimizer.param_groups, self._groups
        attributes = vars(optimizer), vars(self.stand_in)
        pairs = [attributes, *zip(groups, local_groups, strict=True)]
        tables = [*(values for values, _ in self._states.values()), optimizer.state]
        lists: list[Any] = [groups, *(group[_PARAMS] for group in groups)]
        state_dtensors, local_params = [*self._wholes.values()], self.given.params
        self._watch = DTensorRecord(
            pairs, tables, lists, self._whole, state_dtensors, local_params
        )
        self._wrote = False

    # ---------------------------------------------------------------- after a step

    def outward(self, writes: list[Write]) -> list[Write]:
        """Return writes to the local optimizer, each before those to the optimizer."""
        new_dtensors: dict[int, torch.Tensor] = {}
        all_writes: list[Write] = []
        for write in writes:
            all_writes.append(write)
            all_writes += self._mirrored(write, new_dtensors)
        # stays true if an interrupt comes before `settle`
        self._wrote = self._wrote or bool(writes)
        return all_writes

    def settle(self) -> None:
        """Update the records after the writes of `outward`."""
        optimizer = self._owner()
        self._watch.count_up()
        if self._wrote and optimizer is not None:
            self._known = False
            with contextlib.suppress(LanesDiffer):  # the next call raises it
                self._rebuild(optimizer)
                self._note(optimizer)
                self._known = True
        self._wrote = False

    def _mirrored(
        self, write: Any, new_dtensors: dict[int, torch.Tensor]
    ) -> list[Write]:
        if isinstance(write, Entries):
            states = [self._outside[id(value)][0] for value in write.states]
            return [Entries(states, write.key, write.column)]
        function, args = write.func, write.args
        if function is torch._foreach_copy_:
            return []
        target = getattr(function, "__self__", None)
        if isinstance(target, (dict, list)):
            arguments = args
        else:
            target, *arguments = args
        if id(target) not in self._outside:
            return []  # the optimizer's own container
        counterpart, part = self._outside[id(target)]
        name = function.__name__
        if isinstance(counterpart, list) or name not in ("update", "pop", "clear"):
            raise LanesDiffer("the step replaces the optimizer's groups or parameters")
        if name == "clear":
            return [functools.partial(counterpart.clear)]
        if target is self._state:
            return [self._mirrored_state(counterpart, name, arguments, new_dtensors)]
        if name == "pop":
            return [functools.partial(counterpart.pop, *arguments)]
        news = arguments[0]
        if part is None:
            for key, value in news.items():
                if key in (*_CELLS, _PARAMS) or _has_parts(value):
                    raise LanesDiffer(f"the step keeps a part of a DTensor in {key!r}")
        else:
            news = {
                k: self._outer_value(value, part, new_dtensors)
                for k, value in news.items()
            }
        return [functools.partial(type(counterpart).update, counterpart, news)]

    def _mirrored_state(
        self,
        state: Any,
        name: str,
        arguments: Any,
        new_dtensors: dict[int, torch.Tensor],
    ) -> Write:
        part_of_param = {id(part.param): part for part in self._parts.values()}
        if name == "pop":
            key, *default = arguments
            return functools.partial(state.pop, part_of_param[id(key)].whole, *default)
        news = {}
        for key, local_values in arguments[0].items():
            part = part_of_param[id(key)]
            if type(local_values) is not dict:
                raise LanesDiffer("the state of a parameter is not a dict")
            values = {
                k: self._outer_value(x, part, new_dtensors)
                for k, x in local_values.items()
            }
            self._states[id(values)] = values, local_values
            news[part.whole] = values
        return functools.partial(type(state).update, state, news)

    def _outer_value(
        self, value: Any, part: Part, new_dtensors: dict[int, torch.Tensor]
    ) -> Any:
        """Return the optimizer's value for a value of a parameter's new local state."""
        if not isinstance(value, torch.Tensor):
            if type(value) not in NUMBERS:
                raise LanesDiffer(
                    f"the state of a parameter gets a {type(value).__name__}"
                )
            return value
        if part.spec is None or not value.dim():
            return value
        if value is part.param:
            return part.whole
        if value is part.param.grad:
            return part.whole.grad
        for existing in (self._wholes, new_dtensors):
            if id(value) in existing:
                return existing[id(value)]
        if not _has_layout(value, part.local):
            raise LanesDiffer(
                "the step makes state whose size differs from its parameter's"
            )
        new_dtensors[id(value)] = compat.spread_as(value, part.whole)
        return new_dtensors[id(value)]


def _has_layout(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Has `tensor` the shape and strides of `other`? Strides of dimensions of size 1 do
    not count: a part of one row keeps the strides of the whole.
    """
    if tensor.shape != other.shape:
        return False
    dimensions = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return not tensor.numel() or all(n == 1 or a == b for n, a, b in dimensions)


def _has_parts(value: Any) -> bool:
    """Is there a tensor with dimensions in a value that a step assigns?"""
    if isinstance(value, torch.Tensor):
        return bool(value.dim())
    if isinstance(value, dict):
        return any(map(_has_parts, value.values()))
    return isinstance(value, (list, tuple, set)) and any(map(_has_parts, value))
