"""The clip of DTensors: torch's bits, torch's collectives, few launches."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import fuseopt
from fuseopt.errors import EagerOnly
from fuseopt.inputs.keys import LanesDiffer
from fuseopt.shards.parts import parts_of
from tests.shards import difference, spread

SHAPES = [(8, 5), (7, 3), (6, 2), (9,)]


def parameters(mesh: DeviceMesh, placements: Sequence[Sequence[Any]]) -> list[Any]:
    torch.manual_seed(0)
    return [
        torch.nn.Parameter(spread(torch.randn(shape), mesh, placement))
        for placement in placements
        for shape in SHAPES
    ]


def give(params: Sequence[Any], seed: int, placements: Any = None) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in params:
        t = torch.randn(p.shape, generator=g) * 10.0 ** (seed - 2)
        p.grad = spread(t.to(p.dtype), p.device_mesh, placements or p.placements)


def collectives(seen: profile) -> int:
    return sum(e.name == "_c10d_functional::all_reduce" for e in seen.function_events)


def both(
    one: list[Any], other: list[Any], *args: Any, counted: bool = False, **kwargs: Any
) -> None:
    """Clip both: norms and gradients have the same bits.

    `counted`: nothing is compiled now, so that collectives can be counted.
    """
    with profile() as theirs:
        norm = torch.nn.utils.clip_grad_norm_(one, *args, **kwargs)
    with profile() as ours:
        got = fuseopt.clip_grad_norm_(other, *args, **kwargs)
    assert not difference(got, norm)
    for p, q in zip(one, other, strict=True):
        assert not difference(q.grad, p.grad)
    if counted:
        assert collectives(ours) == collectives(theirs) > 0


@pytest.fixture
def square(group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
def test_bits_and_collectives(
    mesh: DeviceMesh, norm_type: float, foreach: bool | None
) -> None:
    # torch has no largest element of a part without elements
    some = [0, 1] if norm_type == float("inf") else [0, 1, 2, 3]
    one, other = (
        [p for i, p in enumerate(parameters(mesh, [[Shard(0)]])) if i in some]
        for _ in range(2)
    )
    for k in range(5):
        for params in (one, other):
            give(params, k)
        both(one, other, 0.5 + k, norm_type, foreach=foreach, counted=k > 0)
    (report,) = fuseopt.reports()
    assert not report.fallback
    # the sum of powers of 3 is torch's own function
    assert report.launches == (3 if norm_type == 3.0 else 2)


def test_what_torch_raises_is_raised(mesh: DeviceMesh) -> None:
    params = parameters(mesh, [[Shard(0)]])
    give(params, 1)
    with pytest.raises(RuntimeError, match="infinity norm on an empty tensor"):
        fuseopt.clip_grad_norm_(params, 0.5, float("inf"))


@pytest.mark.parametrize(
    "placements",
    [
        [[Shard(0), Shard(1)], [Shard(0), Replicate()], [Replicate(), Shard(0)]],
        [[Replicate(), Shard(0)]],
        [[Shard(0), Shard(0)]],
    ],
)
def test_meshes_of_two_dimensions(square: DeviceMesh, placements: Any) -> None:
    one: list[Any] = []
    other: list[Any] = []
    for params in (one, other):
        torch.manual_seed(0)
        for p in placements:
            params.append(torch.nn.Parameter(spread(torch.randn(6, 4), square, p)))
    for k in range(3):
        for params in (one, other):
            give(params, k)
        both(one, other, 0.5, counted=k > 0)
    (report,) = fuseopt.reports()
    assert not report.fallback


@pytest.mark.parametrize("n", [1, 15])
def test_two_launches_and_one_collective_at_any_number(
    mesh: DeviceMesh, n: int
) -> None:
    params = parameters(mesh, [[Shard(0)]] * n)
    for k in range(3):
        give(params, k)
        fuseopt.clip_grad_norm_(params, 1.0)
    give(params, 3)
    with profile() as seen:
        fuseopt.clip_grad_norm_(params, 1.0)
    names = [e.name for e in seen.function_events]
    assert not [x for x in names if x.startswith("aten::_foreach")]
    # memory for the tables of one call and for the collective, at any number
    assert sum(x.startswith("aten::") for x in names) <= 10, names
    (report,) = fuseopt.reports()
    assert report.launches == 2
    assert {name.split(".")[1] for name, _ in report.externs} == {
        "all_reduce",
        "wait_tensor",
    }
    assert len(report.externs) == 2


def test_limit_that_moves_compiles_once(mesh: DeviceMesh) -> None:
    one, other = (parameters(mesh, [[Shard(0)]]) for _ in range(2))
    for k in range(12):
        for params in (one, other):
            give(params, k % 5)
        both(one, other, 0.1 * (k + 1))
    assert len(fuseopt.reports()) == 1


def test_gradients_spread_in_another_way(mesh: DeviceMesh) -> None:
    """Each way has a plan of its own; a gradient that is to be added up, too."""
    one, other = (parameters(mesh, [[Shard(0)]]) for _ in range(2))
    for k, placements in enumerate([None, [Replicate()], [Partial()], None]):
        for params in (one, other):
            give(params, k, placements)
        both(one, other, 0.5)
    assert len(fuseopt.reports()) == 3
    assert not any(r.fallback for r in fuseopt.reports())


def test_versions_move(mesh: DeviceMesh) -> None:
    params = parameters(mesh, [[Shard(0)]])
    for k in range(2):
        give(params, k)
        before = [p.grad._version for p in params]
        fuseopt.clip_grad_norm_(params, 0.5)
        after = [p.grad._version for p in params]
        assert all(a > b for a, b in zip(after, before, strict=True))


def test_what_is_left_to_torch_is_told(mesh: DeviceMesh) -> None:
    one, other = (parameters(mesh, [[Shard(0)]]) for _ in range(2))
    for params in (one, other):
        give(params, 1)
    both(one, other, 0.5, error_if_nonfinite=True)
    assert "waits for all processes" in str(fuseopt.reports()[-1].fallback)
    one, other = one[:2], other[:2]
    for params in (one, other):
        give(params, 2)
    both(one, other, 0.5)
    assert not fuseopt.reports()[-1].fallback


def test_dtensors_beside_plain_tensors_raise_torchs_error(mesh: DeviceMesh) -> None:
    params = parameters(mesh, [[Shard(0)]])
    give(params, 1)
    plain = torch.nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="got mixed"):
        fuseopt.clip_grad_norm_([*params, plain], 0.5)
    with pytest.raises(RuntimeError, match="got mixed"):
        fuseopt.clip_grad_norm_([plain, *params], 0.5)


def test_nothing_is_sent_while_it_is_compiled(mesh: DeviceMesh) -> None:
    params = parameters(mesh, [[Shard(0)]])
    give(params, 1)
    sums = [p.grad._local_tensor.clone() for p in params]

    def clip(stand_ins: list[Any], numbers: list[float]) -> Any:
        norm = torch.nn.utils.get_total_norm(stand_ins)
        for g in stand_ins:
            g.mul_(numbers[0] / norm)
        return norm

    with profile() as seen:
        done = parts_of(clip, [p.grad for p in params], 1)
    assert not [e for e in seen.function_events if "c10d::" in e.name]
    assert all(
        torch.equal(p.grad._local_tensor, t) for p, t in zip(params, sums, strict=True)
    )
    names = [str(n.target) for n in done.gm.graph.nodes]
    assert names.count("_c10d_functional.all_reduce.default") == 1


def test_branches_on_numbers_and_contents_are_refused(mesh: DeviceMesh) -> None:
    params = parameters(mesh, [[Shard(0)]])
    give(params, 1)
    grads = [p.grad for p in params]
    with pytest.raises(LanesDiffer, match="depend on a number"):
        parts_of(lambda ts, xs: ts[0].mul(float(int(xs[0] * 1e6))), grads, 1)
    with pytest.raises(EagerOnly, match="not an input of the step"):
        parts_of(
            lambda ts, xs: ts[0] + spread(torch.ones(8, 5), mesh, [Shard(0)]), grads, 1
        )
    with pytest.raises(Exception, match="_local_scalar_dense"):
        parts_of(lambda ts, xs: ts[0] * ts[0].sum().item(), grads, 1)


def test_threads_that_wait_for_one_another(mesh: DeviceMesh) -> None:
    """Processes may be threads of one: no lock is held while they wait."""
    meet = threading.Barrier(2, timeout=60)
    sets = [parameters(mesh, [[Shard(0)]]) for _ in range(2)]
    errors: list[BaseException] = []

    def train(params: list[Any]) -> None:
        try:
            for k in range(3):
                give(params, k)
                meet.wait()
                fuseopt.clip_grad_norm_(params, 0.5)
        except BaseException as error:
            errors.append(error)
            meet.abort()

    threads = [threading.Thread(target=train, args=(params,)) for params in sets]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


@pytest.mark.slow
def test_nothing_is_kept(mesh: DeviceMesh) -> None:
    params = parameters(mesh, [[Shard(0)]])
    give(params, 1)
    fuseopt.clip_grad_norm_(params, 0.5)
    held = [weakref.ref(p) for p in params] + [weakref.ref(params[0].grad)]
    del params
    gc.collect()
    assert not [x for x in held if x() is not None]


@pytest.mark.parametrize("first", [True, False])
def test_a_part_whose_memory_was_taken_away(mesh: DeviceMesh, first: bool) -> None:
    """At it torch's function ends the process; when it has memory, it is compiled."""
    one, other = (parameters(mesh, [[Shard(0)]]) for _ in range(2))
    for k in range(1 if first else 2):
        if k:
            both(one, other, 1.0)
        for params in (one, other):
            give(params, k)
    memory = other[0].grad._local_tensor.untyped_storage()
    content = memory.clone()
    memory.resize_(0)
    refused = pytest.raises(fuseopt.errors.UnsupportedInput, match="no memory")
    with profile() as seen, refused:
        fuseopt.clip_grad_norm_(other, 1.0)
    assert not [e for e in seen.function_events if "c10d::" in e.name]
    memory.resize_(content.nbytes())
    memory.copy_(content)
    both(one, other, 1.0)
    assert fuseopt.reports()[-1].launches == 2


def test_no_warning(mesh: DeviceMesh) -> None:
    params = parameters(mesh, [[Shard(0)]])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for k in range(3):
            give(params, k)
            fuseopt.clip_grad_norm_(params, 0.5)
    assert not [str(w.message) for w in told if "fuseopt" in str(w.message)]
