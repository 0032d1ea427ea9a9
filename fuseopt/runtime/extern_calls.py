"""Prepare an extern's call before the step is called.

Most calls take tensors at fixed places among fixed arguments and return one tensor of a
known shape. Each step then only looks up the tensors, calls ATen, and records the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..capture.aten.autocast import KeptCast, WithinAutocast
from ..capture.aten.dtypes import NAMED_DTYPES
from ..capture.aten.externs import Call, TensorRef
from ..capture.scalars.device import NumberRef
from ..capture.scalars.host import Sym
from ..compat import bound_op
from ..ir.graph import Buffer, Extern, Graph, MemoryPlan, Schedule
from .placed import placed, writes_given


class View(NamedTuple):
    """View of a call's result, `offset` elements behind its first."""

    buffer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    position: int


class Result(NamedTuple):
    """The one tensor that a call returns, in memory that the call allocates.

    `loose` is true if it keeps its strides, and no kernel reads it. The pool of
    addresses then does not need its `position`. `views` are the other buffers of its
    storage.
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


class CallTensor(NamedTuple):
    """Stands for a tensor of the call itself, by its place; a view would not do."""

    source: int


class PreparedCall(NamedTuple):
    """ATen call that a step makes.

    `args` are the constant arguments, with None in place of the others. `tensors` are
    (place among the arguments, buffer) of plain tensors. `others` are (place, argument)
    of those that each step evaluates. `kwargs` are by name; `computed` is true if a
    step evaluates some of them. `result` is the returned tensor, if the call returns
    just one. `placed` is the buffer that the call writes instead (see placed.py).
    `freed` has the storages that no later step reads, and their buffers.
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
    placed: int | None
    freed: tuple[tuple[int, ...], tuple[int, ...]]


def prepare(
    extern: Extern,
    call: Call,
    buffers: tuple[Buffer, ...],
    members: Mapping[int, list[int]],
    plan: MemoryPlan,
    position: Mapping[int, int],
    freed: tuple[int, ...],
) -> PreparedCall:
    """Prepare an extern's call. `members` has the buffers of each storage of temps;
    `position` has the place of each buffer's address in the pool. `freed` are the
    storages that no later step reads.
    """
    args: list[Any] = []
    tensors: list[tuple[int, int]] = []
    others: list[tuple[int, Any]] = []
    for place, arg in enumerate(call.args):
        plain = isinstance(arg, TensorRef) and arg == TensorRef(arg.buffer)
        if isinstance(call.func, KeptCast):
            arg, plain = CallTensor(buffers[arg.buffer].source), False
        if plain:
            tensors.append((place, arg.buffer))
        elif _changes(arg):
            others.append((place, arg))
        args.append(None if plain or _changes(arg) else arg)
    kwargs = dict(call.kwargs)
    if str(kwargs.get("device")) == "meta":
        # the device in the recorded call
        kwargs["device"] = torch.device(buffers[call.outputs[0]].device)
    given = placed(call, buffers, plan)
    function = bound_op(call.func) if given is None else writes_given(call)
    if call.autocast is not None:
        function = WithinAutocast(function, call.autocast)
    return PreparedCall(
        extern.name,
        call,
        function,
        args,
        tuple(tensors),
        tuple(others),
        kwargs,
        any(map(_changes, kwargs.values())),
        None if given is not None else _result(call, buffers, members, plan, position),
        given,
        (freed, tuple(b for s in freed for b in members[s])),
    )


def _changes(x: Any) -> bool:
    """Does an argument change between steps?"""
    if isinstance(x, (list, tuple)) and not isinstance(
        x, (TensorRef, NumberRef, CallTensor)
    ):
        return any(map(_changes, x))
    return isinstance(x, (TensorRef, NumberRef, Sym, CallTensor))


def _result(
    call: Call,
    buffers: tuple[Buffer, ...],
    members: Mapping[int, list[int]],
    plan: MemoryPlan,
    position: Mapping[int, int],
) -> Result | None:
    """Return the Result of a call. Return None if the call returns several tensors or
    existing memory, or if a view has a different dtype.
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


def touched_inputs(graph: Graph, schedule: Schedule) -> list[int]:
    """Return the indices of the call's tensors that ATen calls read or write."""
    touched = {
        graph.buffers[graph.values[v]].storage
        for s in schedule.externs
        for v in (*s.reads, *s.writes)
    }
    return [
        b.source
        for b in graph.buffers
        if b.kind in ("static", "arg") and b.storage in touched
    ]
