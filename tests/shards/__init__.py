"""Optimizers of DTensors, in one process of a group that is not there (`fake`) and in
groups of processes over gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

#: The last of four: it has one of seven rows, and none of six.
RANK, WORLD = 3, 4


@contextmanager
def fake_group() -> Iterator[None]:
    """A process group whose other processes do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def forget_meshes() -> None:
    """Empty torch's caches of what DTensor does to placements.

    Their keys hold meshes that are compared by shape and names, so that a mesh of the
    next group finds the answers of this one's, with groups that no longer exist.
    """
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


def spread(t: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """A DTensor, without asking another process for anything."""
    return distribute_tensor(t, mesh, placements, src_data_rank=None)


def local(x: Any) -> Any:
    """A DTensor's part; anything else as it is."""
    return x._local_tensor if isinstance(x, DTensor) else x


def strides_of(t: torch.Tensor) -> list[int]:
    """The strides that say something: of dimensions with more than one element."""
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n != 1]


def difference(got: Any, want: Any) -> str:
    """Where two values of a state differ in type, placement or bits; "" nowhere."""
    if type(got) is not type(want):
        return f"{type(got).__name__} for {type(want).__name__}"
    if isinstance(got, DTensor):
        if got._spec != want._spec:
            return f"{got._spec} for {want._spec}"
        got, want = local(got), local(want)
        if strides_of(got) != strides_of(want):
            return f"strides {got.stride()} for {want.stride()}"
    if isinstance(got, dict):
        return difference([*got.values()], [*want.values()])
    if isinstance(got, (list, tuple)):
        return next(filter(None, map(difference, got, want)), "")
    if isinstance(got, torch.Tensor):
        if got.dtype != want.dtype or got.shape != want.shape:
            return f"{got.dtype} {got.shape} for {want.dtype} {want.shape}"
        bits = (
            [x.detach().contiguous().view(torch.uint8) for x in (got, want)]
            if (got.dim())
            else [got, want]
        )
        return "" if torch.equal(*bits) else "bits"
    return "" if got == want else f"{got} for {want}"


def assert_same(got: torch.optim.Optimizer, want: torch.optim.Optimizer) -> None:
    """Parameters, state and groups of two optimizers are equal in every bit."""
    groups = zip(got.param_groups, want.param_groups, strict=True)
    for mine, theirs in groups:
        assert list(mine) == list(theirs)
        for key in mine:
            if key != "params":
                assert not difference(mine[key], theirs[key]), key
        for p, q in zip(mine["params"], theirs["params"], strict=True):
            assert not difference(p, q), f"parameter of {tuple(p.shape)}"
            a, b = got.state.get(p, {}), want.state.get(q, {})
            assert list(a) == list(b)
            for key in a:
                assert not difference(a[key], b[key]), f"{key} of {tuple(p.shape)}"
    assert len(got.state) == len(want.state)
