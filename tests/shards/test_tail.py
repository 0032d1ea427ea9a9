"""The tail of DTensors: eager's bits, torch's collectives, two launches."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.optim import SGD, AdamW, Optimizer

import fuseopt
from fuseopt.errors import CaptureError
from fuseopt.replicate.driver import LedOptimizer
from fuseopt.tails import compiling
from fuseopt.tails.part_norm import PartNorm
from tests.papers import LAMB, Lion
from tests.shards import assert_same, difference, local, spread
from tests.shards.test_clip import collectives, give, parameters

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda ps: AdamW(ps, lr=0.1),
    "SGD": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "Lion": lambda ps: Lion(ps, lr=0.1),
}


@pytest.fixture
def square(group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Pair:
    """Two optimizers of the same, one stepped by eager's lines, one by a tail."""

    def __init__(self, params: Callable[[], list[Any]], make: Make, **given: Any):
        self.params = params(), params()
        self.plain, self.led = map(make, self.params)
        self.given = given
        self.averages, self.copies = (
            [
                [p.detach().clone().to(dtype or p.dtype) for p in ps]
                for ps in self.params
            ]
            for dtype in (None, torch.bfloat16)
        )
        more: dict[str, Any] = {k: v for k, v in given.items() if k != "decay"}
        if "decay" in given:
            more["ema"] = [(self.averages[1], given["decay"])]
        if given.get("copies"):
            more["copies"] = self.copies[1]
        self.tail = fuseopt.tail(self.led, **more)

    @torch.no_grad()
    def eager(self) -> Any:
        params, given, norm = self.params[0], self.given, None
        grads = [p.grad for p in params if p.grad is not None]
        if given.get("grad_divisor"):
            torch._foreach_div_(grads, given["grad_divisor"])
        limit = self.tail.clip_grad_norm
        if limit is not None:
            kind = given.get("norm_type", 2.0)
            norm = torch.nn.utils.clip_grad_norm_(params, limit, kind)
        if given.get("clip_grad_value"):
            torch._foreach_clamp_min_(grads, -given["clip_grad_value"])
            torch._foreach_clamp_max_(grads, given["clip_grad_value"])
        self.plain.step()
        if "decay" in given:
            torch._foreach_lerp_(self.averages[0], params, 1 - given["decay"])
        if given.get("copies"):
            for own, p in zip(self.copies[0], params, strict=True):
                own.copy_(p)  # DTensor has no list of these
        if given.get("zero_grad") is True:
            self.plain.zero_grad()
        elif given.get("zero_grad") and grads:
            torch._foreach_zero_(grads)
        return norm

    def step(self, counted: bool = False) -> None:
        """Both step; norms, parameters, state, gradients and averages are the same."""
        with profile() as theirs:
            norm = self.eager()
        with profile() as ours:
            out = self.tail()
        assert not difference(out.norm, norm)
        assert out.skipped is False
        assert_same(self.led, self.plain)
        for a, b in zip(*self.params, strict=True):
            assert not difference(b.grad, a.grad)
        for held in (self.averages, self.copies):
            assert not difference(held[1], held[0])
        if counted:
            assert sent(ours) == sent(theirs)

    def run(self, steps: int = 6, without: int = -1) -> None:
        for k in range(steps):
            for params, optimizer in zip(
                self.params, (self.plain, self.led), strict=True
            ):
                give(params, k)
                if without >= 0 and k >= 3:
                    params[(without + k) % len(params)].grad = None
                optimizer.param_groups[0]["lr"] = 0.01 * (k + 1)
            self.step(counted=k > 1)


def sent(seen: profile) -> int:
    """How many collectives there were, under either name."""
    names = [e.name for e in seen.function_events]
    return names.count("c10d::allreduce_") or collectives(seen)


def reports() -> list[Any]:
    return [r for r in fuseopt.reports() if str(r.traced).startswith("a tail")]


@pytest.mark.family(3)
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_launches_and_torchs_collective(
    mesh: DeviceMesh, name: str, n: int
) -> None:
    """Even, uneven and empty parts, at any number of them."""
    pair = Pair(
        lambda: parameters(mesh, [[Shard(0)]] * n),
        OPTIMIZERS[name],
        clip_grad_norm=0.5,
        zero_grad=True,
    )
    pair.run()
    (report,) = reports()
    assert report.launches == 2
    assert not report.fallback
    for params in pair.params:
        give(params, 3)
    with profile() as seen:
        pair.tail()
    names = [e.name for e in seen.function_events]
    assert sent(seen) == 1
    kernels = [x for x in names if x.startswith("fuseopt::")]
    assert len(kernels) == 2, names
    # one more: the caller's own norm
    assert sorted(x for x in names if x.startswith("aten::")) == [
        "aten::clone",
        "aten::copy_",
        "aten::empty_strided",
    ]


GIVEN: dict[str, dict[str, Any]] = {
    "all": {
        "clip_grad_norm": 0.5,
        "clip_grad_value": 0.01,
        "grad_divisor": 3.0,
        "decay": 0.9,
        "copies": True,
        "zero_grad": "zeros",
    },
    "without a clip": {"decay": 0.99, "zero_grad": True},
    "the gradients stay": {"clip_grad_norm": 2.0, "grad_divisor": 4.0},
    "measured alone": {"clip_grad_norm": float("inf"), "zero_grad": True},
    "norm 1": {"clip_grad_norm": 2.0, "norm_type": 1.0},
    "norm 3": {"clip_grad_norm": 2.0, "norm_type": 3.0},
}


@pytest.mark.family(3)
@pytest.mark.parametrize("asked", GIVEN)
def test_bits_of_all_that_a_tail_does(mesh: DeviceMesh, asked: str) -> None:
    pair = Pair(
        lambda: parameters(mesh, [[Shard(0)], [Replicate()], [Shard(1)]][:2]),
        OPTIMIZERS["AdamW"],
        **GIVEN[asked],
    )
    pair.run()
    assert reports()
    assert not any(r.fallback for r in fuseopt.reports())


@pytest.mark.family(2)
@pytest.mark.parametrize(
    ("placements", "launches"),
    [
        ([[Shard(0), Shard(1)], [Shard(0), Replicate()], [Replicate(), Shard(0)]], 3),
        ([[Replicate(), Shard(0)]], 2),
        ([[Shard(0), Shard(0)]], 3),
        ([[Replicate(), Replicate()]], 2),
    ],
)
def test_meshes_of_two_dimensions(
    square: DeviceMesh, placements: Any, launches: int
) -> None:
    """Between two sums over processes stands a launch."""

    def made() -> list[Any]:
        torch.manual_seed(0)
        return [
            torch.nn.Parameter(spread(torch.randn(size), square, p))
            for p in placements
            for size in ((6, 4), (5, 3))
        ]

    pair = Pair(made, OPTIMIZERS["AdamW"], clip_grad_norm=0.5, zero_grad=True)
    pair.run()
    (report,) = reports()
    assert report.launches == launches
    assert not report.fallback


@pytest.mark.family(2)
@pytest.mark.parametrize("zero", [True, False])
def test_gradients_that_are_missing_in_turn(mesh: DeviceMesh, zero: bool) -> None:
    pair = Pair(
        lambda: parameters(mesh, [[Shard(0)]] * 2),
        OPTIMIZERS["AdamW"],
        clip_grad_norm=0.5,
        zero_grad=zero,
    )
    pair.run(8, without=0)
    assert not any(r.fallback for r in fuseopt.reports())


def test_no_gradient_at_all(mesh: DeviceMesh) -> None:
    pair = Pair(
        lambda: parameters(mesh, [[Shard(0)]]), OPTIMIZERS["SGD"], clip_grad_norm=0.5
    )
    pair.run(3)
    pair.led.zero_grad()
    with profile() as seen:
        pair.tail()
    assert sent(seen) == 0


def test_a_limit_that_moves_compiles_once(mesh: DeviceMesh) -> None:
    pair = Pair(
        lambda: parameters(mesh, [[Shard(0)]]), OPTIMIZERS["SGD"], clip_grad_norm=0.5
    )
    for k in range(8):
        for params in pair.params:
            give(params, k % 5)
        pair.tail.clip_grad_norm = 0.1 * (k + 1)
        pair.step()
    assert len(reports()) == 1


def test_versions_move(mesh: DeviceMesh) -> None:
    pair = Pair(
        lambda: parameters(mesh, [[Shard(0)]]),
        OPTIMIZERS["SGD"],
        clip_grad_norm=0.5,
        decay=0.9,
    )
    for k in range(4):
        give(pair.params[1], k)
        if k == 0:
            pair.tail()
            continue
        seen = [*pair.params[1], *(p.grad for p in pair.params[1]), *pair.averages[1]]
        before = [t._version for t in seen]
        pair.tail()
        assert all(t._version > v for t, v in zip(seen, before, strict=True))


def test_gradients_spread_in_another_way_are_clipped_in_pieces(
    mesh: DeviceMesh,
) -> None:
    """That call alone; a gradient that is to be added up, too."""
    pair = Pair(
        lambda: parameters(mesh, [[Shard(0)]]), OPTIMIZERS["SGD"], clip_grad_norm=0.5
    )
    pair.run(3)
    for placements in ([Replicate()], [Partial()], None):
        for params in pair.params:
            give(params, 2, placements)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            if placements == [Partial()]:
                # torch's own step takes none
                continue
            pair.step()
    assert [str(r.fallback) for r in fuseopt.reports() if "pieces" in str(r.fallback)]
    for params in pair.params:
        give(params, 1)
    known = len(fuseopt.reports())
    pair.step()
    assert len(fuseopt.reports()) == known


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_what_fails_when_all_processes_were_asked(
    mesh: DeviceMesh, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not asked again: the clip is done, then the step by itself."""
    pair = Pair(
        lambda: parameters(mesh, [[Shard(0)]]),
        OPTIMIZERS[name],
        clip_grad_norm=0.5,
        grad_divisor=2.0,
        decay=0.9,
        zero_grad=True,
    )
    pair.run(1)

    class Refuses(LedOptimizer):
        def step(self, *_: Any, **__: Any) -> bool:
            self.refusal = "it was told to"
            return False

    with monkeypatch.context() as patch:
        patch.setattr(compiling, "LedOptimizer", Refuses)
        for params in pair.params:
            give(params, 3)
        with profile() as ours:
            out = pair.tail()
        norm = pair.eager()
    assert sent(ours) == 1
    assert not difference(out.norm, norm)
    for a, b in zip(*pair.params, strict=True):
        assert not difference(b, a)
    assert not difference(pair.averages[1], pair.averages[0])
    told = [str(r.fallback) for r in fuseopt.reports()]
    assert "A tail runs in pieces: it was told to" in told
    pair.run(3)


def test_with_fallback_error_nothing_is_written(mesh: DeviceMesh) -> None:
    params = parameters(mesh, [[Shard(0)]])
    optimizer = LAMB(params, lr=0.1)
    tail = fuseopt.tail(optimizer, clip_grad_norm=0.5, fallback="error")
    give(params, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        tail()  # makes the state, in eager
    give(params, 2)
    before = [local(t).detach().clone() for p in params for t in (p, p.grad)]
    with pytest.raises(CaptureError, match="pieces"):
        tail()
    after = [local(t).detach() for p in params for t in (p, p.grad)]
    assert all(map(torch.equal, before, after))


@pytest.mark.slow
def test_a_step_of_whole_tensors_has_its_clip_compiled(mesh: DeviceMesh) -> None:
    pair = Pair(
        lambda: parameters(mesh, [[Shard(0)]]),
        lambda ps: LAMB(ps, lr=0.1),
        clip_grad_norm=0.5,
        zero_grad=True,
    )
    pair.run(4)
    assert any("reads sizes" in r.traced for r in fuseopt.reports())
    assert fuseopt.reports()[-1].launches == 2


def test_an_error_between_the_launches_leaves_all_as_it_was(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective that is cut off; the next call is eager's."""
    pair = Pair(
        lambda: parameters(mesh, [[Shard(0)]]),
        OPTIMIZERS["AdamW"],
        clip_grad_norm=0.5,
        zero_grad=True,
    )
    pair.run(4)
    call = PartNorm.__call__

    def ends(self: PartNorm, *args: Any) -> None:
        call(self, *args)
        raise KeyboardInterrupt

    for params in pair.params:
        give(params, 2)
    params = pair.params[1]
    before = [local(t).detach().clone() for p in params for t in (p, p.grad)]
    with monkeypatch.context() as patch:
        patch.setattr(PartNorm, "__call__", ends)
        with pytest.raises(KeyboardInterrupt):
            pair.tail()
    after = [local(t).detach() for p in params for t in (p, p.grad)]
    assert all(map(torch.equal, before, after))
    pair.step()
    pair.run(3)


def test_dtensors_beside_plain_tensors_raise_torchs_error(mesh: DeviceMesh) -> None:
    def made() -> list[Any]:
        return [*parameters(mesh, [[Shard(0)]]), torch.nn.Parameter(torch.ones(3))]

    optimizer = SGD(made(), lr=0.1)
    tail = fuseopt.tail(optimizer, clip_grad_norm=0.5)
    params = optimizer.param_groups[0]["params"]
    for _ in range(2):
        give(params[:-1], 1)
        params[-1].grad = torch.ones(3)
        with pytest.raises(RuntimeError, match="got mixed"):
            tail()


def test_averages_that_are_spread_otherwise_are_updated_as_eager_does(
    mesh: DeviceMesh,
) -> None:
    params = parameters(mesh, [[Shard(0)]])
    own = [spread(torch.zeros(p.shape), mesh, [Replicate()]) for p in params]
    optimizer = SGD(params, lr=0.1)
    tail = fuseopt.tail(optimizer, ema=[(own, 0.5)])
    give(params, 1)
    tail()
    give(params, 1)
    before = [p.detach().clone() for p in own]
    tail()
    assert any("average" in str(r.fallback) for r in fuseopt.reports())
    with torch.no_grad():
        torch._foreach_lerp_(before, [p.detach() for p in params], 0.5)
    assert not difference(own, before)


@pytest.mark.slow
def test_a_state_that_is_loaded_is_followed(mesh: DeviceMesh) -> None:
    pair = Pair(
        lambda: parameters(mesh, [[Shard(0)]]),
        OPTIMIZERS["AdamW"],
        clip_grad_norm=0.5,
        zero_grad=True,
    )
    pair.run(3)
    for optimizer in (pair.plain, pair.led):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pair.run(3)


def test_parts_that_move(mesh: DeviceMesh) -> None:
    """Parameters, averages and state in other memory, as after a checkpoint."""
    pair = Pair(
        lambda: parameters(mesh, [[Shard(0)]]),
        OPTIMIZERS["AdamW"],
        clip_grad_norm=0.5,
        decay=0.9,
        zero_grad=True,
    )
    pair.run(3)
    held = [*pair.averages[1], *pair.params[1]]
    held += [pair.led.state[p]["exp_avg"] for p in pair.params[1]]
    for t in held:
        t._local_tensor = t._local_tensor.detach().clone()
    pair.run(3)


def test_nothing_is_kept(mesh: DeviceMesh) -> None:
    def stepped() -> list[Any]:
        params = parameters(mesh, [[Shard(0)]])
        optimizer = AdamW(params, lr=0.1)
        tail = fuseopt.tail(optimizer, clip_grad_norm=0.5)
        for k in range(3):
            give(params, k)
            tail()
        return [*map(weakref.ref, [*params, params[0].grad, optimizer, tail])]

    held = stepped()
    gc.collect()
    assert not [x for x in held if x() is not None]


@pytest.mark.slow
def test_no_warning(mesh: DeviceMesh) -> None:
    def told(call: Callable[[], Any]) -> Sequence[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call()
        return [str(w.message) for w in seen if "fuseopt" in str(w.message)]

    pair = Pair(
        lambda: parameters(mesh, [[Shard(0)]]), OPTIMIZERS["SGD"], clip_grad_norm=0.5
    )
    assert not told(pair.run)
