"""Record the body of a loop over lanes once, and repeat the recording for similar
lanes.

The body of a for-loop over parameters is recorded once through torch. For each similar
lane `Templates.replay` then adds the same buffers, values and nodes, without a call to
torch. Two lanes are similar if their forms are equal (see `segments`) and their tensors
agree in all that recording depends on. These are dtype, layout, device, and aliasing.
If every call is pointwise over one shape, the shape may differ.

Only a body that works on a lane's own tensors has a template. It must have no call
without a rule, no `.item()` on the host, and no views of incoming tensors. Other lanes
are recorded one by one.
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
from .segments import Form, NoTemplate


class Incoming(NamedTuple):
    """Values that come into a stretch.

    `buffers`: those of its tensors, by first use. `exact`: a key that is equal if
    recording cannot distinguish the values. `alike`: a key that is equal if pointwise
    calls cannot distinguish them, or None. `shape`: that of all tensors with
    dimensions, if they agree.
    """

    buffers: tuple[int, ...]
    exact: tuple[Any, ...]
    alike: tuple[Any, ...] | None
    shape: Shape | None


class NewBuffer(NamedTuple):
    """A buffer that a stretch creates.

    `storage`: the index of the first new buffer in the same storage. `whole`: it has
    the shape of the incoming tensors.
    """

    buffer: Buffer
    storage: int
    whole: bool


@dataclass(frozen=True)
class Template:
    """The additions of a stretch to the recording.

    New buffers and values are numbered from 0. Incoming ones are numbered from -1 down,
    followed by `given`: (buffer, value) of other memory that the stretch reads.

    `leaving`: each value that is used outside. An incoming value is its number, from -1
    down. A new buffer is its number, in a NumberRef if it holds a number. Others are a
    Sym. `held`: the value of each new buffer at the end, or None. `left`: (number among
    the incoming, new value) of each incoming buffer that is written.
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
    """State of a recorder before a stretch."""

    buffers: int
    values: int
    nodes: int
    call: int
    current: tuple[int, ...]
    others: int
    sizes: tuple[int, ...]


class Templates:
    """Templates of one capture; see the module."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._known: dict[Any, Template] = {}
        self.replayed = 0

    def incoming(self, values: Sequence[Any]) -> Incoming | None:
        """Describe the incoming values; return None if a template cannot be used for
        them.
        """
        r = self.recorder
        buffers: dict[int, int] = {}
        objects: dict[int, int] = {}
        exact: list[Any] = []
        alike: list[Any] = []
        shape: Shape | None = None
        pointwise = True
        for x in values:
            if not isinstance(x, torch.Tensor) or not x.is_meta:
                exact.append(id(x))  # the same number, or the same real tensor
                alike.append(id(x))
                continue
            b = r.known(x)
            if b is None or x.dtype in PARTS or not r.alone(b):
                return None
            buffer = r.buffers[b]
            value = r.current[b]
            facts = (
                buffer.dtype,
                buffer.device,
                buffer.kind,
                value < 0,
                value == r.initial[b],
                buffers.setdefault(b, len(buffers)),
                objects.setdefault(id(x), len(objects)),
            )
            exact.append((buffer.shape, buffer.stride, buffer.offset, *facts))
            alike.append(facts)
            if buffer.shape != ():
                shape = shape or buffer.shape
                pointwise &= buffer.shape == shape and _is_plain(buffer)
            alike.append(buffer.shape == ())
        if shape is None or not pointwise or numel(shape) < 2:
            return Incoming(tuple(buffers), tuple(exact), None, shape)
        ones = tuple([n == 1 for n in shape])
        return Incoming(tuple(buffers), tuple(exact), (ones, *alike), shape)

    # ---------------------------------------------------------------- again

    def replay(
        self, form: Form, nodes: Sequence[Node], env: dict[Node, Any], came: Incoming
    ) -> bool:
        """Repeat the recording of an equal stretch.

        Sets in `env` the values that are used outside. Returns False if there is no
        template.
        """
        template = self._known.get((form.key, came.exact))
        if template is None and came.alike is not None:
            template = self._known.get((form.key, came.alike))
        r = self.recorder
        if template is None or any(r.current[b] != v for b, v in template.given):
            return False
        self.replayed += 1
        first, value = len(r.buffers), len(r.values)
        outer = [r.current[b] for b in came.buffers]
        outer += [v for _, v in template.given]
        incoming = came.buffers
        for k, new in enumerate(template.buffers):
            shape, stride = new.buffer.shape, new.buffer.stride
            if new.whole and came.shape is not None and shape != came.shape:
                shape, stride = came.shape, contiguous_strides(came.shape)
            r.buffers.append(
                new.buffer._replace(
                    name=f"t{first + k}",
                    shape=shape,
                    stride=stride,
                    storage=-1 - first - new.storage,  # no tensor's storage is negative
                )
            )
            content = template.held[k]
            r.current.append(-1 if content is None else value + content)
            r.initial.append(-1)
        r.values += [first + b if b >= 0 else incoming[-1 - b] for b in template.values]
        for n in template.nodes:
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
        for k, v in template.left:
            r.wrote(incoming[k], value + v)
        r.call += template.calls
        self._leave(form, nodes, env, template, first)
        return True

    def _leave(
        self,
        form: Form,
        nodes: Sequence[Node],
        env: dict[Node, Any],
        template: Template,
        first: int,
    ) -> None:
        tensors: dict[int, torch.Tensor] = {}
        for k, place in zip(form.leaving, template.leaving, strict=True):
            if isinstance(place, Sym):
                env[nodes[k]] = place
            elif isinstance(place, int) and place < 0:
                env[nodes[k]] = env[form.outside[-1 - place]]
            else:
                b = place.buffer if isinstance(place, NumberRef) else place
                if b not in tensors:
                    tensors[b] = self.recorder.embody(first + b)
                env[nodes[k]] = (
                    Computed(tensors[b], place.kind)
                    if isinstance(place, NumberRef)
                    else tensors[b]
                )

    # ---------------------------------------------------------------- the first time

    def mark(self) -> _Mark:
        """Return the state of the recorder, before a stretch is recorded."""
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
        """Make a template of the additions since the mark, if they can be repeated."""
        try:
            template = self._template(form, nodes, env, came, mark)
        except NoTemplate:
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
            raise NoTemplate  # the stretch kept a call, made a view, or shared memory
        if not all(_plain(env[n]) for n in nodes):
            raise NoTemplate
        place = {b: -1 - k for k, b in enumerate(came.buffers)}
        fresh = r.buffers[mark.buffers :]
        place.update({mark.buffers + k: k for k in range(len(fresh))})
        storages: dict[int, int] = {}
        new: list[NewBuffer] = []
        for k, b in enumerate(fresh):
            if b.kind != "temp" or r.first_of(b.storage) < mark.buffers:
                raise NoTemplate
            whole = b.shape == came.shape and _is_plain(b)
            new.append(NewBuffer(b, storages.setdefault(b.storage, k), whole))
        written = r.values[mark.values :]
        if any(b not in place for b in written):
            raise NoTemplate
        others: dict[tuple[int, int], int] = {}

        def value(v: int) -> int:
            """Return the number of a value that is read."""
            if v >= mark.values:
                return v - mark.values
            b = r.values[v]
            if b in place:
                if mark.current[b] != v:
                    raise NoTemplate
                return place[b]
            index = len(came.buffers) + len(others)
            return -1 - others.setdefault((b, v), index)

        added: list[SchedulerNode] = []
        for n in r.nodes[mark.nodes :]:
            if not isinstance(n, SchedulerNode):
                raise NoTemplate
            reads = tuple([value(v) for v in n.reads])
            writes = tuple([v - mark.values for v in n.writes])
            added.append(
                n._replace(reads=reads, writes=writes, call=n.call - mark.call)
            )
        contents = [r.current[mark.buffers + k] for k in range(len(fresh))]
        left = [
            (k, r.current[b] - mark.values)
            for k, b in enumerate(came.buffers)
            if r.current[b] != mark.current[b]
        ]
        incoming = [env[n] for n in form.outside]
        leaving = [self._what(env[nodes[k]], incoming, mark) for k in form.leaving]
        return Template(
            tuple(new),
            tuple([place[b] for b in written]),
            tuple(added),
            r.call - mark.call,
            tuple(others),
            tuple([None if v < 0 else v - mark.values for v in contents]),
            tuple(left),
            tuple(leaving),
        )

    def _what(self, x: Any, came: Sequence[Any], mark: _Mark) -> int | Sym | NumberRef:
        """Describe a value that is used outside; see Template.leaving."""
        if isinstance(x, Sym):
            return x
        if isinstance(x, Computed):
            place = self._what(x.tensor, came, mark)
            if not isinstance(place, int) or place < 0:
                raise NoTemplate
            return NumberRef(place, x.kind)
        for k, y in enumerate(came):
            if x is y:
                return -1 - k
        b = self.recorder.known(x) if isinstance(x, torch.Tensor) else None
        if b is None or b < mark.buffers or not self.recorder.alone(b):
            raise NoTemplate
        buffer = self.recorder.buffers[b]
        if x.dtype != NAMED_DTYPES[buffer.dtype] or buffer.offset:
            raise NoTemplate
        return b - mark.buffers


def _plain(x: Any) -> bool:
    """Is a result a tensor of the step, or a number with a formula at each call?"""
    if isinstance(x, (list, tuple)):
        return all(map(_plain, x))
    return isinstance(x, (Sym, Computed)) or (isinstance(x, torch.Tensor) and x.is_meta)


def _is_plain(b: Buffer) -> bool:
    """Is a buffer contiguous?"""
    return b.stride == contiguous_strides(b.shape)
