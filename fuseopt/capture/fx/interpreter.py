"""Run Dynamo's FX graph node by node under the Recorder.

Tensors are meta tensors. Constant numbers are Python numbers, all others are Syms.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...compat import (
    HIGHER_ORDER,
    MAKE_TENSOR,
    autocasts,
    changes_first,
    number_sources,
    shapes_of,
)
from ...errors import CaptureError, FuseoptError, UnsupportedInput, is_own
from ..aten.constants import swap
from ..aten.dtypes import PARTS
from ..aten.recorder import Recorder
from ..aten.values_alone import called
from ..scalars.device import Computed, kind_of, operation
from ..scalars.host import Arg, Item, Scalars, Sym
from .arguments import INDEXING, flatten, literals, without_lists
from .autocast import AutocastRecorder, method, switches
from .inputs import (
    MetaInputs,
    attribute,
    check_memory,
    check_tensor,
    short_names,
    static_tensors,
)
from .made import has_size_of_example, makes_tensors, moving_size
from .patterns import SCALED, restore
from .reassigned_memory import Places, gives_memory, refuse_resizing
from .reroll import Templates
from .segments import NoTemplate, describe, segments, tokens

#: Functions that make a tensor of a number.
MAKERS = (*MAKE_TENSOR, torch.full, torch.scalar_tensor)
#: Packages whose functions affect only their arguments.
PURE = frozenset({"torch", "_operator", "operator", "math", "builtins", "numpy"})
#: The attribute that marks fuseopt's own functions that may be nodes of a graph. They
#: only call ATen, with the numbers among their arguments.
OWN = "_fuseopt_acts_on_tensors"


def source_line(node: Node) -> str:
    """Return the source line of a node: 'file.py:12: code'."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return ""
    lines = trace.rstrip().rsplit("\n  File ", 1)[-1].strip().split("\n")
    where = lines[0].replace('File "', "").replace('", line ', ":").strip('"')
    code = lines[1].strip() if len(lines) > 1 else ""
    return f"{where.split(', in ')[0]}: {code}"


class Interpreter:
    """Evaluates FX nodes: tensors on meta, constants unchanged, others as Sym."""

    def __init__(
        self, gm: GraphModule, args: Sequence[Any], vector_library: bool | None
    ) -> None:
        self.gm = gm
        self.args = args
        self.scalars = Scalars()
        self.recorder = Recorder(self.scalars, vector_library)
        self.templates = Templates(self.recorder)
        self.env: dict[Node, Any] = {}
        restore(gm)
        self.nodes = list(gm.graph.nodes)
        self.recorder.standins.avoid(literals(self.nodes))
        self.metas = MetaInputs()
        self.places = Places()
        # True if the step reads numbers from tensors that it computed
        self.computes = False
        self.statics: list[str] = []
        self.tensor_args: list[int] = []
        self.complexes: list[int] = []
        self.origin: dict[int, int] = {}  # id of an input's meta twin -> pool position
        self.devices: dict[int, str] = {}
        self.names: dict[int, str] = {}  # of the arguments, by pool position
        self.twins: list[tuple[int, int]] = []
        self.leaves: set[int] = set()  # the inputs that require gradients
        self.casting: AutocastRecorder | None = None

    def register_inputs(self) -> None:
        refuse_resizing(self.nodes)
        placeholders = [n for n in self.nodes if n.op == "placeholder"]
        attributes = [n for n in self.nodes if n.op == "get_attr"]
        names = short_names(number_sources(self.gm))
        twins = {}
        for index, (name, value) in enumerate(static_tensors(self.gm).items()):
            twins[name] = self._register(value, name, "static", index)
            self.statics.append(name)
        for node in attributes:
            name = str(node.target)
            self.env[node] = twins[name] if name in twins else attribute(self.gm, name)
        for position, (node, value) in enumerate(
            zip(placeholders, self.args, strict=True)
        ):
            if isinstance(value, torch.Tensor):
                index = len(self.statics) + len(self.tensor_args)
                name = str(node.target)
                self.env[node] = self._register(value, name, "arg", index)
                self.tensor_args.append(position)
                self.names[index] = names.get(position) or name
            elif isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
                is_float = isinstance(value, (float, torch.SymFloat))
                name = names.get(position) or str(node.target)
                self.env[node] = self.scalars.make(Arg(position, name), is_float)
            else:
                self.env[node] = value

    def _register(self, t: torch.Tensor, name: str, kind: str, index: int) -> Any:
        check_tensor(name, t)
        check_memory(name, t)
        if t.is_conj() or t.is_neg():
            raise CaptureError(f"{name} is a conjugated or negated view")
        twin = self.metas.make(t)
        self.places.add(twin)
        buffer = self.recorder.add_input(twin, name, kind, index, str(t.device))
        # two tensor objects with the same memory have the source of the first
        first = self.origin[id(twin)] = self.recorder.buffers[buffer].source
        if t.requires_grad:
            self.leaves.add(first)
            # `matmul` folds a batch that it multiplies by such a tensor
            twin.requires_grad_()
        if first != index:
            self.twins.append((index, first))
        self.devices[id(twin)] = t.device.type
        if t.dtype in PARTS:
            self.complexes.append(index)
        return twin

    # ---------------------------------------------------------------- nodes

    def run(self) -> Any:
        """Run every node; return the graph's result."""
        nodes = [n for n in self.nodes if n.op.startswith("call")]
        names = tokens(nodes)
        own = switches(nodes)
        if own or autocasts():
            kinds = sorted({"cpu", *self.devices.values()})
            shared = frozenset(i for pair in self.twins for i in pair)
            facts = self.origin, kinds, shared, frozenset(self.leaves)
            self.casting = AutocastRecorder(self.recorder, own, *facts)
        grad_mode = torch.is_grad_enabled()
        try:
            with shapes_of(self.recorder.device_of), torch.no_grad():
                done = 0
                # the replay of a stretch assigns no memory to twins, and ignores
                # contexts
                moves = own or any(map(gives_memory, nodes))
                for begin, end in () if moves else segments(nodes, names):
                    self._run(nodes[done:begin])
                    self._run_segment(nodes[begin:end], names[begin:end])
                    done = end
                self._run(nodes[done:])
        finally:
            torch.set_grad_enabled(grad_mode)
            if self.casting is not None:
                self.casting.close()
        (result,) = (n for n in self.nodes if n.op == "output")
        return self._map(result.args[0])

    def _run(self, nodes: Sequence[Node]) -> None:
        """Record nodes one by one."""
        if not nodes:
            return
        with self.recorder:
            for node in nodes:
                self.recorder.line = source_line(node)
                self.recorder.function = called(node)
                try:
                    self.env[node] = self._node(node)
                except FuseoptError:
                    raise
                except Exception as error:
                    if is_own(error):
                        raise
                    # such as no shape rule on meta, a data-dependent shape, or an
                    # unexpected argument: eager can still run the node
                    raise CaptureError(
                        f"{node.target} cannot be recorded: "
                        f"{type(error).__name__}: {error}\n{self.recorder.line}"
                    ) from error

    def _run_segment(self, nodes: Sequence[Node], names: Sequence[int]) -> None:
        """Record a stretch of nodes, or repeat the recording of an equal stretch."""
        form = incoming = None
        with contextlib.suppress(NoTemplate):
            form = describe(nodes, names)
        if form is not None:
            incoming = self.templates.incoming([self.env[n] for n in form.outside])
        if form is None or incoming is None:
            self._run(nodes)
            return
        if not self.templates.replay(form, nodes, self.env, incoming):
            mark = self.templates.mark()
            self._run(nodes)
            self.templates.learn(form, nodes, self.env, incoming, mark)

    def _map(self, x: Any) -> Any:
        if isinstance(x, Node):
            return self.env[x]
        if isinstance(x, (list, tuple)):
            mapped = [self._map(y) for y in x]
            return tuple(mapped) if isinstance(x, tuple) else mapped
        if isinstance(x, dict):
            return {k: self._map(v) for k, v in x.items()}
        if isinstance(x, slice):
            return slice(self._map(x.start), self._map(x.stop), self._map(x.step))
        return x

    def _node(self, node: Node) -> Any:
        if node.op == "call_module":
            raise CaptureError(f"the graph calls a module ({node.target})")
        if node.op == "call_function" and not _is_known(node.target):
            raise CaptureError(
                f"the graph calls {node.target}, which Dynamo does not trace "
                "(allow_in_graph); its effects on Python objects would happen once, "
                f"during compilation\n{self.recorder.line}"
            )
        if isinstance(node.target, HIGHER_ORDER):
            raise CaptureError(
                f"the update depends on a higher-order op ({node.target})\n"
                f"{self.recorder.line}"
            )
        if node.target is operator.getitem:
            picked = self._map(node.args[0])
            if isinstance(picked, (list, tuple)):
                # picks from a list of all lanes; mapping the whole list each time is
                # quadratic
                return picked[self._map(node.args[1])]
        args, kwargs = self._map(node.args), self._map(node.kwargs)
        if node.op == "call_method":
            if node.target == "item":
                return self._item(args[0])
            scale = kwargs.get(SCALED.get(str(node.target), ""))
            if isinstance(scale, torch.Tensor):
                return self._scaled(str(node.target), args, scale)
        if node.target is torch._foreach_lerp_:
            self._check_lerp(*args[:2])
            weight = args[2] if len(args) > 2 else kwargs["weight"]
            if isinstance(weight, torch.Tensor):
                for s, e in zip(*args[:2], strict=True):
                    if not self.recorder.lerp_listed(s, e, weight):
                        s.lerp_(e, weight)
                return None
        has_numbers = self.scalars.exprs or self.computes
        flat = flatten((args, tuple(kwargs.values()))) if has_numbers else []
        has_sym = any(isinstance(x, (Sym, Computed)) for x in flat)
        if has_sym and moving_size(node):
            raise CaptureError(
                f"a size in the result of {node.target} is a number that changes "
                f"between calls\n{self.recorder.line}"
            )
        of_numbers = has_sym and not any(isinstance(x, torch.Tensor) for x in flat)
        if of_numbers:
            if node.target not in MAKERS and not makes_tensors(node):
                if any(isinstance(x, Computed) for x in flat):
                    return self._compute(node, flat)
                function = _function(node)
                if function is None:
                    raise CaptureError(f"method {node.target} of a number")
                return self.scalars.apply(function, args, kwargs)
        given: frozenset[Any] | None = None
        if has_sym:
            if not hasattr(node.target, OWN):
                given = frozenset(x for x in flat if isinstance(x, (int, float)))
            args, kwargs = self._stand_in(args), self._stand_in(kwargs)
            self.recorder.literals = None
            args = swap(args, self.recorder.constant)
            kwargs = {k: swap(v, self.recorder.constant) for k, v in kwargs.items()}
        self.recorder.literals = given
        if node.target in MAKE_TENSOR:
            return self._constant(node, args, kwargs)
        if node.target in INDEXING:
            args = (args[0], self._index(node, *args[:2]), *args[2:])
        if node.op == "call_method":
            if node.target in ("to", "cpu"):
                args, kwargs = self._placed(str(node.target), args, kwargs)
                return args[0].to(*args[1:], **kwargs)
            return self._call(method(str(node.target)), args, kwargs)
        beyond = self.recorder.beyond
        result = self._call(node.target, args, kwargs)
        if of_numbers and not has_size_of_example(node, result):
            raise CaptureError(f"{node.target} takes its size from numbers that change")
        if hasattr(node.target, OWN):
            # `beyond` covers only calls that Dynamo traced
            self.recorder.beyond = beyond
        return result

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function on meta tensors, under autocast if it is on."""
        if self.casting is None:
            return function(*args, **kwargs)
        return self.casting.call(function, args, kwargs)

    def _placed(self, method: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments of `to` that replace those of `to` or `cpu` on meta tensors.

        The tensor's own device becomes meta, so that a copy is recorded only where
        eager makes one.
        """
        device = torch.device(self.recorder.device_of(args[0]))

        def place(x: Any) -> Any:
            if isinstance(x, (str, torch.device)):
                requested = torch.device(x)
                if requested.type == device.type and requested.index in (
                    None,
                    device.index,
                ):
                    return torch.device("meta")
            return x

        if method == "cpu":
            args = (args[0], "cpu")
        return tuple(map(place, args)), {k: place(v) for k, v in kwargs.items()}

    def _check_lerp(
        self, start: Sequence[torch.Tensor], end: Sequence[torch.Tensor]
    ) -> None:
        """Refuse a foreach lerp of two dtypes as eager does; Dynamo's decomposition
        does not.
        """
        for s, e in zip(start, end, strict=True):
            if s.dtype != e.dtype:
                raise UnsupportedInput(
                    f"lerp expected dtype {s.dtype} for `end` but got {e.dtype}, as in "
                    f"eager: give the gradient the dtype of its state\n"
                    f"{self.recorder.line}"
                )

    def _scaled(
        self, method: str, args: Sequence[torch.Tensor], scale: torch.Tensor
    ) -> torch.Tensor:
        """Record a method whose scale is a tensor."""
        target, *factors = args
        self.recorder.scaled(
            method.removesuffix("_"), target, factors, SCALED[method], scale
        )
        return target

    def _item(self, t: torch.Tensor) -> Sym | Computed | int | float | bool:
        """Record `t.item()`: a Sym for an unwritten argument on the CPU, else a
        Computed.
        """
        if not t.is_meta:
            self.recorder.items += 1
            return t.item()
        position = self.origin.get(id(t), -1)
        is_argument = position >= len(self.statics) and self.devices.get(id(t)) == "cpu"
        is_argument &= (
            self.recorder.buffers[self.recorder.buffer_of(t)].source == position
        )
        if is_argument and self.recorder.unwritten(t):
            self.recorder.items += 1
            item = Item(position, self.names[position])
            return self.scalars.make(item, t.is_floating_point())
        self.computes = True
        self.recorder.literals = None
        return self.recorder.item(t)

    def _compute(self, node: Node, operands: Sequence[Any]) -> Computed:
        """Record Python's arithmetic on numbers that the step computed."""
        function = _function(node)
        op = operation(function) if function is not None else None
        if op is None or not all(
            isinstance(x, (Computed, Sym, int, float)) for x in operands
        ):
            raise CaptureError(
                f"{node.target} of a number that the step reads with .item() from a "
                f"tensor it computed has no rule\n{self.recorder.line}"
            )
        return self.recorder.compute(op, operands, kind_of(op, operands))

    def _index(self, node: Node, of: Any, index: Any) -> Any:
        """Record the lists in the index of a tensor as torch reads them."""
        device = self.recorder.device_of(of)
        whole = {"dtype": torch.int64, "device": device}
        return without_lists(index, lambda x: self._constant(node, (x,), whole))

    def _constant(self, node: Node, args: Any, kwargs: Any) -> torch.Tensor:
        """Record `torch.tensor(number)` as a fill of new memory.

        A list becomes one fill for each number, if the step changes it or one is
        symbolic.
        """
        data, device = args[0], kwargs.get("device")
        if isinstance(data, (list, tuple)):
            keywords = {k: v for k, v in kwargs.items() if k != "requires_grad"}
            numbers = flatten(data)
            is_constant = not any(map(self.recorder.standins.find, numbers))
            if is_constant and not any(
                changes_first(user.target) for user in node.users
            ):
                return torch.tensor(data, **keywords)
            sample = torch.tensor(data, dtype=kwargs.get("dtype"))
            memory = torch.empty(sample.shape, dtype=sample.dtype, device=device)
            for element, x in zip(memory.view(-1).unbind(), numbers, strict=True):
                element.fill_(x)
            return memory
        if not isinstance(data, (int, float)):
            raise CaptureError(
                f"torch.tensor of a {type(data).__name__} inside the step"
            )
        dtype = kwargs.get("dtype")
        if dtype is None:
            whole = torch.bool if isinstance(data, bool) else torch.int64
            is_float = isinstance(data, float)
            dtype = torch.get_default_dtype() if is_float else whole
        memory = torch.empty((), dtype=dtype, device=device)
        return memory.fill_(data)

    def _stand_in(self, x: Any) -> Any:
        if isinstance(x, (Sym, Computed)):
            return self.recorder.standins.of(x)
        if isinstance(x, (list, tuple)):
            return type(x)(self._stand_in(y) for y in x)
        if isinstance(x, dict):
            return {k: self._stand_in(v) for k, v in x.items()}
        return x


def _is_known(target: Any) -> bool:
    """Is a function one of torch, Python or fuseopt, so it changes only tensors?"""
    if hasattr(target, OWN):
        return True
    home = getattr(target, "__module__", None) or type(target).__module__
    return home.partition(".")[0] in PURE


def _function(node: Node) -> Callable[..., Any] | None:
    """Return the function or operator that a node calls; None for other methods."""
    if callable(node.target):
        return node.target
    name = node.target
    return getattr(operator, name, None) if name.startswith("__") else None
