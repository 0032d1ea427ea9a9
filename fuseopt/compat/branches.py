"""Trace both ways of a branch on a number read from a tensor, and choose their results.

Dynamo ends its graph at `if rho_t > 5.0`, since the value is unknown while it traces.
Here both ways of the branch are traced, one after the other, up to the instruction
where they meet. Memory that the first way writes is restored before the second begins.
Afterwards each tensor and number takes the value of the way that the condition selects.
All of it is written as calls that Dynamo's graph supports. So any backend runs it with
the same result.

Some ways do not meet, or do something that no choice can express (change a list,
return, draw a random number). Dynamo then ends its graph there, as it does by itself.
"""

from __future__ import annotations

import dis
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Node

from .layers import traces_for
from .merge_points import NoMergePoint, Place, is_read, leaving, meeting_of
from .names import find
from .patch_state import patch_state
from .patches import Hook, Patcher, patch
from .plain import is_unknown
from .schemas import written
from .symbols import on_instruction
from .tensor_branches import (
    choose,
    note_float,
    refuse_branch,
    tensor_of,
    truth_of,
    watch_choices,
)
from .tracing import tracing

log = logging.getLogger("fuseopt")

JUMPS = ("POP_JUMP_IF", "POP_JUMP_FORWARD_IF", "POP_JUMP_BACKWARD_IF")
RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal_", "uniform_")


@patch(
    "branches",
    "both ways of a branch on an unknown number are traced, and one is chosen",
    "a step with such a branch is compiled in pieces",
)
def BRANCHES(patcher: Patcher) -> None:
    """Make Dynamo trace both ways of branches on unknown numbers.

    Relies on Dynamo's tables from an opcode to the function that traces it, and on how
    its translator keeps a frame's variables.
    """
    base = find("torch._dynamo.symbolic_convert:InstructionTranslatorBase")
    SymNodeVariable = find("torch._dynamo.variables.tensor:SymNodeVariable")
    find("torch._dynamo.variables.base:ValueMutationNew")
    find("torch._dynamo.variables.builder:wrap_fx_proxy")
    find("torch._dynamo.utils:set_example_value")
    backend = patcher.backend
    watch_choices(patcher)

    def jump(original: Hook, self: Any, inst: Any) -> Any:
        if not traces_for(self, backend):
            return original(self, inst)
        if self.indexof[inst] in tracing.one_way.get(self.f_code, ()):
            return original(self, inst)
        value = truth_of(self, self.stack[-1]) or self.stack[-1]
        if isinstance(value, SymNodeVariable) and is_unknown(value.sym_num):
            self.stack[-1] = value
            _Fork(self, inst).run()
            return None
        return original(self, inst)

    for name in dis.opmap:
        if name.startswith(JUMPS) and name.endswith(("TRUE", "FALSE")):
            on_instruction(patcher, base, name, jump)


# ---------------------------------------------------------------- changes of a way


def _memory(node: Node) -> set[int]:
    """Return identities of the storages of a node's tensors."""
    value = node.meta.get("example_value")
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return {t.untyped_storage()._cdata for t in tensors if isinstance(t, torch.Tensor)}


def _root(node: Node, inside: set[Node]) -> Node | None:
    """Return the node outside of `inside` whose memory this node views.

    None if a node inside has allocated that memory.
    """
    while node in inside:
        storages = _memory(node)
        if not storages:
            raise NoMergePoint(f"the analysis has no value for {node}")
        bases = [base for base in node.all_input_nodes if _memory(base) & storages]
        if not bases:
            return None
        node = bases[0]
    return node


def _changed(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes from before `nodes` whose memory these write, each once."""
    inside = set(nodes)
    roots: dict[Node, None] = {}
    for node in nodes:
        name = str(getattr(node.target, "__name__", node.target))
        if any(word in name for word in RANDOM):
            raise NoMergePoint("one of them draws random numbers")
        for target in written(node):
            root = _root(target, inside)
            if root is not None:
                if not isinstance(root.meta.get("example_value"), torch.Tensor):
                    raise NoMergePoint("they change an object that is not a tensor")
                roots[root] = None
    return list(roots)


class _Frame:
    """Snapshot of a frame that Dynamo traces: its variables, stack and blocks."""

    def __init__(self, tx: Any) -> None:
        self.stack = list(tx.stack)
        self.locals = dict(tx.symbolic_locals)
        self.blocks = list(tx.block_stack)

    def put(self, tx: Any) -> None:
        """Restore the stack and the variables."""
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
        except NoMergePoint as reason:
            # trace once more from the beginning; Dynamo then ends its graph here
            log.debug("a branch on a number is left to Dynamo: %s", reason)
            refuse_branch(*self.branch, str(reason))

    def _run(self) -> None:
        tx = self.tx
        tx.pop()
        begin = tx.instruction_pointer
        target = tx.indexof[self.inst.target]
        meetings = patch_state.meetings.setdefault(tx.f_code, {})
        if begin not in meetings:
            meetings[begin] = meeting_of(tx, begin, target, begin - 1)
        meeting = meetings[begin]
        before = _Frame(tx)
        # first the way for a condition that holds
        ways = [target, begin] if "IF_TRUE" in self.inst.opname else [begin, target]
        with self._alone():
            nodes, first = self._way(ways[0], meeting)
            before.put(tx)
            others, second = self._way(ways[1], meeting)
        changed = list(dict.fromkeys([*_changed(nodes), *_changed(others)]))
        if changed:
            self._choose_memory(changed, nodes, others)
        if not isinstance(meeting, int):
            # the second way is before the instruction that leaves; a jump back may be
            # the branch itself
            meeting = meeting[1] if meeting[0] == "back" else tx.instruction_pointer
        self._choose_variables(first, second, meeting)
        tx.instruction_pointer = meeting

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within this context, refuse effects that no choice can express.

        A trace may not end the graph, raise an exception, or change a Python object.
        Objects that the trace itself creates are excepted, such as the arguments that a
        mode passes on. Raises NoMergePoint.
        """
        tx, effects = self.tx, self.tx.output.side_effects
        kind = find("torch._dynamo.variables.base:ValueMutationNew")
        init = kind.__init__
        new: list[Any] = []  # strong references, so that no identity is used again

        def note_new(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            new.append(self)

        def refuse(item: Any) -> bool:
            if any(x is getattr(item, "mutation_type", None) for x in new):
                return True
            raise NoMergePoint("they change a Python object")

        def caught(_: Any) -> None:
            raise NoMergePoint("one of them raises")

        hooks = [
            (tx, "should_compile_partial_graph", lambda: False),
            (tx, "exception_handler", caught),
            (effects, "check_allowed_side_effect", refuse),
        ]
        patches = [(x, name, f) for x, name, f in hooks if name not in vars(x)]
        for x, name, f in patches:
            setattr(x, name, f)
        kind.__init__ = note_new
        try:
            yield
        finally:
            kind.__init__ = init
            for x, name, _ in patches:
                delattr(x, name)

    def _way(self, start: int, end: Place) -> tuple[list[Node], _Frame]:
        """Trace from an instruction up to a place; return the calls and the frame
        there.

        Raises NoMergePoint if the way leaves before that.
        """
        tx = self.tx
        last = next(iter(reversed(self.graph.nodes)))
        blocks = list(tx.block_stack)
        tx.instruction_pointer = start
        while not self._is_there(start, end):
            leaves = leaving(tx.instructions[tx.instruction_pointer], tx) is not None
            if leaves or not self._step() or tx.instruction_pointer is None:
                raise NoMergePoint("one of them leaves")
        if tx.block_stack != blocks:
            raise NoMergePoint("one of them ends inside a different block")
        nodes = self._after(last)
        for node in nodes:
            # an input of the graph belongs to no way
            if not node.op.startswith("call"):
                last.append(node)
                last = node
        return [node for node in nodes if node.op.startswith("call")], _Frame(tx)

    def _step(self) -> bool:
        """Trace one instruction; return whether the frame goes on.

        Raises NoMergePoint if a call raises, since eager may never come this way.
        """
        TorchDynamoException = find("torch._dynamo.exc:TorchDynamoException")
        TorchRuntimeError = find("torch._dynamo.exc:TorchRuntimeError")
        try:
            return bool(self.tx.step())
        except NoMergePoint:
            raise
        except Exception as error:
            dynamos = isinstance(error, TorchDynamoException)
            if dynamos and not isinstance(error, TorchRuntimeError):
                raise
            raise NoMergePoint("one of them raises") from error

    @staticmethod
    def _after(node: Node) -> list[Node]:
        """Return all nodes of the graph that follow one."""
        nodes = []
        while node.next.op != "root":
            node = node.next
            nodes.append(node)
        return nodes

    def _is_there(self, start: int, end: Place) -> bool:
        """Has a way that begins at `start` reached `end`?"""
        pointer = self.tx.instruction_pointer
        if isinstance(end, int):
            return bool(pointer == end)
        if end == ("back", pointer) and pointer == start:
            return True
        return leaving(self.tx.instructions[pointer], self.tx) == end

    # ------------------------------------------------------------ choices

    def _add(self, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
        """Append a call to the graph; `value()` returns its node's example value."""
        op = "call_method" if isinstance(target, str) else "call_function"
        tracer = self.tx.output.current_tracer
        operands = tuple(
            torch.fx.Proxy(x, tracer) if isinstance(x, Node) else x for x in args
        )
        proxy: Any = self.tx.output.create_proxy(op, target, operands, kwargs)
        node: Node = proxy.node
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
        """Return the outcome of the branch: a boolean tensor without dimensions."""
        condition = self._conditions.get(device)
        if condition is None:
            kind: Any = {"dtype": torch.float64, "device": device}
            number = self._add(
                torch.sym_ite,
                (self.value.as_proxy(), 1.0, 0.0),
                {},
                self.tx.output.shape_env.create_unbacked_symfloat,
            )
            self._bind(number)
            tensor = self._add(
                torch.scalar_tensor,
                (number,),
                kind,
                lambda: torch.empty((), **kind),
            )
            example = tensor.meta["example_value"]
            condition = self._add(torch.ne, (tensor, 0.0), {}, lambda: example != 0.0)
            self._conditions[device] = condition
        return condition

    @staticmethod
    def _bind(node: Node) -> None:
        set_example_value = find("torch._dynamo.utils:set_example_value")
        set_example_value(node, node.meta["example_value"])

    def _choose_memory(
        self, changed: Sequence[Node], nodes: Sequence[Node], others: Sequence[Node]
    ) -> None:
        """Make each tensor of `changed` hold what the selected way writes to it.

        `nodes` and `others`: the calls of the two ways, between which the copies go.
        """
        end = next(iter(reversed(self.graph.nodes)))
        originals = [self._copy(node) for node in changed]
        _move(self._after(end), nodes[0] if nodes else others[0])
        # save the writes of the first way, and restore, before the second begins
        results = [self._copy(node) for node in changed]
        for node, copy in zip(changed, originals, strict=True):
            self._write(node, copy)
        if others:
            _move(self._after(end), others[0])
        for node, copy in zip(changed, results, strict=True):
            example = node.meta["example_value"]
            condition = self._condition(example.device)
            chosen = self._add(
                torch.where,
                (condition, copy, node),
                {},
                lambda example=example: example.detach().clone(),
            )
            self._write(node, chosen)

    def _choose_variables(self, first: _Frame, second: _Frame, meeting: int) -> None:
        tx = self.tx
        if len(first.stack) != len(second.stack):
            raise NoMergePoint("they leave stacks of different lengths")
        tx.stack[:] = [
            self._choice(x, y) for x, y in zip(first.stack, second.stack, strict=True)
        ]
        names = [*first.locals, *(k for k in second.locals if k not in first.locals)]
        chosen: dict[str, Any] = {}
        for name in names:
            x, y = first.locals.get(name), second.locals.get(name)
            if x is y:
                chosen[name] = x
            elif is_read(tx, name, meeting):
                if x is None or y is None:
                    raise NoMergePoint(f"{name} is set in one of them")
                chosen[name] = self._choice(x, y)
        tx.symbolic_locals.clear()
        tx.symbolic_locals.update(chosen)

    def _choice(self, x: Any, y: Any) -> Any:
        """Return a variable of Dynamo that is `x` if the condition holds, else `y`."""
        SymNodeVariable = find("torch._dynamo.variables.tensor:SymNodeVariable")
        if x is y:
            return x
        example = tensor_of(x) if tensor_of(y) is not None else None
        if example is not None:
            condition = self._condition(example.device)
            choice = choose(self.tx, condition, x, y, self.branch)
            if choice is None:
                raise NoMergePoint("they leave tensors of different layouts")
            return choice
        numbers = [_number(x), _number(y)]
        if any(n is None for n in numbers):
            raise NoMergePoint("they leave different objects")
        a, b = numbers
        if isinstance(a, (int, float)) and isinstance(b, (int, float)):
            if type(a) is type(b) and repr(a) == repr(b):
                return x
        operands = tuple(
            float(n) if isinstance(n, int) else n if isinstance(n, float) else v.proxy
            for n, v in zip(numbers, (x, y), strict=True)
        )
        proxy = self.tx.output.create_proxy(
            "call_function", torch.sym_ite, (self.value.as_proxy(), *operands), {}
        )
        if any(isinstance(n, int) for n in numbers):
            note_float(self.tx, proxy.node, self.branch)
        symbol = self.tx.output.shape_env.create_unbacked_symfloat()
        return SymNodeVariable.create(self.tx, proxy, symbol)


def _move(nodes: Sequence[Node], before: Node) -> None:
    for node in nodes:
        before.prepend(node)


def _number(x: Any) -> Any:
    """Return the number of a variable: a constant, or a symbol of a float."""
    if x.is_python_constant():
        value = x.as_python_constant()
        return value if type(value) in (int, float) else None
    symbol = getattr(x, "sym_num", None)
    return symbol if isinstance(symbol, torch.SymFloat) else None
