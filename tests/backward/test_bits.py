"""The bits of `loss.backward(); opt.step(); opt.zero_grad()`, whatever the buckets."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR
from torch.utils.checkpoint import checkpoint

import fuseopt
from fuseopt.replicate.driver import LedOptimizer
from tests.backward.pairs import Pair, model
from tests.counts import Counts
from tests.papers.momentum import Lion
from tests.papers.reducing import LAMB
from tests.steps import same_bits
from tests.versions import one_counter_for_all


def adamw(params: Any) -> Optimizer:
    return AdamW(params, 1e-2)


def momentum(params: Any) -> Optimizer:
    return SGD(params, 1e-2, momentum=0.9, weight_decay=0.01)


def lion(params: Any) -> Optimizer:
    return Lion(params, 1e-2, weight_decay=0.1)


def foreach(params: Any) -> Optimizer:
    return Adam(params, 1e-2, amsgrad=True, foreach=True)


def tensor_rate(params: Any) -> Optimizer:
    return Adam(params, torch.tensor(1e-2), capturable=False)


def muon(params: Any) -> Optimizer:
    return torch.optim.Muon([p for p in params if p.dim() == 2], 1e-2)


def rmsprop(params: Any) -> Optimizer:
    return torch.optim.RMSprop(params, 1e-2, momentum=0.5)


EVERY = [
    torch.optim.Adafactor,
    pytest.param(torch.optim.Adagrad, marks=one_counter_for_all),
    rmsprop,
    adamw,
    momentum,
    lion,
    LAMB,
    foreach,
    tensor_rate,
    NAdam,
]


@pytest.mark.family(30)
@pytest.mark.family(30)
@pytest.mark.parametrize("buckets", ["layer", 200, 32 << 20])
@pytest.mark.parametrize("build", EVERY)
def test_bits_and_state(build: Any, buckets: Any) -> None:
    pair = Pair(build, buckets)
    for _ in range(4):
        pair.step()
    assert {r.fallback for r in fuseopt.reports()} == {""}


def test_matrices_alone() -> None:
    """Others are not the optimizer's: their gradients stay, as in eager."""
    pair = Pair(muon)
    for _ in range(3):
        pair.both(lambda m, _: m.zero_grad())
        pair.backward()
        pair.plain.step()
        for p, q in zip(pair.theirs.parameters(), pair.mine.parameters(), strict=True):
            assert same_bits(q.detach(), p.detach())
            assert (q.grad is None) == (p.dim() == 2)


def test_autocast_around_a_backward() -> None:
    """Its products of matrices are those of the step outside of it."""
    pair = Pair(muon, of=lambda: torch.nn.Sequential(torch.nn.Linear(6, 6, False)))
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            pair.backward()
        pair.plain.step()
        pair.plain.zero_grad()
        pair.check()


@pytest.mark.slow
def test_a_model_that_is_compiled() -> None:
    pair = Pair(adamw)
    torch.manual_seed(0)
    for m in (pair.theirs, pair.mine):
        m.compile(backend="aot_eager")
    for _ in range(3):
        pair.step()


def test_torch_s_fused_kernels_are_replaced() -> None:
    nets = [model(2), model(2)]
    plain = AdamW(nets[0].parameters(), 1e-2, foreach=True)
    handle = fuseopt.in_backward(
        nets[1], lambda params: AdamW(params, 1e-2, fused=True), buckets="layer"
    )
    for _ in range(4):
        x = torch.randn(3, 6)
        for net in nets:
            net(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert same_bits(q.detach(), p.detach())
    assert handle.param_groups[0]["fused"]


@pytest.mark.slow
def test_all_buckets_share_one_program(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 buckets are traced and built once, for their first step and for the others."""
    pair = Pair(adamw, of=lambda: model(12))
    for _ in range(2):
        pair.step()
    assert len(pair.handle._buckets) > 12
    traces, texts = counts.traces, len(counts.texts)
    # kinds: matrices and vectors in one bucket, vectors alone, a number alone
    assert traces <= 3
    assert texts <= 3
    planned: list[int] = []
    for name in ("_survey", "prove"):
        known = getattr(LedOptimizer, name)
        monkeypatch.setattr(
            LedOptimizer,
            name,
            lambda *args, known=known: planned.append(1) or known(*args),
        )
    for _ in range(4):
        pair.step()
    assert (counts.traces, len(counts.texts)) == (traces, texts)
    # each bucket finds what it had
    assert not planned


@pytest.mark.family(8)
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: ExponentialLR(o, 0.9),
        lambda o: CosineAnnealingLR(o, 5),
        lambda o: OneCycleLR(o, 0.1, total_steps=8),
    ],
)
@pytest.mark.parametrize("build", [adamw, momentum, lion])
def test_schedules_are_read_at_the_next_backward(
    build: Any, schedule: Any, recwarn: pytest.WarningsRecorder
) -> None:
    if build is lion and "OneCycle" in str(schedule.__code__.co_names):
        pytest.skip("Lion has betas, and no momentum in its defaults")
    pair = Pair(build)
    schedules = [schedule(pair.plain), schedule(pair.handle)]
    for _ in range(6):
        pair.step()
        for s in schedules:
            s.step()
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


def in_groups(m: Any) -> list[dict[str, Any]]:
    params = [*m.parameters()]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "lr": 0.003},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("build", [adamw, momentum])
def test_groups_and_what_is_set_in_them(build: Any) -> None:
    pair = Pair(build, groups=in_groups)
    for k in range(5):
        pair.step()

        def change(_: Any, opt: Any, k: int = k) -> None:
            opt.param_groups[k % 2]["lr"] *= 0.7
            opt.param_groups[1]["weight_decay"] = 0.01 * k

        pair.both(change)


@pytest.mark.slow
@pytest.mark.parametrize("build", [adamw, momentum, lion])
def test_parameters_without_a_gradient(build: Any) -> None:
    """Blocks that a forward leaves out: their buckets do not fill."""
    pair = Pair(build, 400)
    draw = random.Random(1)
    for k in range(8):
        off = (
            [draw.random() < 0.4 for _ in range(4)] if k else [True, False, True, False]
        )
        off[draw.randrange(4)] = False

        def change(m: Any, _: Any, off: Any = off) -> None:
            for block, x in zip(m, off, strict=True):
                block.off = x

        pair.both(change)
        pair.step()


@pytest.mark.slow
@pytest.mark.parametrize("build", [adamw, momentum])
def test_frozen_and_freed_between_steps(build: Any) -> None:
    def freeze(m: Any, numbers: Any) -> None:
        for i, p in enumerate(m.parameters()):
            p.requires_grad_(i not in numbers)

    pair = Pair(build, 300, of=lambda: model(3))
    draw = random.Random(2)
    for _ in range(8):
        numbers = {i for i in range(15) if draw.random() < 0.5}
        pair.both(lambda m, _, numbers=numbers: freeze(m, numbers))
        if any(p.requires_grad for p in pair.mine.parameters()):
            pair.step()


@pytest.mark.slow
def test_frozen_when_it_was_made() -> None:
    """And the only ones that are trained later."""

    def frozen() -> Any:
        made = model(3)
        for p in made[0].parameters():
            p.requires_grad_(False)
        return made

    pair = Pair(adamw, of=frozen)
    pair.step()

    def turn(m: Any, _: Any) -> None:
        for k, block in enumerate(m):
            block.requires_grad_(k == 0)

    pair.both(turn)
    for _ in range(3):
        pair.step()


@pytest.mark.family(3)
@pytest.mark.parametrize("build", [adamw, momentum, lion])
def test_accumulation(build: Any) -> None:
    pair = Pair(build)
    for _ in range(3):
        with pair.handle.accumulate():
            for _ in range(2):
                pair.backward()
                pair.check(grads=True)
        pair.step()


@pytest.mark.slow
def test_what_was_accumulated_for_other_parameters_is_stepped_as_well() -> None:
    pair = Pair(momentum)
    pair.step()
    with pair.handle.accumulate():
        pair.backward()
    pair.both(lambda m, _: setattr(m[1], "off", True))
    pair.step()


@pytest.mark.slow
def test_step_steps_what_was_accumulated() -> None:
    pair = Pair(adamw)
    with pair.handle.accumulate():
        pair.backward()
    pair.plain.step()
    pair.plain.zero_grad()
    pair.handle.step()
    pair.check()
    pair.handle.step()
    pair.check()


def test_a_closure() -> None:
    pair = Pair(momentum)
    x = pair.input()

    def closure_of(m: Any, opt: Any) -> Any:
        def closure() -> Any:
            opt.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        one = pair.plain.step(closure_of(pair.theirs, pair.plain))
        pair.plain.zero_grad()
        other = pair.handle.step(closure_of(pair.mine, pair.handle))
        assert torch.equal(one, other)
        pair.check()


@pytest.mark.slow
@pytest.mark.parametrize("build", [adamw, momentum])
def test_load_state_dict_in_the_middle(build: Any) -> None:
    """From eager to in backward and back, and a state of the past."""
    pair = Pair(build)
    for _ in range(2):
        pair.step()
    past = copy.deepcopy(pair.plain.state_dict())
    for _ in range(2):
        pair.step()
    pair.both(lambda _, opt: opt.load_state_dict(copy.deepcopy(past)))
    pair.step()
    pair.plain.load_state_dict(copy.deepcopy(pair.handle.state_dict()))
    pair.step()
    fresh = build([*pair.theirs.parameters()]).state_dict()
    pair.both(lambda _, opt: opt.load_state_dict(copy.deepcopy(fresh)))
    for _ in range(2):
        pair.step()


@pytest.mark.slow
def test_add_param_group() -> None:
    pair = Pair(adamw)
    pair.step()

    def add(m: Any, opt: Any) -> None:
        m.append(torch.nn.Linear(6, 6))
        with torch.no_grad():
            for p in m[-1].parameters():
                p.fill_(0.1)
        opt.add_param_group({"params": [*m[-1].parameters()], "lr": 0.05})

    pair.both(add)
    for _ in range(3):
        pair.step()


@pytest.mark.slow
def test_an_exception_in_a_backward() -> None:
    """Buckets that were stepped are stepped; the rest keeps its gradients."""
    pair = Pair(momentum)
    pair.step()
    raising = [True]

    def raises(_: Any) -> None:
        if raising[0]:
            raise ZeroDivisionError

    for m in (pair.theirs, pair.mine):
        m[1].register_forward_hook(
            lambda _m, _a, out: out.register_hook(raises) and None
        )
    x = pair.input()
    for m in (pair.theirs, pair.mine):
        with pytest.raises(ZeroDivisionError):
            m(x).square().mean().backward()
    stepped = [p for block in pair.theirs[2:] for p in block.parameters()]
    for p, q in zip(pair.theirs.parameters(), pair.mine.parameters(), strict=True):
        assert any(p is x for x in stepped) == (p.grad is not None)
        assert q.grad is None
    pair.plain.step()
    pair.plain.zero_grad()
    pair.check()
    assert not pair.handle._passes
    raising[0] = False
    for _ in range(2):
        pair.step()


@pytest.mark.slow
def test_a_graph_that_is_kept() -> None:
    """A second backward of what does not read parameters; each steps."""

    def of() -> Any:
        return torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(3)])

    pair = Pair(momentum, of=of)
    x = pair.input()
    sums = [sum(layer(x).sum() for layer in m) for m in (pair.theirs, pair.mine)]
    for _ in range(3):
        for s in sums:
            s.backward(retain_graph=True)  # type: ignore[union-attr]
        pair.plain.step()
        pair.plain.zero_grad()
        pair.check()


@pytest.mark.slow
def test_checkpoints() -> None:
    pair = Pair(adamw)
    for m in (pair.theirs, pair.mine):
        for block in m:
            forward = block.forward
            block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)
    for _ in range(3):
        pair.step()


@pytest.mark.slow
def test_gradients_that_autograd_does_not_accumulate() -> None:
    """torch.autograd.grad steps nothing, and neither do inputs that leave all out."""
    pair = Pair(adamw)
    pair.step()
    x = pair.input().requires_grad_()
    torch.autograd.grad(pair.mine(x).sum(), x)
    torch.autograd.grad(pair.mine(x).sum(), [*pair.mine.parameters()])
    pair.mine(x).sum().backward(inputs=[x])
    pair.check()


@pytest.mark.slow
def test_inputs_of_a_backward() -> None:
    pair = Pair(adamw, 300)
    for k in range(4):
        x = pair.input()
        for m in (pair.theirs, pair.mine):
            m(x).square().mean().backward(inputs=[*m.parameters()][k::2])
        pair.plain.step()
        pair.plain.zero_grad()
        pair.check()


def test_random_buckets() -> None:
    draw = random.Random(4)
    for build in (adamw, momentum):
        pair = Pair(build)
        params = [*pair.mine.parameters()]
        pair.handle.close()
        draw.shuffle(params)
        told = [params[i : i + 3] for i in range(0, len(params), 3)]
        pair.mine.requires_grad_(True)
        again = Pair(build)
        order = {id(p): i for i, p in enumerate(pair.mine.parameters())}
        own = [*again.mine.parameters()]
        again.handle.close()
        chosen = [[own[order[id(p)]] for p in bucket] for bucket in told]
        again.handle = fuseopt.in_backward(own, build, buckets=chosen)
        for _ in range(3):
            again.step()


@pytest.mark.slow
def test_other_dtypes_in_one_model() -> None:
    def of() -> Any:
        made = model(2)
        made[0].scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        return made.append(torch.nn.Linear(6, 6).bfloat16())

    class Cast(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.bfloat16()

    def cast() -> Any:
        made = of()
        made[0].register_forward_hook(lambda _m, _a, out: out.float())
        return made.insert(2, Cast())

    pair = Pair(adamw, 200, of=cast)
    for _ in range(3):
        pair.step()


@contextlib.contextmanager
def stance(name: str) -> Iterator[None]:
    torch.compiler.set_stance(name)  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


class Replaces(Optimizer):
    """Gives each parameter another dict of state in each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                old = self.state[p].get("m")
                m = p.grad.clone() if old is None else old * 0.9 + p.grad
                self.state[p] = {"m": m}
                p.sub_(m, alpha=group["lr"])


@pytest.mark.parametrize("told", ["default", "force_eager"])
def test_state_that_is_replaced(told: str) -> None:
    """In eager the first dict stayed, and later ones were lost."""
    pair = Pair(Replaces)
    with stance(told):
        for _ in range(4):
            pair.step()


@pytest.mark.slow
def test_where_steps_are_told_to_run_as_they_are() -> None:
    pair = Pair(adamw)
    pair.step()
    with stance("force_eager"):
        pair.step()
    pair.step()
