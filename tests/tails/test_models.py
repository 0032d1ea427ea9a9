"""Averages of models: torch.optim.swa_utils, with their counters and buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
)

import fuseopt


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))


def halfway(average: Any, now: Any, number: Any) -> Any:
    """An average of one parameter."""
    return average + (now - average) * 0.5


CASES: dict[str, dict[str, Any]] = {
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "swa": {},
    "single": {"avg_fn": halfway},
    "buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.family(4)
@pytest.mark.parametrize("case", CASES)
def test_averaged_models(case: str) -> None:
    """Also every second step, and after its state was loaded."""
    sides = []
    for _ in range(2):
        net = model()
        average = AveragedModel(net, **CASES[case])
        sides.append((net, average, torch.optim.SGD(net.parameters(), lr=0.1)))
    (net, average, opt), (twin, other, own) = sides
    tail = fuseopt.tail(own, ema=[(other, twin)], clip_grad_norm=1.0)
    start = copy.deepcopy(average.state_dict())
    for n in range(9):
        for x in (net, twin):
            torch.manual_seed(n)
            x.zero_grad()
            x(torch.randn(8, 4)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        if n % 2 == 0:
            average.update_parameters(net)
        tail(average=n % 2 == 0)
        if n == 5:
            for x in (average, other):
                x.load_state_dict(start)
        one, two = average.state_dict(), other.state_dict()
        assert [k for k in one if not torch.equal(one[k], two[k])] == []
        assert all(map(torch.equal, net.parameters(), twin.parameters()))
    if case != "buffers":  # which holds a counter of whole numbers
        assert [r.fallback for r in fuseopt.reports()] == [""] * len(fuseopt.reports())


def deep() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [
        x
        for _ in range(6)
        for x in (torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*layers)


@pytest.mark.family(10)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("case", [*CASES, "ema of one"])
def test_of_many_parameters_a_few_are_traced(case: str, frozen: bool) -> None:
    """Where torch's own functions average; buffers and what is not stepped as well.

    The groups have the parameters in another order than the model.
    """
    given = CASES.get(case, {"avg_fn": get_ema_avg_fn(0.9)})
    sides = []
    for _ in range(2):
        net = deep()
        params = [*net.parameters()][2 * frozen :]
        groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.05}]
        opt = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        sides.append((net, AveragedModel(net, **given), opt))
    (net, average, opt), (twin, other, own) = sides
    tail = fuseopt.tail(own, ema=[(other, twin)], clip_grad_norm=float("inf"))
    start = copy.deepcopy(average.state_dict())
    for n in range(9):
        for x in (net, twin):
            torch.manual_seed(n)
            x.zero_grad()
            x(torch.randn(8, 6)).square().sum().backward()
        opt.step()
        if n % 3 != 2:
            average.update_parameters(net)
        tail(average=n % 3 != 2)
        if n == 5:
            for x in (average, other):
                x.load_state_dict(start)
        if n == 6:  # an average gets other memory
            for x in (average, other):
                p = next(x.parameters())
                p.data = p.data.clone()
        one, two = average.state_dict(), other.state_dict()
        assert [k for k in one if not torch.equal(one[k], two[k])] == []
        assert all(map(torch.equal, net.parameters(), twin.parameters()))
    report = fuseopt.reports()[-1]
    assert ("they stand for the others" in report.traced) == (case != "single")
    assert report.launches == 2


def test_a_decay_that_is_a_tensor_moves_a_little() -> None:
    """Numbers that print alike were taken for the same: the first one stayed."""
    sides = []
    for _ in range(2):
        net, decay = deep(), torch.tensor(0.9)
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[arg-type]
        sides.append((net, average, decay, torch.optim.SGD(net.parameters(), lr=0.1)))
    (net, average, decay, opt), (twin, other, moves, own) = sides
    tail = fuseopt.tail(own, ema=[(other, twin)])
    for n in range(6):
        for x in (decay, moves):
            x.fill_(0.9 if n < 3 else 0.9 + n * 1e-6)
        for x in (net, twin):
            torch.manual_seed(n)
            x.zero_grad()
            x(torch.randn(8, 6)).square().sum().backward()
        opt.step()
        average.update_parameters(net)
        tail()
        assert all(map(torch.equal, average.parameters(), other.parameters()))


def test_models_that_do_not_fit() -> None:
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    average = AveragedModel(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="an averaged model has 2 tensors"):
        fuseopt.tail(opt, ema=[(average, net)])
    with pytest.raises(TypeError, match="takes the model that it averages"):
        fuseopt.tail(opt, ema=[(average, 0.9)])
