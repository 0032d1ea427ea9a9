"""A captured tail -> the same, whose steps write nothing where they are to be skipped.

What a step writes to memory that existed before it becomes a temp, and behind it stands
a choice between that and what the memory held. In an elementwise step the temp is never
stored: the choice runs in the kernel that computes it, which has both at hand. So a
step is skipped on the device, without a wait for it. Only counters that lie on the CPU
beside parameters of a device wait for the flag, as in eager. In the same way the
gradients that a tail throws away are not written: theirs become temps, with nothing
behind them.
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
from ..ir.graph import (
    Body,
    Buffer,
    Column,
    Extern,
    ForeachSchedulerNode,
    Graph,
    Node,
    read_by,
    written_by,
)
from ..lowering.pointwise import Tensor, lower

#: Instead of the number of a flag: what is written is not kept.
DROPPED = -1
#: It may not be written, for nobody knows which flag it belongs to.
UNKNOWN = -2


def result_buffer(captured: Captured, place: int) -> int:
    """The buffer of one of the tensors that a step returns."""
    found = [*leaves(captured.result)][place]
    if not isinstance(found, Returned):
        raise CaptureError("whether a step is skipped is no tensor")
    return found.buffer


def predicate(
    captured: Captured, modes: Mapping[int, int], flags: Mapping[int, int]
) -> Captured:
    """The same step, whose writes to some sources are kept, chosen or dropped.

    `modes`: of sources, by their place in the pool, the number of the flag with which
    they stay as they are, or DROPPED; of all others writes are kept. `flags`: the
    buffer of each flag, which may be one that the step is given. Raises CaptureError
    where that is not followed: memory that is seen in parts, written by calls that run
    as they are, or given away.
    """
    made = _Predication(captured, modes, flags)
    dropped = tuple([b for b, mode in made.modes.items() if mode == DROPPED])
    graph = made.run()
    return replace(captured, graph=graph, calls=tuple(made.calls), dropped=dropped)


class _Predication:
    def __init__(
        self, captured: Captured, modes: Mapping[int, int], flags: Mapping[int, int]
    ) -> None:
        self.captured = captured
        self.graph = graph = captured.graph
        self.flags = flags
        self.sources = modes
        #: of each buffer that is written and not kept: its flag, or DROPPED
        self.modes = {
            b: modes[buffer.source]
            for b, buffer in enumerate(graph.buffers)
            if buffer.kind in ("static", "arg")
            and buffer.source in modes
            and graph.final[b] >= 0
        }
        #: of these and of what else sees their memory: which of these it is
        self.home = {b: b for b in self.modes}
        near = overlaps(graph.buffers)
        for b in self.modes:
            for other in near.get(b, ()):
                if graph.buffers[other].kind != "view" or other in self.home:
                    raise CaptureError(f"{graph.buffers[b].name} shares memory")
                self.home[other] = b
        #: of each, the last value that a node gives it
        self.last: dict[int, int] = {}
        for node in graph.nodes:
            for v in written_by(node):
                b = graph.values[v]
                if b in self.home:
                    self.last[self.home[b]] = v
        #: values that are chosen, by what they are chosen from; and what then stands
        #: for the values of other buffers that see the same memory
        self.chosen: dict[int, int] = {}
        self.beside: dict[int, dict[int, int]] = {}
        self._bodies: dict[tuple[str, str], Body] = {}
        self.calls = [*captured.calls]
        #: by flag and device, the value of the flag's copy there
        self._copies: dict[tuple[int, str], int] = {}
        self._check()

    def _check(self) -> None:
        """Raise CaptureError unless what is not kept is written by nodes alone, each
        of them all of it.
        """
        graph = self.graph
        written = {graph.values[v] for n in graph.nodes for v in written_by(n)}
        for b, home in self.home.items():
            # a single element is written as a number, whatever shape it has
            if b != home and b in written and graph.buffers[home].numel != 1:
                raise CaptureError(f"{graph.buffers[home].name} is written in parts")
        if UNKNOWN in self.modes.values():
            raise CaptureError("a step writes a tensor that it does not hold")
        if any(x.place in self.sources for x in self.captured.given):
            raise CaptureError("the step gives tensors other memory")
        for node in graph.nodes:
            if not isinstance(node, Extern):
                continue
            for v in (*node.reads, *node.writes):
                b = graph.values[v]
                if b in self.home and (v != graph.initial[b] or v in node.writes):
                    raise CaptureError(
                        f"{node.name} runs as it is, with what may be skipped\n"
                        f"{node.line}"
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
            begin = buffers[home].offset
            buffers.append(_temp(buffers[b], storage[home], begin))
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
        last: dict[int, int] = {}  # of each buffer, the value that was written last
        for node in graph.nodes:
            last.update((graph.values[v], v) for v in written_by(node))
        call = 1 + max((_call(n) for n in graph.nodes), default=0)
        done: set[int] = set()  # what was written so far
        #: of buffers whose last value was chosen, what they hold since then
        holds: dict[int, int] = {}
        for node in graph.nodes:
            yield self._reading(node, holds)
            written = tuple(written_by(node))
            done.update(written)
            choices: dict[tuple[int, str, str], list[int]] = {}
            for v in written:
                if v in chosen:
                    b = graph.values[v]
                    x = graph.buffers[b]
                    key = self.modes[self.home[b]], x.dtype, x.device
                    choices.setdefault(key, []).append(v)
            for (mode, dtype, device), own in choices.items():
                assert not isinstance(node, Extern)
                b = self.flags[mode]
                flag = last.get(b, graph.initial[b])
                if flag != graph.initial[b] and flag not in done:
                    raise CaptureError("a step begins before it is known to run")
                for v in own:
                    holds[graph.values[v]] = chosen[v]
                    holds.update(self.beside[v])
                if device != graph.buffers[b].device:
                    if (mode, device) not in self._copies:
                        yield self._copy(mode, device, flag, node.line)
                    flag = self._copies[mode, device]
                yield ForeachSchedulerNode(
                    self._body(graph.buffers[self.flags[mode]].dtype, dtype),
                    (
                        (flag,) * len(own),
                        tuple([graph.initial[graph.values[v]] for v in own]),
                        tuple(own),
                    ),
                    (),
                    (tuple([chosen[v] for v in own]),),
                    call,
                    node.line,
                )
                call += 1

    def _copy(self, mode: int, device: str, flag: int, line: str) -> Extern:
        """A call that copies a flag to another device."""
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
        place = {"device": torch.device(device)}
        made = len(self._buffers)
        self._buffers.append(buffer)
        self.calls.append(
            Call(func, (TensorRef(b),), place, (made,), frozenset({made}))
        )
        why = "a flag of the device, asked on the CPU"
        written = (self._copies[mode, device],)
        return Extern(str(func), (flag,), written, len(self.calls) - 1, why, line)

    def _body(self, flag: str, dtype: str) -> Body:
        key = flag, dtype
        if key not in self._bodies:
            operands = Tensor(flag, True), Tensor(dtype), Tensor(dtype)
            made = lower("where", operands, dtype, dtype)
            assert made is not None
            self._bodies[key] = made
        return self._bodies[key]

    def _reading(self, node: Node, holds: dict[int, int]) -> Node:
        """A node that reads what was chosen where it read what was written."""
        values = self.graph.values
        if not any(values[v] in holds for v in read_by(node)):
            return node
        assert not isinstance(node, Extern)

        def column(own: Column) -> Column:
            return tuple([holds.get(values[v], v) for v in own])

        return node._replace(reads=tuple(map(column, node.reads)))


def _call(node: Node) -> int:
    return -1 if isinstance(node, Extern) else node.call


def _temp(buffer: Buffer, storage: int, begin: int) -> Buffer:
    """Memory of the step's own, in the layout of another buffer, of whose storage it
    has what lies behind `begin`.
    """
    name, offset = f"{buffer.name}_next", buffer.offset - begin
    return buffer._replace(
        name=name, kind="temp", source=-1, storage=storage, offset=offset
    )
