"""Private API of DTensor: its parts, its specs, and the collectives that it calls.

Relies on `_local_tensor` and `_spec` of a DTensor, and on the fields of a spec. Also
relies on the constructor that takes both, and on the names of the functional
collectives. If the first two are missing, no tensor counts as a DTensor, and its step
runs in eager.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch

from ..errors import EagerOnly
from .capability import probed
from .names import Missing, find

local_part = attrgetter("_local_tensor")
spec_of = attrgetter("_spec")


@probed(
    "dtensors",
    "a step of DTensors is compiled to the step of the parts of this process",
    "steps of DTensors run in eager",
)
def DTENSORS() -> None:
    find("torch.distributed.tensor:DTensor._local_tensor")
    find("torch.distributed.tensor:DTensor._spec")


def dtensor_type() -> Any:
    """Return the class of DTensors; None if nothing has imported it."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    there = kind is not None and (DTENSORS.there or DTENSORS.available())
    return kind if there else None


def part_places() -> tuple[int, int] | None:
    """Return the byte offsets of `_local_tensor` and `_spec` in a DTensor, or None."""
    kind = dtensor_type()
    return None if kind is None else _slots(kind)


@functools.cache
def _slots(kind: Any) -> tuple[int, int] | None:
    """Return the offsets of both slots, found by writing to them; None if not found."""
    getattribute = inspect.getattr_static(kind, "__getattribute__")
    if getattribute is not object.__getattribute__ or _hides_gradients(kind):
        return None
    try:
        cpu = torch.device("cpu")
        make = find("torch:Tensor._make_wrapper_subclass")
        sample = make(kind, (1,), device=cpu)
    except (AttributeError, RuntimeError, TypeError, Missing):
        return None
    if type(sample) is not kind:
        return None
    local, spec = (_slot(sample, name) for name in ("_local_tensor", "_spec"))
    return (local, spec) if local and spec and local != spec else None


def _hides_gradients(kind: Any) -> bool:
    """Does this class of tensors define its own gradient attributes?"""
    return any(
        inspect.getattr_static(kind, name)
        is not inspect.getattr_static(torch.Tensor, name)
        for name in ("grad", "requires_grad", "_version")
    )


def _slot(sample: Any, name: str) -> int:
    """Return the byte offset of a slot in an object; 0 if there is none, or several."""
    descriptor = inspect.getattr_static(type(sample), name)
    if type(descriptor) is not types.MemberDescriptorType:
        return 0
    n = type(sample).__basicsize__ // ctypes.sizeof(ctypes.c_void_p)
    words = (ctypes.c_uint64 * n).from_address(id(sample))
    places = set(range(n))
    for x in (object(), object()):
        setattr(sample, name, x)
        places &= {k for k in places if words[k] == id(x)}
    return 8 * places.pop() if len(places) == 1 else 0


def are_spread(tensors: Iterable[torch.Tensor]) -> bool:
    """Are all of some tensors DTensors?"""
    kind = dtensor_type()
    return all(type(t) is kind for t in tensors)


def arrived(local: torch.Tensor) -> torch.Tensor:
    """Wait for the collective that computes a part; return the part as a tensor."""
    under_way = _under_way()
    if under_way is not None and type(local) is under_way:
        done: torch.Tensor = local.trigger_wait()  # type: ignore[attr-defined]
        return done
    return local


def _under_way() -> Any:
    """Return the class of tensors of a running collective; None if there is none."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return getattr(module, "AsyncCollectiveTensor", None)


def is_wrapper(kind: type) -> bool:
    """Is a class of tensors a traceable wrapper subclass?

    Relies on the two methods by which torch.compile recognizes such a class.
    """
    return all(hasattr(kind, f"__tensor_{x}__") for x in ("flatten", "unflatten"))


COLLECTIVES = "_c10d_functional"
#: Calls that wait for a collective, or mark that the user of its result waits.
WAITS = ("wait_tensor", "_wrap_tensor_autograd")


def is_wait(func: Any) -> bool:
    """Does a call return its argument once a collective has finished?"""
    return func.namespace == COLLECTIVES and func.overloadpacket.__name__ in WAITS


def is_collective(func: Any) -> bool:
    """Does an ATen call wait for other processes?"""
    return func.namespace == COLLECTIVES and not is_wait(func)


def in_place(func: Any) -> Any:
    """Return the in-place variant of a collective; None if there is none."""
    known = (torch.ops._c10d_functional.all_reduce.default,)
    return torch.ops._c10d_functional.all_reduce_.default if func in known else None


def waiting() -> Any:
    """Return the call that waits for a collective."""
    return torch.ops._c10d_functional.wait_tensor.default


def fake_mode() -> Any:
    """Return a mode that makes fake tensors."""
    mode = find("torch._subclasses.fake_tensor:FakeTensorMode", None)
    if mode is None:
        raise EagerOnly(f"torch {torch.__version__} has no FakeTensorMode")
    return mode()


def spread(local: torch.Tensor, spec: Any) -> Any:
    """Return a DTensor with this part."""
    return dtensor_type()(local, spec, requires_grad=False)


def is_summed_up(spec: Any) -> bool:
    """Is every element in one process, or equal in all, with no pending reduction?"""
    return not any(x.is_partial() for x in spec.placements)


def alike(one: Any, other: Any) -> bool:
    """Do two specs place the same elements in each process?

    They then have the same mesh, placements and sizes.
    """
    if one is other:
        return True
    a, b = one.tensor_meta, other.tensor_meta
    return bool(
        a is not None
        and b is not None
        and one.placements == other.placements
        and (one.mesh is other.mesh or one.mesh == other.mesh)
        and getattr(one, "shard_order", None) == getattr(other, "shard_order", None)
        and tuple(a.shape) == tuple(b.shape)
        and tuple(a.stride) == tuple(b.stride)
    )


def spread_as(local: torch.Tensor, whole: Any) -> Any:
    """Return a DTensor with this part, with the spec of another DTensor."""
    spec = whole._spec
    if spec.tensor_meta.dtype != local.dtype:
        meta = spec.tensor_meta._replace(dtype=local.dtype)
        spec = dataclasses.replace(spec, tensor_meta=meta)
    return spread(local, spec)
