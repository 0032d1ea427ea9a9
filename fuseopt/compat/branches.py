"""A branch on a number that a step reads from a tensor: both ways, and a choice.

Dynamo ends its graph at `if rho_t > 5.0`, since nobody knows the number while it
traces. Here both ways are traced, one after the other, up to where they meet: what
they change in memory is put back in between, and each tensor and number then takes the
value of the way that the branch would have taken. All of it is written in calls that
Dynamo's graph may hold anyway, so whatever runs that graph does the same.

Where the ways do not meet, or do what cannot be chosen from (change a list, return,
draw a random number), Dynamo does as ever.
"""

from __future__ import annotations

import dis
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node

from .dynamo import leads_to
from .meetings import Place, Refused, is_read, leaving, meeting_of
from .plain import is_unknown
from .schemas import written
from .tensor_branches import (
    choose,
    refuse_branch,
    tensor_of,
    truth_of,
    watch_choices,
)
from .watched import watched

log = logging.getLogger("fuseopt")

JUMPS = ("POP_JUMP_IF", "POP_JUMP_FORWARD_IF", "POP_JUMP_BACKWARD_IF")
RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal_", "uniform_")


def trace_branches(backend: Callable[..., Any]) -> None:
    """Where Dynamo traces for `backend`: both ways of branches on unknown numbers.

    Relies on the tables by which Dynamo finds what traces an instruction, and on how
    it keeps a frame's variables; where they are others, such a branch ends the graph.
    """
    try:
        from torch._dynamo import symbolic_convert
        from torch._dynamo.variables.tensor import SymNodeVariable

        classes = [symbolic_convert.InstructionTranslatorBase]
        for c in classes:
            classes += c.__subclasses__()
        codes = [
            code
            for name, code in dis.opmap.items()
            if name.startswith(JUMPS) and name.endswith(("TRUE", "FALSE"))
        ]
        tables = {id(c.dispatch_table): c.dispatch_table for c in classes}
        watch_choices()
    except (ImportError, AttributeError):
        return

    def both(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def jump(self: Any, inst: Any) -> Any:
            if not leads_to(getattr(self.output, "compiler_fn", None), backend):
                return own(self, inst)
            if self.indexof[inst] in watched.one_way.get(self.f_code, ()):
                return own(self, inst)
            value = truth_of(self, self.stack[-1]) or self.stack[-1]
            if isinstance(value, SymNodeVariable) and is_unknown(value.sym_num):
                self.stack[-1] = value
                _Fork(self, inst).run()
                return None
            return own(self, inst)

        return jump

    for table in tables.values():
        for code in codes:
            own: Any = table[code]
            if own is not None:
                table[code] = both(own)


# ---------------------------------------------------------------- what a way changes


def _memory(node: Node) -> set[int]:
    value = node.meta.get("example_value")
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return {t.untyped_storage()._cdata for t in tensors if isinstance(t, torch.Tensor)}


def _root(node: Node, inside: set[Node]) -> Node | None:
    """The node of before a way whose memory this one is; None if the way made it."""
    while node in inside:
        own = _memory(node)
        if not own:
            raise Refused(f"nothing is known of {node}")
        same = [x for x in node.all_input_nodes if _memory(x) & own]
        if not same:
            return None
        node = same[0]
    return node


def _changed(nodes: Sequence[Node]) -> list[Node]:
    """What of before these nodes they change, each once."""
    inside = set(nodes)
    found: dict[Node, None] = {}
    for node in nodes:
        name = str(getattr(node.target, "__name__", node.target))
        if any(word in name for word in RANDOM):
            raise Refused("one of them draws random numbers")
        for target in written(node):
            root = _root(target, inside)
            if root is not None:
                if not isinstance(root.meta.get("example_value"), torch.Tensor):
                    raise Refused("they change what is no tensor")
                found[root] = None
    return list(found)


class _Frame:
    """The variables of a frame, and what lies on its stack."""

    def __init__(self, tx: Any) -> None:
        self.stack = list(tx.stack)
        self.locals = dict(tx.symbolic_locals)
        self.blocks = list(tx.block_stack)

    def put(self, tx: Any) -> None:
        tx.stack[:] = self.stack
        tx.symbolic_locals.clear()
        tx.symbolic_locals.update(self.locals)


class _Fork:
    """Traces both ways of one branch of a frame that Dynamo is in."""

    def __init__(self, tx: Any, inst: Any) -> None:
        self.tx = tx
        self.inst = inst
        self.graph: torch.fx.Graph = tx.output.graph
        self.value = tx.stack[-1]
        self._conditions: dict[torch.device, Node] = {}
        self.branch = tx.f_code, tx.indexof[inst]

    def run(self) -> None:
        try:
            self._run()
        except Refused as reason:
            # once more from the beginning, and here as ever
            log.debug("a branch on a number is left to Dynamo: %s", reason)
            refuse_branch(*self.branch, str(reason))

    def _run(self) -> None:
        tx = self.tx
        tx.pop()
        begin = tx.instruction_pointer
        target = tx.indexof[self.inst.target]
        known = watched.meetings.setdefault(tx.f_code, {})
        if begin not in known:
            known[begin] = meeting_of(tx, begin, target, begin - 1)
        meeting = known[begin]
        before = _Frame(tx)
        # which one is taken where the condition holds
        ways = [target, begin] if "IF_TRUE" in self.inst.opname else [begin, target]
        with self._alone():
            nodes, first = self._way(ways[0], meeting)
            before.put(tx)
            others, second = self._way(ways[1], meeting)
        changed = list(dict.fromkeys([*_changed(nodes), *_changed(others)]))
        if changed:
            self._choose_memory(changed, nodes, others)
        if not isinstance(meeting, int):
            # the second way stands before what leaves; to go back may be the jump
            meeting = meeting[1] if meeting[0] == "back" else tx.instruction_pointer
        self._choose_variables(first, second, meeting)
        tx.instruction_pointer = meeting

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """What is traced within stays in one graph and changes no Python object but
        those that it makes, such as the arguments that a mode hands on.
        """
        tx, effects = self.tx, self.tx.output.side_effects
        kind: Any = importlib.import_module("torch._dynamo.variables.base")
        kind = kind.ValueMutationNew
        begin = kind.__init__
        own: list[Any] = []  # kept, so that no other comes to lie where one lay

        def made_here(self: Any, *args: Any, **kwargs: Any) -> None:
            begin(self, *args, **kwargs)
            own.append(self)

        def refuse(item: Any) -> bool:
            if any(x is getattr(item, "mutation_type", None) for x in own):
                return True
            raise Refused("they change an object of Python's")

        def caught(_: Any) -> None:
            raise Refused("one of them raises")

        wanted = [
            (tx, "should_compile_partial_graph", lambda: False),
            (tx, "exception_handler", caught),
            (effects, "check_allowed_side_effect", refuse),
        ]
        made = [(x, name, f) for x, name, f in wanted if name not in vars(x)]
        for x, name, f in made:
            setattr(x, name, f)
        kind.__init__ = made_here
        try:
            yield
        finally:
            kind.__init__ = begin
            for x, name, _ in made:
                delattr(x, name)

    def _way(self, start: int, end: Place) -> tuple[list[Node], _Frame]:
        """Trace from an instruction up to a place; the nodes, and how it ends."""
        tx = self.tx
        last = next(iter(reversed(self.graph.nodes)))
        blocks = list(tx.block_stack)
        tx.instruction_pointer = start
        while not self._is_there(start, end):
            leaves = leaving(tx.instructions[tx.instruction_pointer], tx) is not None
            if leaves or not tx.step() or tx.instruction_pointer is None:
                raise Refused("one of them leaves")
        if tx.block_stack != blocks:
            raise Refused("one of them ends within another block")
        nodes = self._after(last)
        for node in nodes:
            if not node.op.startswith("call"):  # what the graph is given was before
                last.append(node)
                last = node
        return [node for node in nodes if node.op.startswith("call")], _Frame(tx)

    @staticmethod
    def _after(node: Node) -> list[Node]:
        """All nodes of the graph that follow one."""
        found = []
        while node.next.op != "root":
            node = node.next
            found.append(node)
        return found

    def _is_there(self, start: int, end: Place) -> bool:
        now = self.tx.instruction_pointer
        if isinstance(end, int):
            return bool(now == end)
        if end == ("back", now) and now == start:
            return True
        return leaving(self.tx.instructions[now], self.tx) == end

    # ------------------------------------------------------------ choices

    def _add(self, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
        """A node of the graph where it stands; `value`: what the trace takes it for."""
        op = "call_method" if isinstance(target, str) else "call_function"
        tracer = self.tx.output.current_tracer
        given = tuple(
            torch.fx.Proxy(x, tracer) if isinstance(x, Node) else x for x in args
        )
        made: Any = self.tx.output.create_proxy(op, target, given, kwargs)
        node: Node = made.node
        with self.tx.fake_mode, torch.no_grad():
            node.meta["example_value"] = value()
        return node

    def _copy(self, node: Node) -> Node:
        example = node.meta["example_value"]
        return self._add("clone", (node,), {}, lambda: example.detach().clone())

    def _write(self, node: Node, source: Node) -> None:
        example = node.meta["example_value"]
        self._add("copy_", (node, source), {}, lambda: example)

    def _condition(self, device: torch.device) -> Node:
        """The outcome, as a tensor."""
        known = self._conditions.get(device)
        if known is None:
            kind: Any = {"dtype": torch.float64, "device": device}
            number = self._add(
                torch.sym_ite,
                (self.value.as_proxy(), 1.0, 0.0),
                {},
                self.tx.output.shape_env.create_unbacked_symfloat,
            )
            self._bind(number)
            made = self._add(
                torch.scalar_tensor,
                (number,),
                kind,
                lambda: torch.empty((), **kind),
            )
            example = made.meta["example_value"]
            known = self._add(torch.ne, (made, 0.0), {}, lambda: example != 0.0)
            self._conditions[device] = known
        return known

    @staticmethod
    def _bind(node: Node) -> None:
        from torch._dynamo.utils import set_example_value

        set_example_value(node, node.meta["example_value"])

    def _choose_memory(
        self, changed: Sequence[Node], nodes: Sequence[Node], others: Sequence[Node]
    ) -> None:
        """Each tensor takes what it would have held."""
        end = next(iter(reversed(self.graph.nodes)))
        held = [self._copy(x) for x in changed]
        _move(self._after(end), nodes[0] if nodes else others[0])
        # what the first way left, and back again, before the second begins
        left = [self._copy(x) for x in changed]
        for x, y in zip(changed, held, strict=True):
            self._write(x, y)
        if others:
            _move(self._after(end), others[0])
        for x, y in zip(changed, left, strict=True):
            example = x.meta["example_value"]
            condition = self._condition(example.device)
            chosen = self._add(
                torch.where,
                (condition, y, x),
                {},
                lambda example=example: example.detach().clone(),
            )
            self._write(x, chosen)

    def _choose_variables(self, first: _Frame, second: _Frame, meeting: int) -> None:
        tx = self.tx
        if len(first.stack) != len(second.stack):
            raise Refused("they leave stacks of other lengths")
        tx.stack[:] = [
            self._choice(x, y) for x, y in zip(first.stack, second.stack, strict=True)
        ]
        names = [*first.locals, *(k for k in second.locals if k not in first.locals)]
        found: dict[str, Any] = {}
        for name in names:
            x, y = first.locals.get(name), second.locals.get(name)
            if x is y:
                found[name] = x
            elif is_read(tx, name, meeting):
                if x is None or y is None:
                    raise Refused(f"{name} is set in one of them")
                found[name] = self._choice(x, y)
        tx.symbolic_locals.clear()
        tx.symbolic_locals.update(found)

    def _choice(self, x: Any, y: Any) -> Any:
        """A variable that is one or the other."""
        from torch._dynamo.variables.tensor import SymNodeVariable

        if x is y:
            return x
        known = tensor_of(x) if tensor_of(y) is not None else None
        if known is not None:
            condition = self._condition(known.device)
            made = choose(self.tx, condition, x, y, self.branch)
            if made is None:
                raise Refused("they leave tensors that are unlike")
            return made
        numbers = [_number(x), _number(y)]
        if any(n is None for n in numbers):
            raise Refused("they leave other objects")
        a, b = numbers
        if isinstance(a, (int, float)) and isinstance(b, (int, float)):
            if type(a) is type(b) and repr(a) == repr(b):
                return x
        given = tuple(
            float(n) if isinstance(n, int) else n if isinstance(n, float) else v.proxy
            for n, v in zip(numbers, (x, y), strict=True)
        )
        proxy = self.tx.output.create_proxy(
            "call_function", torch.sym_ite, (self.value.as_proxy(), *given), {}
        )
        symbol = self.tx.output.shape_env.create_unbacked_symfloat()
        return SymNodeVariable.create(self.tx, proxy, symbol)


def _move(nodes: Sequence[Node], before: Node) -> None:
    for node in nodes:
        before.prepend(node)


def _number(x: Any) -> Any:
    """The number that a variable is: a constant, or a symbol of a float."""
    if x.is_python_constant():
        value = x.as_python_constant()
        return value if type(value) in (int, float) else None
    symbol = getattr(x, "sym_num", None)
    return symbol if isinstance(symbol, torch.SymFloat) else None
