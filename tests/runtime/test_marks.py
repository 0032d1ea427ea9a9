"""A profiler shows each kernel and replay under a name that says what it moves."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.profiler import profile

import fuseopt
from fuseopt.runtime import marks
from tests.steps import make_params, set_grads


def shown(opt: Any) -> list[str]:
    with profile() as told:
        opt.step()
    return [e.name for e in told.events() if e.name.startswith("fuseopt::")]


@pytest.mark.parametrize("lanes", [3, 20], ids=["whole", "led"])
def test_a_kernel_has_a_name(lanes: int) -> None:
    params = make_params([(50, 40)] * lanes)
    opt = fuseopt.compile(torch.optim.SGD(params, lr=0.1))
    for seed in range(3):
        set_grads(params, params, seed)
        opt.step()
    (report,) = fuseopt.reports()
    n = 2000 * lanes
    moved = f"{12 * n / 1e3:.4g} kB"
    assert report.bytes == 12 * n
    name = f"fuseopt::kernel0 [{lanes} lanes, {n / 1e3:.4g}k elements, {moved}]"
    assert shown(opt) == [name]
    assert shown(opt) == [name]


def test_each_kernel_of_a_step_has_one() -> None:
    class Clips(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            params = self.param_groups[0]["params"]
            grads = [p.grad for p in params]
            norm = torch.stack(torch._foreach_norm(grads)).norm()
            for p in params:
                p.sub_(p.grad / norm, alpha=0.1)

    params = make_params([(50, 40)] * 3)
    opt = fuseopt.compile(Clips(params))
    for seed in range(2):
        set_grads(params, params, seed)
        opt.step()
    (report,) = fuseopt.reports()
    names = [name.split(" ")[0] for name in shown(opt)]
    steps = "+".join(names).replace("fuseopt::", "")
    assert steps == "+".join(k.name for k in report.kernels)


def test_a_replay_has_a_name(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [p.detach().to("sim").requires_grad_() for p in make_params([(4, 5)] * 3)]
    opt = fuseopt.compile(torch.optim.SGD(params, lr=0.1), cudagraphs=True)
    for _ in range(4):
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
    assert fuseopt.reports()[-1].cudagraph == "captured"
    (name,) = [n for n in shown(opt) if "replay" in n]
    assert name == "fuseopt::replay of 1 kernels [3 lanes, 60 elements, 720 B]"


def test_nothing_is_named_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params([(3, 4)] * 3)
    opt = fuseopt.compile(torch.optim.SGD(params, lr=0.1))
    set_grads(params, params, 0)
    opt.step()

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(marks, "profiler_range", refuse)
    opt.step()
