"""Tails on the simulated accelerator, with counters there and on the CPU."""

from __future__ import annotations

import pytest
import torch

import fuseopt
from tests import ROOT
from tests.frames import lines
from tests.simulated.twins import ExactRoots
from tests.steps import capturable_on_cpu, same_bits


class Side:
    """Parameters with averages, an AdamW and a scaler, on one device."""

    def __init__(self, device: str, shapes, **options) -> None:
        random = torch.Generator().manual_seed(1)
        drawn = [torch.randn(s, generator=random) for s in shapes]
        self.params = [torch.nn.Parameter(t.to(device)) for t in drawn]
        self.averages = [p.detach().clone() for p in self.params]
        self.opt = torch.optim.AdamW(self.params, foreach=True, **options)
        self.scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=2)
        self.scaler.scale(torch.ones((), device=device))

    def give(self, number: int, infinite: bool) -> None:
        """Gradients of which one number each is not zero, and whole: norms are exact,
        in whatever order they are added.
        """
        random = torch.Generator().manual_seed(number)
        for p in self.params:
            grad = torch.zeros(p.shape)
            grad.view(-1)[0] = torch.randint(1, 9, (), generator=random) * 4.0
            p.grad = (grad * self.scaler.get_scale()).to(p.device)
        if infinite:
            self.params[1].grad.view(-1)[0] = float("inf")

    def apart(self) -> None:
        self.scaler.unscale_(self.opt)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        self.scaler.step(self.opt)
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.params, 0.125)
        self.opt.zero_grad()

    def held(self) -> list[tuple[str, torch.Tensor]]:
        found = [(f"parameter {i}", p.detach()) for i, p in enumerate(self.params)]
        found += [(f"average {i}", a) for i, a in enumerate(self.averages)]
        for i, p in enumerate(self.params):
            found += [(f"{key} of {i}", t) for key, t in self.opt.state[p].items()]
        return found


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_step_that_is_skipped(sim, capturable: bool, lanes: int) -> None:
    """Counters on the CPU are not counted either; the host waits for the flag once, as
    eager does for its own. On the device nothing is waited for.
    """
    shapes = (((9,), (), (3, 2)) * 7)[:lanes]
    mine = Side("sim", shapes, capturable=capturable)
    theirs = Side("cpu", shapes, capturable=capturable)
    tail = fuseopt.tail(
        mine.opt,
        scaler=mine.scaler,
        clip_grad_norm=1.0,
        ema=[(mine.averages, 0.875)],
        zero_grad=True,
        fallback="error",
    )
    for number in range(5):
        for side in (mine, theirs):
            side.give(number, number in (2, 3))
        tail()
        with ExactRoots(), capturable_on_cpu():
            theirs.apart()
        for side in (mine, theirs):
            side.scaler.update()
        for (name, got), (_, want) in zip(mine.held(), theirs.held(), strict=True):
            assert same_bits(got.cpu(), want), f"{name} after {number + 1} calls"
    assert mine.scaler.get_scale() == theirs.scaler.get_scale()
    report = fuseopt.reports()[-1]
    assert report.launches == (2 if capturable else 3), report
    called = [name for name, _ in report.externs]
    assert called == ([] if capturable else ["aten._to_copy.default"])


def test_a_number_of_a_device_is_copied_to_the_cpu(sim) -> None:
    """A call of its own, which waits: no kernel reads both memories."""

    def step(p, g, n):
        with torch.no_grad():
            here = (g.sum() != 0).to("cpu")
            n.copy_(torch.where(here, n + 1, n))
            p.sub_(g * n)

    compiled = torch.compile(
        step, backend="fuseopt", options={"fallback": "error", "cudagraphs": False}
    )
    for device in ("cpu", "sim"):
        run = compiled if device == "sim" else step
        p, n = torch.ones(8, device=device), torch.tensor(1.0)
        for k in range(3):
            run(p, torch.full((8,), float(k), device=device), n)
        assert p.cpu().tolist() == [1 - 2 - 6] * 8
        assert n == 3


@pytest.mark.parametrize("scaled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_line_runs_for_each_tensor(sim, scaled: bool) -> None:
    """Neither to compare gradients, which the step's guard has done, nor to make the
    norms' memory, nor to find the flag among all tensors.
    """
    counted = []
    for n in (9, 17):
        side = Side("sim", [(8,)] * n)
        ema = [(side.averages, 0.875)]
        scaler = side.scaler if scaled else None
        options = {"clip_grad_norm": 1.0, "ema": ema, "zero_grad": True}
        tail = fuseopt.tail(side.opt, scaler=scaler, fallback="error", **options)
        for number in range(12):
            side.give(number, False)
            tail()
            if scaled:
                side.scaler.update()
        side.give(12, False)
        counted.append(lines(tail, inside=f"{ROOT}/fuseopt/"))
        torch._dynamo.reset()
    for found in counted:  # Triton's interpreter stands for the device
        for place in [x for x in found if x[0].endswith("triton/interpreter.py")]:
            del found[place]
    few, many = counted
    assert {place for place in many if many[place] >= few[place] + 6} == set()
    # whether an earlier copy has ended, which a call looks at, takes some lines
    assert abs(many.total() - few.total()) < 24
    assert many.total() < (610 if scaled else 410)
