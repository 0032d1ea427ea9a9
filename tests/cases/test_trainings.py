"""Trainings in which something else than a lane is the matter: how often a step is
compiled, whose number a rate is, whether parameters can be swapped afterwards.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

import fuseopt
from fuseopt.compiler.session import session
from tests.beside import apart, backend, plain
from tests.frozen import bits

SIZES = (4, 6, 18, 34)
WAYS = {"compile": apart, "backend": backend}


def trained(
    way: Callable[[Optimizer], Callable[[], Any]],
    opt: Optimizer,
    steps: int,
    then: Callable[[], object] = lambda: None,
) -> tuple[list[Any], int, list[str]]:
    """All bits after each step, how often it was compiled, and what was said."""
    ps = [p for group in opt.param_groups for p in group["params"]]
    drawn = torch.Generator().manual_seed(1)
    step, known, seen = way(opt), len(session.reports), []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            for p in ps:
                p.grad = torch.randn(p.shape, dtype=p.dtype, generator=drawn)
            step()
            then()
            states = [x for p in ps for x in opt.state.get(p, {}).values()]
            tensors = [*ps, *(x for x in states if isinstance(x, torch.Tensor))]
            numbers = [repr(x) for x in states if not isinstance(x, torch.Tensor)]
            seen.append((numbers, [bits(x) for x in tensors]))
    told = [str(w.message) for w in said if "fuseopt" in str(w.message)]
    return seen, len(session.reports) - known, told


def parameters(n: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    drawn = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(3, 4, dtype=dtype, generator=drawn))
        for _ in range(n)
    ]


class OverComplex(Optimizer):
    """Adam over complex weights, its counter an int."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["t"] = 0
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["t"] += 1
                t, g = state["t"], p.grad
                state["m"].mul_(0.9).add_(g, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(g, g.conj(), value=0.01)
                size = group["lr"] * math.sqrt(1 - 0.99**t) / (1 - 0.9**t)
                p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-6), value=-size)


@pytest.mark.family(8)
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_a_counter_compiles_nothing_anew(
    dtype: torch.dtype, way: str, lanes: int
) -> None:
    want, _, _ = trained(plain, OverComplex(parameters(lanes, dtype)), 30)
    got, compiled, told = trained(WAYS[way], OverComplex(parameters(lanes, dtype)), 30)
    assert got == want
    assert 1 <= compiled <= 4
    assert told == []


@pytest.mark.family(8)
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_schedule_written_with_numpy(kind: Any, way: str, lanes: int) -> None:
    """It leaves numpy.float64 in the groups, and the step in its kernel."""
    runs = []
    for how in (plain, WAYS[way]):
        opt = kind(parameters(lanes), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            opt, lambda t: 0.5 * (1 + np.cos(np.pi * t / 30))
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the schedule
            runs.append(trained(how, opt, 12, schedule.step))
        assert type(opt.param_groups[0]["lr"]) is np.float64
    assert runs[1][0] == runs[0][0]
    assert [r.fallback for r in session.reports] == [""]
    assert runs[1][2] == []


@pytest.fixture
def swaps() -> Iterator[None]:
    """Modules swap their parameters where they change their dtype."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def swapped(lanes: int, what: str) -> tuple[list[Any], bool]:
    """A training that goes on in float64; its bits, and could it be swapped?"""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4) for _ in range(lanes // 2)]
    model = torch.nn.Sequential(*layers)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    clip: Any = torch.nn.utils.clip_grad_norm_
    step: Any = opt.step
    if what == "clip":
        clip = fuseopt.clip_grad_norm_
    elif what == "tail":
        clip, step = (lambda *_: None), fuseopt.tail(opt, clip_grad_norm=1.0)
    elif what != "eager":
        step = WAYS[what](opt)
    swaps = True
    for turn in range(6):
        dtype = layers[0].weight.dtype
        x = torch.randn(2, 4, dtype=torch.float64).to(dtype)
        model(x).square().sum().backward()
        clip(model.parameters(), 1.0)
        step()
        opt.zero_grad()
        if turn == 2:
            torch._dynamo.reset()
            swaps = not any(map(weakref.getweakrefs, model.parameters()))
            if not swaps:
                break
            model.to(torch.float64)
    return [bits(p) for p in model.parameters()], swaps


@pytest.mark.family(16)
@pytest.mark.usefixtures("swaps")
@pytest.mark.filterwarnings("ignore:fuseopt")
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("what", ["clip", "tail", *WAYS])
def test_parameters_are_swapped_afterwards(what: str, lanes: int) -> None:
    """Of few, all are traced; a reset of Dynamo drops what its guards keep."""
    got, swaps = swapped(lanes, what)
    assert swaps
    assert got == swapped(lanes, "eager")[0]


@pytest.mark.family(8)
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("resets", [True, False])
def test_all_parameters_become_doubles(resets: bool, way: str, lanes: int) -> None:
    """In place, and what Dynamo has traced is forgotten or not."""
    runs = []
    for how in (plain, WAYS[way]):
        opt, turn = torch.optim.SGD(ps := parameters(lanes), lr=0.1), 0

        def doubled(ps: list[Any] = ps) -> None:
            nonlocal turn
            turn += 1
            if turn == 2:
                if resets:
                    torch._dynamo.reset()
                for p in ps:
                    p.grad, p.data = None, p.data.double()

        runs.append(trained(how, opt, 5, doubled)[0])
    assert runs[1] == runs[0]
