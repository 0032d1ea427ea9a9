"""What recording one lane of a loop has added -> the same for a lane that is alike.

The body of a for-loop over parameters is recorded once, with torch's shape rules and
all; `Templates.replay` writes what that added again, for other tensors, without a call
to torch. Two lanes are alike if their form is (see `segments`) and if nothing that
recording depends on tells their tensors apart: dtype, layout, device, what is known of
their memory. Where every call is pointwise over one shape, that shape does not count.

A template is only made of what a lane does to its own tensors: of a body that keeps a
call as it is, reads a number on the host with `.item()`, or makes views of what comes
in, each lane is recorded as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ...ir.geometry import Shape, contiguous_strides, numel
from ...ir.graph import Buffer, SchedulerNode
from ..aten.dtypes import NAMED_DTYPES, PARTS
from ..aten.recorder import Recorder
from ..scalars.device import Computed, NumberRef
from ..scalars.host import Sym
from .segments import Form, Unlike


class Incoming(NamedTuple):
    """What comes into a stretch: `buffers` of its tensors, in order of first use.

    `exact` is equal for what recording cannot tell apart; `alike` too where calls are
    pointwise, or None. `shape` is that of all tensors with dimensions, if they agree.
    """

    buffers: tuple[int, ...]
    exact: tuple[Any, ...]
    alike: tuple[Any, ...] | None
    shape: Shape | None


class NewBuffer(NamedTuple):
    """Memory that a stretch makes; `storage`: the first buffer in the same storage.

    `whole`: it has the shape of what comes in.
    """

    buffer: Buffer
    storage: int
    whole: bool


@dataclass(frozen=True)
class Template:
    """What a stretch adds. Buffers and values count from its first own one; those of
    what comes in have negative numbers, from -1 down; then follow `given`, the values
    (buffer, value) of other memory that it reads.

    `leaving`: what each value used elsewhere is: the position of what came in, from -1
    down, the number of a new buffer (as a NumberRef where it is a number), or a Sym.
    `held`: what each new buffer holds at the end (None if nothing); `left`: what a
    buffer that came in does, and is.
    """

    buffers: tuple[NewBuffer, ...]
    values: tuple[int, ...]
    nodes: tuple[SchedulerNode, ...]
    calls: int
    given: tuple[tuple[int, int], ...]
    held: tuple[int | None, ...]
    left: tuple[tuple[int, int], ...]
    leaving: tuple[int | Sym | NumberRef, ...]


class _Mark(NamedTuple):
    """How far a recorder was before a stretch."""

    buffers: int
    values: int
    nodes: int
    call: int
    current: tuple[int, ...]
    others: int
    sizes: tuple[int, ...]


class Templates:
    """The templates of one capture; see the module."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._known: dict[Any, Template] = {}
        self.replayed = 0

    def incoming(self, values: Sequence[Any]) -> Incoming | None:
        """What is known of the values that come in; None if they cannot be alike."""
        r = self.recorder
        buffers: dict[int, int] = {}
        objects: dict[int, int] = {}
        exact: list[Any] = []
        alike: list[Any] = []
        shape: Shape | None = None
        pointwise = True
        for x in values:
            if not isinstance(x, torch.Tensor) or not x.is_meta:
                exact.append(id(x))  # one and the same number, or other tensor
                alike.append(id(x))
                continue
            b = r.known(x)
            if b is None or x.dtype in PARTS or not r.alone(b):
                return None
            own = r.buffers[b]
            value = r.current[b]
            facts = (
                own.dtype,
                own.device,
                own.kind,
                value < 0,
                value == r.initial[b],
                buffers.setdefault(b, len(buffers)),
                objects.setdefault(id(x), len(objects)),
            )
            exact.append((own.shape, own.stride, own.offset, *facts))
            alike.append(facts)
            if own.shape != ():
                shape = shape or own.shape
                pointwise &= own.shape == shape and _is_plain(own)
            alike.append(own.shape == ())
        if shape is None or not pointwise or numel(shape) < 2:
            return Incoming(tuple(buffers), tuple(exact), None, shape)
        ones = tuple([n == 1 for n in shape])
        return Incoming(tuple(buffers), tuple(exact), (ones, *alike), shape)

    # ---------------------------------------------------------------- again

    def replay(
        self, form: Form, nodes: Sequence[Node], env: dict[Node, Any], came: Incoming
    ) -> bool:
        """Add what an equal stretch added, and what of it is used elsewhere to `env`;
        False if none was recorded.
        """
        found = self._known.get((form.key, came.exact))
        if found is None and came.alike is not None:
            found = self._known.get((form.key, came.alike))
        r = self.recorder
        if found is None or any(r.current[b] != v for b, v in found.given):
            return False
        self.replayed += 1
        first, value = len(r.buffers), len(r.values)
        outer = [r.current[b] for b in came.buffers]
        outer += [v for _, v in found.given]
        own = came.buffers
        for k, new in enumerate(found.buffers):
            shape, stride = new.buffer.shape, new.buffer.stride
            if new.whole and came.shape is not None and shape != came.shape:
                shape, stride = came.shape, contiguous_strides(came.shape)
            r.buffers.append(
                new.buffer._replace(
                    name=f"t{first + k}",
                    shape=shape,
                    stride=stride,
                    storage=-1 - first - new.storage,  # no tensor's, so nobody's
                )
            )
            held = found.held[k]
            r.current.append(-1 if held is None else value + held)
            r.initial.append(-1)
        r.values += [first + b if b >= 0 else own[-1 - b] for b in found.values]
        for n in found.nodes:
            r.nodes.append(
                SchedulerNode(
                    n.body,
                    tuple([value + v if v >= 0 else outer[-1 - v] for v in n.reads]),
                    n.scalars,
                    tuple([value + v for v in n.writes]),
                    r.call + n.call,
                    n.line,
                    n.dims,
                )
            )
        for k, v in found.left:
            r.wrote(own[k], value + v)
        r.call += found.calls
        self._leave(form, nodes, env, found, first)
        return True

    def _leave(
        self,
        form: Form,
        nodes: Sequence[Node],
        env: dict[Node, Any],
        found: Template,
        first: int,
    ) -> None:
        made: dict[int, torch.Tensor] = {}
        for k, what in zip(form.leaving, found.leaving, strict=True):
            if isinstance(what, Sym):
                env[nodes[k]] = what
            elif isinstance(what, int) and what < 0:
                env[nodes[k]] = env[form.outside[-1 - what]]
            else:
                b = what.buffer if isinstance(what, NumberRef) else what
                if b not in made:
                    made[b] = self.recorder.embody(first + b)
                env[nodes[k]] = (
                    Computed(made[b], what.is_float)
                    if isinstance(what, NumberRef)
                    else made[b]
                )

    # ---------------------------------------------------------------- the first time

    def mark(self) -> _Mark:
        """Where the recorder is, before a stretch is recorded."""
        r = self.recorder
        return _Mark(
            len(r.buffers),
            len(r.values),
            len(r.nodes),
            r.call,
            tuple(r.current),
            r.others,
            r.sizes(),
        )

    def learn(
        self,
        form: Form,
        nodes: Sequence[Node],
        env: Mapping[Node, Any],
        came: Incoming,
        mark: _Mark,
    ) -> None:
        """Keep what was added since the mark, if it can be added again."""
        try:
            template = self._template(form, nodes, env, came, mark)
        except Unlike:
            return
        self._known[form.key, came.exact] = template
        pointwise = (
            came.alike is not None
            and self.recorder.others == mark.others
            and not any(n.body.reduction for n in template.nodes)
            and all(n.whole or n.buffer.shape == () for n in template.buffers)
        )
        if pointwise:
            self._known[form.key, came.alike] = template

    def _template(
        self,
        form: Form,
        nodes: Sequence[Node],
        env: Mapping[Node, Any],
        came: Incoming,
        mark: _Mark,
    ) -> Template:
        r = self.recorder
        if r.sizes() != mark.sizes:
            raise Unlike  # it kept a call, made a view, met memory that is shared
        if not all(_plain(env[n]) for n in nodes):
            raise Unlike
        place = {b: -1 - k for k, b in enumerate(came.buffers)}
        fresh = r.buffers[mark.buffers :]
        place.update({mark.buffers + k: k for k in range(len(fresh))})
        storages: dict[int, int] = {}
        new: list[NewBuffer] = []
        for k, b in enumerate(fresh):
            if b.kind != "temp" or r.first_of(b.storage) < mark.buffers:
                raise Unlike
            whole = b.shape == came.shape and _is_plain(b)
            new.append(NewBuffer(b, storages.setdefault(b.storage, k), whole))
        written = r.values[mark.values :]
        if any(b not in place for b in written):
            raise Unlike
        given: dict[tuple[int, int], int] = {}

        def value(v: int) -> int:
            """The number of a value that is read."""
            if v >= mark.values:
                return v - mark.values
            b = r.values[v]
            if b in place:
                if mark.current[b] != v:
                    raise Unlike
                return place[b]
            count = len(came.buffers) + len(given)
            return -1 - given.setdefault((b, v), count)

        added: list[SchedulerNode] = []
        for n in r.nodes[mark.nodes :]:
            if not isinstance(n, SchedulerNode):
                raise Unlike
            reads = tuple([value(v) for v in n.reads])
            writes = tuple([v - mark.values for v in n.writes])
            added.append(
                n._replace(reads=reads, writes=writes, call=n.call - mark.call)
            )
        held = [r.current[mark.buffers + k] for k in range(len(fresh))]
        left = [
            (k, r.current[b] - mark.values)
            for k, b in enumerate(came.buffers)
            if r.current[b] != mark.current[b]
        ]
        given_values = [env[n] for n in form.outside]
        leaving = [self._what(env[nodes[k]], given_values, mark) for k in form.leaving]
        return Template(
            tuple(new),
            tuple([place[b] for b in written]),
            tuple(added),
            r.call - mark.call,
            tuple(given),
            tuple([None if v < 0 else v - mark.values for v in held]),
            tuple(left),
            tuple(leaving),
        )

    def _what(self, x: Any, came: Sequence[Any], mark: _Mark) -> int | Sym | NumberRef:
        """How a value that is used elsewhere can be had again; see Template."""
        if isinstance(x, Sym):
            return x
        if isinstance(x, Computed):
            place = self._what(x.tensor, came, mark)
            if not isinstance(place, int) or place < 0:
                raise Unlike
            return NumberRef(place, x.is_float)
        for k, y in enumerate(came):
            if x is y:
                return -1 - k
        b = self.recorder.known(x) if isinstance(x, torch.Tensor) else None
        if b is None or b < mark.buffers or not self.recorder.alone(b):
            raise Unlike
        own = self.recorder.buffers[b]
        if x.dtype != NAMED_DTYPES[own.dtype] or own.offset:
            raise Unlike
        return b - mark.buffers


def _plain(x: Any) -> bool:
    """Is a result a tensor of the step, or a number that is known at each call?"""
    if isinstance(x, (list, tuple)):
        return all(map(_plain, x))
    return isinstance(x, (Sym, Computed)) or (isinstance(x, torch.Tensor) and x.is_meta)


def _is_plain(b: Buffer) -> bool:
    """Has a buffer the strides of a tensor that was just made?"""
    return b.stride == contiguous_strides(b.shape)
