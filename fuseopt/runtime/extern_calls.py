"""An extern's call, with all that is known of it before the step is called.

Most calls take tensors at fixed places among fixed arguments and return one tensor of a
known shape: what is left to do of these at each step is to look up the tensors, to call
ATen, and to write down what it returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..capture.aten.autocast import KeptCast, Within
from ..capture.aten.dtypes import NAMED_DTYPES
from ..capture.aten.externs import Call, TensorRef
from ..capture.scalars.device import NumberRef
from ..capture.scalars.host import Sym
from ..compat import bound_op
from ..ir.graph import Buffer, Extern, MemoryPlan


class View(NamedTuple):
    """Another way to see what a call returned, `offset` elements behind its first."""

    buffer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    position: int


class Result(NamedTuple):
    """The one tensor that a call returns, in memory that it makes itself.

    `loose`: it keeps its strides, and no kernel reads it, so that the pool of addresses
    does not need its `position`. `views`: the other buffers of its storage.
    """

    buffer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    loose: bool
    storage: int
    first_byte: int
    position: int
    views: tuple[View, ...]


class Itself(NamedTuple):
    """Stands for a tensor of the call itself, by its place: no view of its memory."""

    source: int


class Prepared(NamedTuple):
    """An ATen call that a step makes.

    `args`: those that are the same at each step; in place of the others, None.
    `tensors`: place among the arguments and buffer of those that are plain tensors.
    `others`: place and what stands there, of those that are looked at one by one.
    `kwargs`: by name; `computed` says that some of them are looked at as well.
    `result`: what it returns, where that is one tensor and nothing else. `freed`: the
    storages that nobody looks at afterwards, and their buffers.
    """

    name: str
    call: Call
    function: Callable[..., Any]
    args: list[Any]
    tensors: tuple[tuple[int, int], ...]
    others: tuple[tuple[int, Any], ...]
    kwargs: dict[str, Any]
    computed: bool
    result: Result | None
    freed: tuple[tuple[int, ...], tuple[int, ...]]


def prepare(
    extern: Extern,
    call: Call,
    buffers: tuple[Buffer, ...],
    members: Mapping[int, list[int]],
    plan: MemoryPlan,
    position: Mapping[int, int],
    freed: tuple[int, ...],
) -> Prepared:
    """What can be known of an extern's call. `members`: the buffers of each storage of
    temps; `position`: where in the pool of addresses each buffer has its own; `freed`:
    the storages that nobody looks at afterwards.
    """
    args: list[Any] = []
    tensors: list[tuple[int, int]] = []
    others: list[tuple[int, Any]] = []
    for place, arg in enumerate(call.args):
        plain = isinstance(arg, TensorRef) and arg == TensorRef(arg.buffer)
        if isinstance(call.func, KeptCast):
            arg, plain = Itself(buffers[arg.buffer].source), False
        if plain:
            tensors.append((place, arg.buffer))
        elif _changes(arg):
            others.append((place, arg))
        args.append(None if plain or _changes(arg) else arg)
    kwargs = dict(call.kwargs)
    if str(kwargs.get("device")) == "meta":
        # as the call was recorded
        kwargs["device"] = torch.device(buffers[call.outputs[0]].device)
    function = bound_op(call.func)
    if call.autocast is not None:
        function = Within(function, call.autocast)
    return Prepared(
        extern.name,
        call,
        function,
        args,
        tuple(tensors),
        tuple(others),
        kwargs,
        any(map(_changes, kwargs.values())),
        _result(call, buffers, members, plan, position),
        (freed, tuple(b for s in freed for b in members[s])),
    )


def _changes(x: Any) -> bool:
    """Is an argument another one at each step?"""
    if isinstance(x, (list, tuple)) and not isinstance(
        x, (TensorRef, NumberRef, Itself)
    ):
        return any(map(_changes, x))
    return isinstance(x, (TensorRef, NumberRef, Sym, Itself))


def _result(
    call: Call,
    buffers: tuple[Buffer, ...],
    members: Mapping[int, list[int]],
    plan: MemoryPlan,
    position: Mapping[int, int],
) -> Result | None:
    """The Result of a call; None if it returns several tensors, memory of others, or
    what is seen as another dtype as well.
    """
    if len(call.outputs) != 1 or call.outputs[0] not in call.fresh:
        return None
    (b,) = call.outputs
    buffer = buffers[b]
    others = [m for m in members[buffer.storage] if m != b]
    if any(buffers[m].dtype != buffer.dtype for m in others):
        return None
    views = [
        View(m, x.shape, x.stride, x.offset - buffer.offset, position[m])
        for m, x in ((m, buffers[m]) for m in others)
    ]
    return Result(
        b,
        buffer.shape,
        NAMED_DTYPES[buffer.dtype],
        buffer.stride,
        buffer.storage in plan.loose,
        buffer.storage,
        buffer.first_byte,
        position[b],
        tuple(views),
    )
