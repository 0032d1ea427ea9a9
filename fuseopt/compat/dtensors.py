"""DTensor's private API: its parts, its specs, and the collectives that it calls.

Relies on `_local_tensor` and `_spec` of a DTensor, on the fields of a spec, on the
constructor that takes both, and on the names of the functional collectives. Where the
first two are missing, no tensor is taken for a DTensor: its step runs in eager.
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
    """The class of tensors that are spread over processes; None if nothing has loaded
    it, so that no tensor is one.
    """
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    there = kind is not None and (DTENSORS.there or DTENSORS.available())
    return kind if there else None


def part_places() -> tuple[int, int] | None:
    """The offsets in bytes of the pointers to `_local_tensor` and to `_spec` in the
    memory of a DTensor; None where they are not known.
    """
    kind = dtensor_type()
    return None if kind is None else _slots(kind)


@functools.cache
def _slots(kind: Any) -> tuple[int, int] | None:
    """The offsets of both slots, found by writing to them; None if they are none."""
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
    """Are gradients of this class of tensors anything but those of any tensor?"""
    return any(
        inspect.getattr_static(kind, name)
        is not inspect.getattr_static(torch.Tensor, name)
        for name in ("grad", "requires_grad", "_version")
    )


def _slot(sample: Any, name: str) -> int:
    """The offset in bytes of a slot in an object; 0 if there is none, or several."""
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
    """Wait for the collective that computes a part; returns the part as a tensor."""
    under_way = _under_way()
    if under_way is not None and type(local) is under_way:
        done: torch.Tensor = local.trigger_wait()  # type: ignore[attr-defined]
        return done
    return local


def _under_way() -> Any:
    """The class of tensors that a collective is still making; None if there is none."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return getattr(module, "AsyncCollectiveTensor", None)


def is_wrapper(kind: type) -> bool:
    """Does a class of tensors hand calls on to others that it holds, and say which?

    Relies on the two methods by which torch.compile knows such a class.
    """
    return all(hasattr(kind, f"__tensor_{x}__") for x in ("flatten", "unflatten"))


COLLECTIVES = "_c10d_functional"
#: Calls that wait for a collective, or say that who uses its result does.
WAITS = ("wait_tensor", "_wrap_tensor_autograd")


def is_wait(func: Any) -> bool:
    """Does a call return what it is given, once a collective has made it?"""
    return func.namespace == COLLECTIVES and func.overloadpacket.__name__ in WAITS


def is_collective(func: Any) -> bool:
    """Does a call of ATen wait for other processes?"""
    return func.namespace == COLLECTIVES and not is_wait(func)


def in_place(func: Any) -> Any:
    """The call that leaves in its tensor what a collective returns, and tells other
    processes the same; None where there is none.
    """
    known = (torch.ops._c10d_functional.all_reduce.default,)
    return torch.ops._c10d_functional.all_reduce_.default if func in known else None


def waiting() -> Any:
    """The call that waits for a collective."""
    return torch.ops._c10d_functional.wait_tensor.default


def fake_mode() -> Any:
    """A mode that makes tensors without contents of others."""
    mode = find("torch._subclasses.fake_tensor:FakeTensorMode", None)
    if mode is None:
        raise EagerOnly(f"torch {torch.__version__} has no FakeTensorMode")
    return mode()


def spread(local: torch.Tensor, spec: Any) -> Any:
    """A DTensor with this part."""
    return dtensor_type()(local, spec, requires_grad=False)


def is_summed_up(spec: Any) -> bool:
    """Is every element in one process, or the same in all? Else parts are to be added
    up, or whatever else is to become of them.
    """
    return not any(x.is_partial() for x in spec.placements)


def alike(one: Any, other: Any) -> bool:
    """Have two specs the same mesh, placements and sizes, so that each process has the
    same elements of both?
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
    """A DTensor with this part, over the processes as another one is."""
    spec = whole._spec
    if spec.tensor_meta.dtype != local.dtype:
        meta = spec.tensor_meta._replace(dtype=local.dtype)
        spec = dataclasses.replace(spec, tensor_meta=meta)
    return spread(local, spec)
