"""Averages of other packages: their tensors, and their update method, traced.

This module has no formula. Dynamo traces the object's update on a stand-in, which has
the object's tensors and the methods of its class. Anything else that the update uses
ends the trace; then the update is called untraced.

Only two attributes of the host have names here. The first is the decay, which the
object computes before the trace. The second is the number of updates, which the
stand-in can only increase by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch

from ..shadow.whole import NotTraced

Tensors = list[torch.Tensor]
#: The attribute with the averages, which identifies a kind of object, and the name of
#: its update method. That method takes a module for "module", else a list.
KINDS = (("module", "update"), ("shadow_params", "step"))
#: Attributes with the number of updates and the decay of the last update.
COUNTER, DECIDED = "optimization_step", "cur_decay_value"
#: Types of other attributes, which a stand-in has with the same values.
_CONSTANTS = (bool, int, float, str, type(None), torch.device, torch.dtype)


def kind_of(candidate: Any) -> tuple[str, str] | None:
    """Return the entry of KINDS for an object; None if it is not an average."""
    for attribute, method in KINDS:
        function = getattr(type(candidate), method, None)
        if hasattr(candidate, attribute) and isinstance(function, FunctionType):
            return attribute, method
    return None


class Count:
    """Number with only one operation: `following` is its successor."""

    def __init__(self, following: Count | None = None) -> None:
        self.following = following

    def __add__(self, n: int) -> Count:
        if n != 1 or self.following is None:
            raise NotTraced
        return self.following

    def __bool__(self) -> bool:
        raise NotTraced

    def __eq__(self, other: object) -> bool:
        raise NotTraced

    __hash__ = None  # type: ignore[assignment]


class ModuleTensors:
    """Stand-in of a module that has only its tensors. Raises NotTraced if the state
    dict of the module has other values.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.params: Tensors = list(module.parameters())
        self.others: Tensors = list(module.buffers())
        self.state: dict[str, torch.Tensor] = dict(module.state_dict(keep_vars=True))
        tensor_ids = {*map(id, (*self.params, *self.others))}
        if not all(id(t) in tensor_ids for t in self.state.values()):
            raise NotTraced("a module has state besides its tensors")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the detached tensors, as a module does."""
        return {key: t.detach() for key, t in self.state.items()}

    def parameters(self) -> Tensors:
        """Return the parameters, as a list where a module has a generator."""
        return self.params

    def buffers(self) -> Tensors:
        """Return the buffers, as a list."""
        return self.others

    def __getattr__(self, name: str) -> Any:
        raise NotTraced(f"it reads of a module: {name}")


class StandIn:
    """Stand-in of an object while its update is traced, with the object's tensors and
    constants. `_fuseopt_done` has the attributes that the host must write afterwards.
    """

    _fuseopt_decay: Any
    _fuseopt_step: Any
    _fuseopt_done: dict[str, bool]

    def get_decay(self, step: Any = None) -> float:
        """Return the object's decay for this step. Raises NotTraced for other steps."""
        if step is not self._fuseopt_step:
            raise NotTraced("it reads the decay of a different step")
        decay: float = self._fuseopt_decay
        return decay

    def __getattr__(self, name: str) -> Any:
        raise NotTraced(f"it reads {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == COUNTER:
            is_expected = value is self._fuseopt_step
        else:
            is_expected = name == DECIDED and value == self._fuseopt_decay
        if not is_expected:
            raise NotTraced(f"it writes {name}")
        self._fuseopt_done[name] = True
        if name == COUNTER:
            object.__setattr__(self, name, value)


def functions_of(kind: type) -> dict[str, Any]:
    """Return the attributes of a class without those of `torch.nn.Module` and `object`.
    Raises NotTraced for a class that overrides attribute access.
    """
    attributes: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base not in (object, torch.nn.Module):
            if not {"__setattr__", "__getattribute__"}.isdisjoint(vars(base)):
                raise NotTraced("its class computes attributes in code")
            for name, value in vars(base).items():
                if not (name.startswith("__") and name.endswith("__")):
                    attributes[name] = value
    return attributes


class Update:
    """One update of an average, in the form that Dynamo traces."""

    def __init__(self, stand_in: Any, argument: Any, method: str, step: Any) -> None:
        self.stand_in = stand_in
        self.argument = argument
        self.method = method
        self.step = step

    def apply(self) -> None:
        """Do the update; traced."""
        update = getattr(self.stand_in, self.method)
        if self.step is None:
            update(self.argument)
        else:
            update(self.argument, step=self.step)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that the update may write."""
        for value in vars(self.stand_in).values():
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, ModuleTensors):
                yield from (*value.params, *value.others, *value.state.values())
            elif isinstance(value, list):
                yield from value


class Average:
    """Average of another package; `source` is a module, or a list of parameters."""

    def __init__(self, average: Any, source: Any) -> None:
        kind = kind_of(average)
        assert kind is not None
        self.average = average
        self.attribute, self.method = kind
        self.source = source
        parameters = inspect.signature(getattr(type(average), self.method)).parameters
        self._takes_step = "step" in parameters
        self._functions: dict[str, Any] = {}
        self._seen: list[int] = []
        self._holds: dict[str, Any] = {}
        self._given: Any = None
        self._stand_in: Any = None
        # Dynamo guards the identity of these
        self._next = Count()
        self._now = Count(self._next)
        self._done: dict[str, bool] = {}

    def call(self, step: int | None) -> None:
        """Call the update untraced, as users do."""
        keywords = {} if step is None or not self._takes_step else {"step": step}
        getattr(self.average, self.method)(self._argument(), **keywords)

    def update(self, step: int | None) -> Update:
        """Return one update in the form that Dynamo traces. Raises NotTraced."""
        average, values = self.average, vars(self.average)
        if self.method in values or "get_decay" in values:
            raise NotTraced("an object replaced its class's methods")
        self._read()
        holds = dict(self._holds)
        holds.update((k, v) for k, v in values.items() if isinstance(v, _CONSTANTS))
        step_of_decay = values[COUNTER] + 1 if COUNTER in values else None
        if self._takes_step:
            step_of_decay = step
        token = None if step_of_decay is None else self._next
        if COUNTER in values:
            holds[COUNTER] = self._now
        if hasattr(average, "get_decay"):
            holds["_fuseopt_decay"] = decay = average.get_decay(step_of_decay)
            if type(decay) is not float:
                raise NotTraced("its decay is not a float")
        holds["_fuseopt_step"] = token
        holds["_fuseopt_done"] = self._done
        self._done.clear()
        attributes = vars(self._stand_in)
        attributes.clear()
        attributes.update(holds)
        step_of_update = token if self._takes_step else None
        return Update(self._stand_in, self._given, self.method, step_of_update)

    def updated(self) -> None:
        """Write the counter and the decay to the object, after a traced update."""
        stand_in, values = vars(self._stand_in), vars(self.average)
        if COUNTER in self._done:
            values[COUNTER] += 1
        if DECIDED in self._done:
            values[DECIDED] = stand_in["_fuseopt_decay"]

    def _argument(self) -> Any:
        """Return the argument of the update: a module or a list of parameters."""
        if self.attribute == "module" or isinstance(self.source, list):
            return self.source
        return list(self.source.parameters())

    def _read(self) -> None:
        """Make a new stand-in if the object's tensors or methods have changed."""
        functions = functions_of(type(self.average))
        argument = self._argument()
        attributes: list[tuple[str, Any]] = [*vars(self.average).items()]
        attributes += vars(self.average).get("_modules", {}).items()
        tensor_ids = [id(x) for pair in attributes for x in _tensors(pair[1])]
        tensor_ids += [id(x) for x in _tensors(argument)]
        if self._stand_in is not None and functions == self._functions:
            if tensor_ids == self._seen:
                return
        containers = (argument, *dict(attributes).values())
        if len({x.device for y in containers for x in _tensors(y)}) > 1:
            raise NotTraced("it is on a different device")
        kind = type(self.average)
        methods = {k: v for k, v in functions.items() if k not in vars(StandIn)}
        self._stand_in = object.__new__(type(kind.__name__, (StandIn,), methods))
        self._holds = {}
        for name, value in attributes:
            if isinstance(value, torch.nn.Module):
                self._holds[name] = ModuleTensors(value)
            elif isinstance(value, torch.Tensor) or _is_list(value):
                self._holds[name] = value
        module = isinstance(argument, torch.nn.Module)
        self._given = ModuleTensors(argument) if module else argument
        self._seen, self._functions = tensor_ids, functions


def _is_list(value: Any) -> bool:
    """Is it a list of tensors?"""
    return isinstance(value, list) and all(isinstance(x, torch.Tensor) for x in value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module, or a list."""
    if isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.Tensor):
        yield value
    elif _is_list(value):
        yield from value
