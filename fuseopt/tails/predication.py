"""Predicate the writes of a captured tail: skip steps on the device, by a flag.

A temp replaces each buffer that a step writes, and that existed before it. A `where`
then selects between the temp and the old contents. In an elementwise step the temp is
never stored: the `where` runs in the kernel that computes it. So the host does not wait
for the flag, unless counters lie on the CPU beside parameters of another device, as in
eager. Gradients that are dropped after the call are not written: their writes become
unread temps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ..capture.aten.externs import Call, TensorRef
from ..capture.results import Returned, leaves
from ..capture.trace import Captured
from ..errors import CaptureError
from ..ir.alias import overlaps
from ..ir.blocks import write_by_block
from ..ir.graph import (
    DTYPE_BYTES,
    Body,
    Buffer,
    Column,
    Extern,
    ForeachSchedulerNode,
    Graph,
    Instr,
    Node,
    read_by,
    written_by,
)
from ..lowering.pointwise import Tensor, lower

#: Mode in place of a flag's number: the writes are dropped.
DROPPED = -1
#: Mode of a buffer that must not be written, since its flag is unknown.
UNKNOWN = -2


def result_buffer(captured: Captured, place: int) -> int:
    """Return the buffer of the returned tensor with index `place`. Raises CaptureError
    if it is no tensor.
    """
    result = [*leaves(captured.result)][place]
    if not isinstance(result, Returned):
        raise CaptureError("the flag that skips a step is not a tensor")
    return result.buffer


def predicate(
    captured: Captured, modes: Mapping[int, int], flags: Mapping[int, int]
) -> Captured:
    """Return the same step, with writes to some sources dropped or made to depend on a
    flag.

    `modes` is for sources, by their index in the pool. A source has the number of the
    flag that is true if it keeps its contents, or DROPPED. The step writes other
    sources as before. `flags` has the buffer of each flag, which may be an input.
    Raises CaptureError for memory of which views are written, that externs write, or
    that the step replaces.
    """
    predication = _Predication(captured, modes, flags)
    dropped = tuple([b for b, mode in predication.modes.items() if mode == DROPPED])
    graph = predication.run()
    return replace(
        captured, graph=graph, calls=tuple(predication.calls), dropped=dropped
    )


class _Predication:
    def __init__(
        self, captured: Captured, modes: Mapping[int, int], flags: Mapping[int, int]
    ) -> None:
        self.captured = captured
        self.graph = graph = captured.graph
        self.flags = flags
        self.sources = modes
        #: for each written buffer whose writes are predicated: its flag, or DROPPED
        self.modes = {
            b: modes[buffer.source]
            for b, buffer in enumerate(graph.buffers)
            if buffer.kind in ("static", "arg")
            and buffer.source in modes
            and graph.final[b] >= 0
        }
        #: for these buffers and for views of their memory: the buffer
        self.home = {b: b for b in self.modes}
        near = overlaps(graph.buffers)
        for b in self.modes:
            for other in near.get(b, ()):
                if graph.buffers[other].kind != "view" or other in self.home:
                    raise CaptureError(f"{graph.buffers[b].name} shares memory")
                self.home[other] = b
        #: for each of them, the last value that a node writes
        self.last: dict[int, int] = {}
        for node in graph.nodes:
            for v in written_by(node):
                b = graph.values[v]
                if b in self.home:
                    self.last[self.home[b]] = v
        #: for each last value, the value that the `where` gives; and for each, the
        #: later values of views of the same memory
        self.chosen: dict[int, int] = {}
        self.beside: dict[int, dict[int, int]] = {}
        self._bodies: dict[tuple[str, str], Body] = {}
        self.calls = [*captured.calls]
        #: the value of a flag's copy, by flag and device
        self._copies: dict[tuple[int, str], int] = {}
        self._check()

    def _check(self) -> None:
        """Raise CaptureError unless the predicated buffers are written only by nodes,
        and each of these writes the whole buffer.
        """
        graph = self.graph
        written = {graph.values[v] for n in graph.nodes for v in written_by(n)}
        for b, home in self.home.items():
            if b != home and b in written and not self._is_whole(b, home):
                raise CaptureError(f"{graph.buffers[home].name} is written in parts")
        if UNKNOWN in self.modes.values():
            raise CaptureError("a step writes a tensor that it does not hold")
        if any(x.place in self.sources for x in self.captured.given):
            raise CaptureError("the step replaces the memory of tensors")
        for node in graph.nodes:
            if not isinstance(node, Extern):
                continue
            for v in (*node.reads, *node.writes):
                b = graph.values[v]
                if b in self.home and (v != graph.initial[b] or v in node.writes):
                    raise CaptureError(
                        f"{node.name} runs as an ATen call on tensors of a step that "
                        f"may be skipped\n{node.line}"
                    )

    def _is_whole(self, b: int, home: int) -> bool:
        """Has a view all of a buffer's elements, in the same places?"""
        view, whole = self.graph.buffers[b], self.graph.buffers[home]
        # a single element is written as a number, whatever shape it has
        return whole.numel == 1 or (
            DTYPE_BYTES[view.dtype] == DTYPE_BYTES[whole.dtype]
            and (view.shape, view.stride, view.offset)
            == (whole.shape, whole.stride, whole.offset)
        )

    def run(self) -> Graph:
        graph = self.graph
        buffers, values = self._buffers, self._values = (
            list(graph.buffers),
            list(graph.values),
        )
        initial, final = list(graph.initial), list(graph.final)
        storages = 1 + max((b.storage for b in buffers), default=0)
        temps: dict[int, int] = {}
        storage: dict[int, int] = {}
        for b, home in self.home.items():
            temps[b] = len(buffers)
            storage.setdefault(home, storages + len(storage))
            start = buffers[home].offset
            buffers.append(_temp(buffers[b], storage[home], start))
            initial.append(-1)
            final.append(-1)
            final[b] = -1
        for home, mode in self.modes.items():
            if mode == DROPPED:
                continue
            v = self.last[home]
            target = graph.values[v]
            final[target] = self.chosen[v] = len(values)
            values.append(target)
            self.beside[v] = {}
            for b in temps:
                if b != target and self.home[b] == home:
                    self.beside[v][b] = final[b] = len(values)
                    values.append(b)
        for v, b in enumerate(graph.values):
            if b in temps and v != graph.initial[b]:
                values[v] = temps[b]
        nodes = tuple(self._nodes())
        new = [-1] * (len(buffers) - len(initial))
        initial += new
        final += new
        return replace(
            graph,
            buffers=tuple(buffers),
            values=tuple(values),
            nodes=nodes,
            initial=tuple(initial),
            final=tuple(final),
        )

    def _nodes(self) -> Iterator[Node]:
        graph, chosen = self.graph, self.chosen
        last: dict[int, int] = {}  # for each buffer, the value that is written last
        for node in graph.nodes:
            last.update((graph.values[v], v) for v in written_by(node))
        call = 1 + max((_call(n) for n in graph.nodes), default=0)
        written_values: set[int] = set()  # written so far
        #: the current value of buffers whose `where` has run
        holds: dict[int, int] = {}
        for node in graph.nodes:
            node = self._reading(node, holds)
            written = tuple(written_by(node))
            if any(v in chosen for v in written) and _by_block(node):
                assert not isinstance(node, Extern)
                yield self._of_blocks(node, last)
                holds.update((graph.values[v], chosen[v]) for v in written)
                continue
            yield node
            written_values.update(written)
            choices: dict[tuple[int, str, str], list[int]] = {}
            for v in written:
                if v in chosen:
                    b = graph.values[v]
                    buffer = graph.buffers[b]
                    key = self.modes[self.home[b]], buffer.dtype, buffer.device
                    choices.setdefault(key, []).append(v)
            for (mode, dtype, device), chosen_here in choices.items():
                assert not isinstance(node, Extern)
                b = self.flags[mode]
                flag = last.get(b, graph.initial[b])
                if flag != graph.initial[b] and flag not in written_values:
                    raise CaptureError("a step begins before its skip is decided")
                for v in chosen_here:
                    holds[graph.values[v]] = chosen[v]
                    holds.update(self.beside[v])
                if device != graph.buffers[b].device:
                    if (mode, device) not in self._copies:
                        yield self._copy(mode, device, flag, node.line)
                    flag = self._copies[mode, device]
                yield ForeachSchedulerNode(
                    self._body(graph.buffers[self.flags[mode]].dtype, dtype),
                    (
                        (flag,) * len(chosen_here),
                        tuple([graph.initial[graph.values[v]] for v in chosen_here]),
                        tuple(chosen_here),
                    ),
                    (),
                    (tuple([chosen[v] for v in chosen_here]),),
                    call,
                    node.line,
                )
                call += 1

    def _of_blocks(self, node: ForeachSchedulerNode, last: Mapping[int, int]) -> Node:
        """Return a node that writes a number for each block: the old one if the flag is
        true. Raises CaptureError if some of its rows have no flag.
        """
        graph = self.graph
        written = tuple(written_by(node))
        if not all(v in self.chosen for v in written):
            raise CaptureError(f"a flag keeps some numbers of blocks\n{node.line}")
        buffers = [graph.values[v] for v in written]
        flag_buffers = [self.flags[self.modes[self.home[b]]] for b in buffers]
        devices = [
            {graph.buffers[b].device for b in x} for x in (flag_buffers, buffers)
        ]
        if devices[0] != devices[1] or not last.keys().isdisjoint(flag_buffers):
            raise CaptureError(f"a flag of blocks is no input there\n{node.line}")
        flags = tuple([graph.initial[b] for b in flag_buffers])
        old = tuple([graph.initial[b] for b in buffers])
        new = tuple([self.chosen[v] for v in written])
        body = self._body_of_blocks(node.body, graph.buffers[flag_buffers[0]].dtype)
        return node._replace(body=body, reads=(*node.reads, flags, old), writes=(new,))

    def _body_of_blocks(self, body: Body, flag: str) -> Body:
        key = f"{body.instrs[-1].attr} {flag}", body.reads[0]
        if key not in self._bodies:
            (dtype,), size = body.reads, body.instrs[-1].attr
            instrs = (
                Instr("load", (), dtype, 0),
                Instr("load", (), flag, 1),
                Instr("load", (), dtype, 2),
                Instr("spread", (2,), dtype, size),
                Instr("where", (1, 3, 0), dtype),
                Instr("first", (4,), dtype, size),
            )
            reads = dtype, flag, dtype
            self._bodies[key] = Body("where_first", reads, 0, instrs, ((5, dtype),))
        return self._bodies[key]

    def _copy(self, mode: int, device: str, flag: int, line: str) -> Extern:
        """Return an extern that copies a flag to another device."""
        b = self.flags[mode]
        buffer = self._buffers[b]._replace(
            name=f"{self._buffers[b].name}_{device.split(':')[0]}",
            kind="temp",
            source=-1,
            offset=0,
            storage=1 + max(x.storage for x in self._buffers),
            device=device,
        )
        self._copies[mode, device] = len(self._values)
        self._values.append(len(self._buffers))
        func = torch.ops.aten._to_copy.default
        keywords = {"device": torch.device(device)}
        copy = len(self._buffers)
        self._buffers.append(buffer)
        self.calls.append(
            Call(func, (TensorRef(b),), keywords, (copy,), frozenset({copy}))
        )
        why = "a flag of the device, read on the CPU"
        written = (self._copies[mode, device],)
        return Extern(str(func), (flag,), written, len(self.calls) - 1, why, line)

    def _body(self, flag: str, dtype: str) -> Body:
        key = flag, dtype
        if key not in self._bodies:
            operands = Tensor(flag, True), Tensor(dtype), Tensor(dtype)
            body = lower("where", operands, dtype, dtype)
            assert body is not None
            self._bodies[key] = body
        return self._bodies[key]

    def _reading(self, node: Node, holds: dict[int, int]) -> Node:
        """Return the node, reading the results of `where` for predicated buffers."""
        values = self.graph.values
        if not any(values[v] in holds for v in read_by(node)):
            return node
        assert not isinstance(node, Extern)

        def column(column_of_values: Column) -> Column:
            return tuple([holds.get(values[v], v) for v in column_of_values])

        return node._replace(reads=tuple(map(column, node.reads)))


def _by_block(node: Node) -> bool:
    """Does a node write a number for each block of elements?"""
    return not isinstance(node, Extern) and bool(write_by_block(node.body, 0))


def _call(node: Node) -> int:
    return -1 if isinstance(node, Extern) else node.call


def _temp(buffer: Buffer, storage: int, start: int) -> Buffer:
    """Return a temp with the layout of a buffer; its storage begins at the offset
    `start` of the buffer's storage.
    """
    name, offset = f"{buffer.name}_next", buffer.offset - start
    return buffer._replace(
        name=name, kind="temp", source=-1, storage=storage, offset=offset
    )
