"""A call that finds all as it was leaves out what torch does around it, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

import fuseopt
from bench.optimizers import RECIPES
from fuseopt import compat
from fuseopt.replicate import worth
from tests.frames import entered
from tests.steps import differences, eager_step, make, make_params, set_grads

SHAPES = [(3, 4), (5,)] * 10
#: torch's functions around a step, and around what Dynamo has compiled
AROUND = {"compile_wrapper", "_use_grad", "__enter__", "_fn"}


@pytest.fixture(params=["led", "whole"])
def opt(request: Any, monkeypatch: pytest.MonkeyPatch) -> Optimizer:
    """A compiled optimizer that has done its first steps, led and not."""
    monkeypatch.setattr(worth, "FEW", 6 if request.param == "led" else 99)
    return compiled(make_params(SHAPES[:8]))


def compiled(params: Any, steps: int = 3) -> Optimizer:
    opt = torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)
    fuseopt.compile(opt)
    for n in range(steps):
        set_grads(params, params, n)
        opt.step()
    return opt


def called(step: Callable[[], object]) -> list[str]:
    """The functions of Python that a step calls, by name."""
    return [code.co_name for code in entered(step)]


def test_a_call_that_finds_all_as_it_was_is_short() -> None:
    params = make_params(SHAPES)
    opt = compiled(params, 5)
    names = called(opt.step)
    assert AROUND.isdisjoint(names)
    assert len(names) < 48
    # nor does it wait for Dynamo where the learning rate is another
    opt.param_groups[0]["lr"] = 0.2
    opt.step()  # traced anew, for Dynamo takes it for a constant at first
    opt.param_groups[0]["lr"] = 0.3
    opt.step()
    opt.param_groups[0]["lr"] = 0.4
    assert AROUND.isdisjoint(called(opt.step))


def test_a_call_asks_nothing_of_logs_and_dumps(opt: Optimizer) -> None:
    """While nobody listens, what tells of a step costs no call of Python."""
    files = {code.co_filename for code in entered(opt.step)}
    assert any(file.endswith("fuseopt/runtime/step.py") for file in files)
    silent = "logging/__init__.py", "compiler/logs.py", "compiler/dump.py"
    assert [file for file in files if file.endswith(silent)] == []


@pytest.mark.parametrize(
    "name", ["AdamW", "LAMB", pytest.param("Adafactor", marks=pytest.mark.slow)]
)
def test_a_call_of_more_lanes_takes_no_more_of_python(name: str) -> None:
    """Where there are reductions, memory was sought for each temp of each lane."""
    counts = []
    for n in (10, 20):
        params = make_params([(8, 4), (5,)] * n)
        opt = fuseopt.compile(RECIPES[name].make(params))
        for seed in range(5):
            set_grads(params, params, seed)
            opt.step()
        counts.append(len(called(opt.step)))
    assert counts[0] == counts[1]


def test_hooks_are_called_whenever_they_come(opt: Optimizer) -> None:
    seen: list[str] = []
    before = opt.register_step_pre_hook(lambda *a: seen.append("before"))
    opt.step()
    after = opt.register_step_post_hook(lambda *a: seen.append("after"))
    opt.step()
    before.remove()
    opt.step()
    after.remove()
    opt.step()
    assert seen == ["before", "before", "after", "after"]
    both = [
        register_optimizer_step_pre_hook(lambda *a: seen.append("all")),
        register_optimizer_step_post_hook(lambda *a: seen.append("all")),
    ]
    try:
        opt.step()
    finally:
        for hook in both:
            hook.remove()
    assert seen[4:] == ["all", "all"]


def test_a_profiler_finds_the_step_by_its_name(opt: Optimizer) -> None:
    def names(run: Callable[[], object]) -> set[str]:
        with torch.profiler.profile() as seen:
            run()
        return {event.name for event in seen.events()}

    assert "Optimizer.step#SGD.step" in names(opt.step)
    with torch.autograd.profiler.emit_nvtx(enabled=False):
        opt.step()
    opt.step()
    assert "Optimizer.step#SGD.step" in names(opt.step)


class Asks(TorchDispatchMode):
    """Notes what ATen is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_mode_sees_the_record_of_the_step(opt: Optimizer) -> None:
    with Asks() as mode:
        opt.step()
    assert any("record_function" in name for name in mode.seen)


@pytest.mark.family(4)
@pytest.mark.parametrize("grad", [True, False])
def test_the_grad_mode_is_what_it_was(opt: Optimizer, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        opt.step()
        assert torch.is_grad_enabled() is grad

        def fails(*_: Any) -> None:
            raise ZeroDivisionError

        # a defect on the way leaves it as well
        before = vars(opt)["param_groups"]
        opt.param_groups = None  # type: ignore[assignment]
        with pytest.raises(TypeError):
            opt.step()
        opt.param_groups = before
        assert torch.is_grad_enabled() is grad


def test_what_dynamo_forgets_is_not_run() -> None:
    """Its reset drops what it compiled, and so does the end of what guards name."""
    theirs, mine = make_params(SHAPES), make_params(SHAPES)
    plain = make("SGD", theirs, reference=True, momentum=0.9)
    opt = fuseopt.compile(make("SGD", mine, momentum=0.9))

    def step(seed: int) -> None:
        set_grads(theirs, mine, seed)
        eager_step(plain)
        opt.step()
        assert differences(theirs, plain, mine, opt) == []

    for seed in range(3):
        step(seed)
    traced = compat_of(opt)
    assert traced.known
    guards = [g for g, _, _ in traced.known]
    torch._dynamo.reset()
    assert [g.cache_entry for g in guards] == [None] * len(guards)
    compilations = len(fuseopt.reports())
    step(3)
    assert len(fuseopt.reports()) > compilations
    step(4)
    # guards name a tensor of the state, which is replaced
    for o, params in ((plain, theirs), (opt, mine)):
        own = o.state[params[0]]
        own["momentum_buffer"] = own["momentum_buffer"].clone()
    for seed in range(5, 8):
        step(seed)
    assert AROUND.isdisjoint(called(opt.step))


def compat_of(opt: Optimizer) -> compat.DirectDynamoCall:
    isolated: Any = getattr(opt.step, fuseopt.compiler.session.COMPILED)
    made = isolated.leader.trace.compiled
    assert isinstance(made, compat.DirectDynamoCall)
    return made


def test_a_step_within_what_is_compiled_is_one_of_its_own(opt: Optimizer) -> None:
    (params,) = (group["params"] for group in opt.param_groups)

    def train(x: torch.Tensor) -> torch.Tensor:
        y = x * 2 + 1
        opt.step()
        return y.sin()

    again = torch.compile(train, backend="eager")
    before = [p.detach().clone() for p in params]
    x = torch.randn(4)
    for _ in range(3):
        assert torch.equal(again(x), (x * 2 + 1).sin())
    assert not any(map(torch.equal, before, params))
