"""Steps that treat each element alike, of DTensors: eager's bits, one launch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import fuseopt
from fuseopt.shards.local import LocalOptimizer
from tests.papers import ELEMENTWISE, Lion
from tests.shards import assert_same, local, spread
from tests.shards.steps import WAYS, compared, give, parameters, run, step_of

TORCH: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (AdamW, {}),
    (Adam, {"foreach": True, "amsgrad": True}),
    (SGD, {}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (RMSprop, {"centered": True, "momentum": 0.5}),
]


def last_report() -> Any:
    return fuseopt.reports()[-1]


@pytest.mark.family(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize(("kind", "options"), TORCH, ids=lambda x: str(x)[-40:])
def test_torch(
    mesh: DeviceMesh, kind: Any, options: dict[str, Any], n: int, way: str
) -> None:
    assert not compared(lambda ps: kind(ps, lr=0.1, **options), mesh, n, way)
    assert last_report().launches == 1
    assert not last_report().fallback
    assert not last_report().externs


#: Of those, what keeps a step from the shards.
EAGER = {"AggMo": "differs between lanes"}
QUICK = ("Lion", "AggMo", "FTRL", "QHAdam")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind.__name__ in QUICK else pytest.mark.slow)
        for kind, _ in ELEMENTWISE
    ],
    ids=lambda kind: kind.__name__,
)
def test_papers(mesh: DeviceMesh, kind: Any) -> None:
    told = compared(lambda ps: kind(ps, lr=0.1), mesh, 12, WAYS[0])
    why = EAGER.get(kind.__name__)
    if why:
        assert len(told) == 1
        assert "DTensors" in told[0]
        assert why in told[0]
        return
    assert not told
    assert last_report().launches == 1
    assert not last_report().externs


@pytest.mark.parametrize("n", [4, 20])
def test_parameters_of_several_meshes_and_plain_ones(mesh: DeviceMesh, n: int) -> None:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def params() -> list[torch.nn.Parameter]:
        found: list[Any] = parameters(mesh, n)
        both = spread(torch.randn(5, 6), square, [Shard(0), Shard(1)])
        part = spread(torch.randn(6), square["tp"], [Shard(0)])
        found += [torch.nn.Parameter(both), torch.nn.Parameter(part)]
        found += [torch.nn.Parameter(torch.randn(3, 3))]
        return found

    want = run(lambda ps: AdamW(ps), params(), "")
    got = run(lambda ps: AdamW(ps), params(), WAYS[0])
    assert_same(got, want)
    assert last_report().launches == 1


def test_the_state_is_as_eager_makes_it(mesh: DeviceMesh) -> None:
    optimizer = run(lambda ps: AdamW(ps), parameters(mesh, 6), WAYS[0], steps=1)
    for p, state in optimizer.state.items():
        assert type(state["step"]) is torch.Tensor
        assert type(state["exp_avg"]) is DTensor
        assert state["exp_avg"]._spec == p._spec
        assert state["exp_avg"].full_tensor is not None


@pytest.mark.family(4)
@pytest.mark.parametrize("n", [3, 20])
@pytest.mark.parametrize("way", WAYS)
def test_what_changes_between_steps(mesh: DeviceMesh, way: str, n: int) -> None:
    def between(o: Optimizer, k: int) -> None:
        params = o.param_groups[0]["params"]
        if k == 1:
            params[0].grad = None
        if k == 2:
            for p in params:
                p.grad = None
        if k == 3:
            state = o.state_dict()
            o.load_state_dict(state)
        if k == 4:  # another part of the same size, as FSDP gives when it is moved
            own = params[1]
            own._local_tensor = own._local_tensor.clone()
        if k == 5:  # the same, in place
            own = params[1]._local_tensor
            own.data = own.data.clone()

    assert not compared(lambda ps: AdamW(ps), mesh, n, way, between)


def test_other_placements_are_a_new_plan(mesh: DeviceMesh) -> None:
    def between(o: Optimizer, k: int) -> None:
        if k == 3:
            params = o.param_groups[0]["params"]
            old = params[0]
            whole = torch.arange(40.0).reshape(8, 5)
            params[0] = torch.nn.Parameter(spread(whole, mesh, [Shard(1)]))
            o.state.pop(old)
            g = torch.Generator().manual_seed(7)
            give(params, g)

    assert not compared(lambda ps: AdamW(ps), mesh, 6, WAYS[0], between)


@pytest.mark.family(3)
@pytest.mark.parametrize("kind", [SGD, AdamW, Lion])
def test_a_part_of_one_row(mesh: DeviceMesh, kind: Any) -> None:
    """It is a view of the whole row, whose stride its gradient and state have not."""

    def make(ps: Any) -> Optimizer:
        return kind(ps, lr=0.1, **({"momentum": 0.9} if kind is SGD else {}))

    def params() -> list[torch.nn.Parameter]:
        whole = spread(torch.arange(14.0).reshape(1, 14), mesh, [Shard(1)])
        assert local(whole).stride() == (14, 1)
        return [torch.nn.Parameter(whole)]

    def grad(o: Optimizer, k: int) -> None:
        (p,) = o.param_groups[0]["params"]
        g = torch.ones(local(p).shape) / (1 + k)
        assert g.stride() != local(p).stride()
        p.grad = DTensor(g, p._spec, requires_grad=False)

    want = run(make, params(), "", between=grad)
    got = run(make, params(), WAYS[0], between=grad)
    assert_same(got, want)
    assert last_report().launches == 1


def in_one_storage(optimizer: Optimizer, k: int) -> None:
    """Gradients beside each other, as one collective makes those of a layer."""
    memory, first = torch.arange(1000.0) / (7 + k), 0
    for p in optimizer.param_groups[0]["params"]:
        part = local(p)
        g = memory[first : first + part.numel()].view(part.shape)
        first += part.numel()
        p.grad = DTensor(g, p._spec, requires_grad=False)


@pytest.mark.family(6)
@pytest.mark.parametrize(
    "shape", [(3, 5), (8, 2), (4,)], ids=["empty", "even", "one element"]
)
@pytest.mark.parametrize("n", [2, 20])
def test_gradients_in_one_storage(
    mesh: DeviceMesh, n: int, shape: tuple[int, ...]
) -> None:
    """Of parts without elements several begin at the same place."""

    def params() -> list[torch.nn.Parameter]:
        torch.manual_seed(0)
        parts = [spread(torch.randn(shape), mesh, [Shard(0)]) for _ in range(n)]
        return [*map(torch.nn.Parameter, parts)]

    def make(ps: Any) -> Optimizer:
        return SGD(ps, momentum=0.9)

    want = run(make, params(), "", between=in_one_storage)
    got = run(make, params(), WAYS[0], between=in_one_storage)
    assert_same(got, want)
    assert last_report().launches == 1


@pytest.mark.parametrize("n", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_no_gradient_is_kept(mesh: DeviceMesh, n: int) -> None:
    import gc
    import weakref

    params = parameters(mesh, n)
    optimizer = AdamW(params)
    step = step_of(optimizer, WAYS[0])
    for _ in range(3):
        give(params, torch.Generator().manual_seed(0))
        step()
        kept = [weakref.ref(local(p.grad)) for p in params]
        optimizer.zero_grad()
        gc.collect()
        assert not any(ref() is not None for ref in kept)


def test_nothing_is_kept_of_an_optimizer_that_is_gone(mesh: DeviceMesh) -> None:
    import gc
    import weakref

    params = parameters(mesh, 6)
    optimizer = AdamW(params)
    step_of(optimizer, WAYS[0])
    for _ in range(2):
        give(params, torch.Generator().manual_seed(0))
        optimizer.step()
    kept = [weakref.ref(x) for s in optimizer.state.values() for x in s.values()]
    kept.append(weakref.ref(optimizer))
    del optimizer
    gc.collect()
    assert not any(ref() is not None for ref in kept)


@pytest.mark.slow
def test_an_exception_before_the_launch_changes_nothing(mesh: DeviceMesh) -> None:
    params = parameters(mesh, 6)
    optimizer = AdamW(params)
    step_of(optimizer, WAYS[0])
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        give(params, generator)
        optimizer.step()
    before = [local(p).clone() for p in params]
    held = {k: dict(v) for k, v in optimizer.state.items()}
    memory = local(params[0].grad).untyped_storage()
    content = memory.clone()
    memory.resize_(0)
    with pytest.raises(Exception, match="no memory"):
        optimizer.step()
    memory.resize_(content.nbytes())
    memory.copy_(content)
    assert all(map(torch.equal, map(local, params), before))
    assert held == {k: dict(v) for k, v in optimizer.state.items()}
    optimizer.step()
    assert not torch.equal(local(params[0]), before[0])


def test_autograd_sees_that_parameters_changed(mesh: DeviceMesh) -> None:
    params = parameters(mesh, 6)
    optimizer = AdamW(params)
    step_of(optimizer, WAYS[0])
    give(params, torch.Generator().manual_seed(0))
    optimizer.step()
    versions = [(p._version, local(p)._version) for p in params]
    params[1].grad = None
    optimizer.step()
    for p, (whole, part) in zip(params, versions, strict=True):
        changed = p is not params[1]
        assert (p._version > whole) == (local(p)._version > part) == changed


def test_a_backward_through_what_was_stepped_is_an_error(mesh: DeviceMesh) -> None:
    for way in ("", WAYS[0]):
        params = parameters(mesh, 1)
        optimizer = SGD(params, lr=0.1)
        step = step_of(optimizer, way)
        for _ in range(2):
            loss = (params[0] * params[0]).sum()
            give(params, torch.Generator().manual_seed(0))
            step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_a_closure_that_is_none(mesh: DeviceMesh) -> None:
    """As trainers call a step."""
    want, got = (
        run(lambda ps: AdamW(ps), parameters(mesh, 6), way, 0) for way in ("", WAYS[0])
    )
    for optimizer in (want, got):
        for k in range(3):
            params = optimizer.param_groups[0]["params"]
            give(params, torch.Generator().manual_seed(k))
            optimizer.step(None) if k % 2 else optimizer.step(closure=None)
    assert_same(got, want)
    assert last_report().launches == 1
    assert not last_report().fallback


@pytest.mark.slow
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("n", [6, 20])
def test_2000_steps_leave_nothing(mesh: DeviceMesh, n: int, clip: bool) -> None:
    """Of specs that eager's fused steps leave, and of all else."""
    import gc
    import resource

    params = parameters(mesh, n)
    optimizer = AdamW(params)
    step = step_of(optimizer, WAYS[0])
    generator = torch.Generator().manual_seed(0)
    seen = []
    for k in range(2001):
        give(params, generator)
        if clip:
            fuseopt.clip_grad_norm_(params, 1.0 + k)
        step()
        optimizer.zero_grad()
        if k in (500, 2000):
            gc.collect()
            kinds = Counter(type(x).__qualname__ for x in gc.get_objects())
            # after that list, which counts in both: it may take megabytes
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            seen.append((kinds, used))
    (objects, memory), (later, most) = seen
    more = (later - objects).most_common(8)
    assert later.total() - objects.total() < 100, more
    assert most - memory < 8 * 1024, more


class Swaps(Optimizer):
    """Two tensors of state take turns, or the older one is kept under another name."""

    def __init__(self, params: Any, keeps: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.keeps = keeps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["a"] = torch.zeros_like(p)
                    state["b"] = torch.zeros_like(p)
                new = state["a"] * 0.9 + p.grad
                p.add_(new + state["b"], alpha=-group["lr"])
                if self.keeps:
                    state["a"], state["b"] = new, state["a"]
                else:
                    state["a"].copy_(new)
                    state["a"], state["b"] = state["b"], state["a"]


@pytest.mark.family(4)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("n", [3, 20])
def test_state_that_gets_another_name(mesh: DeviceMesh, n: int, keeps: bool) -> None:
    """It raised: Boolean value of Tensor with more than one value is ambiguous."""
    assert not compared(lambda ps: Swaps(ps, keeps), mesh, n, WAYS[0])


@pytest.mark.family(4)
@pytest.mark.parametrize("n", [6, 30])
@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_after_the_writes(
    mesh: DeviceMesh, n: int, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the step has made is with both optimizers; nothing is taken for known."""
    settle = LocalOptimizer.settle
    calls: list[int] = []

    def interrupted(self: LocalOptimizer) -> None:
        calls.append(1)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        settle(self)

    monkeypatch.setattr(LocalOptimizer, "settle", interrupted)
    ends = []
    for way in ("", "fuseopt.compile"):
        params = parameters(mesh, n)
        optimizer = AdamW(params)
        step = step_of(optimizer, way)
        generator = torch.Generator().manual_seed(0)
        for k in range(5):
            give(params, generator)
            if way and k == at:
                with pytest.raises(KeyboardInterrupt):
                    step()
            else:
                step()
        ends.append(optimizer)
    assert len(calls) == 5
    assert_same(ends[1], ends[0])
