"""What users do between steps, on both optimizers of a race."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench.gpu.place import Place
from bench.gpu.race import (
    DTYPES,
    Different,
    Race,
    change,
    eager_step,
    parameters,
    set_grads,
)
from bench.results import Figures

STEPS = 5


def _adamw(**options: Any) -> Callable[[Any], Optimizer]:
    return lambda params: torch.optim.AdamW(params, foreach=True, **options)


def _against(place: Place, **options: Any) -> Race:
    """AdamW beside its reference."""
    return Race(place, _adamw(), **options)


def live_hyperparameters(place: Place) -> Figures:
    """lr, betas, eps and weight decay change between calls; a number, then a tensor."""
    race = _against(place)
    for number in range(2 + STEPS):
        if number >= 2:
            change(
                race,
                lr=1e-3 / number,
                betas=(0.9 - 0.01 * number, 0.99),
                eps=10.0**-number,
                weight_decay=0.01 * number,
            )
        race.step()
    return race.figures()


def live_momentum(place: Place) -> Figures:
    """The momentum and the rate of SGD change between calls."""

    def make(params: Any) -> Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)

    race = Race(place, make)
    for number in range(STEPS + 1):
        if number >= 2:
            change(race, momentum=0.9 - 0.1 * number, lr=0.1 / number)
        race.step()
    return race.figures()


def live_tensor_rate(place: Place) -> Figures:
    """A rate that is a tensor on the device is read at each call."""

    def make(params: Any) -> Optimizer:
        rate = torch.tensor(0.01, device=place.device)
        return torch.optim.AdamW(params, lr=rate, capturable=True, foreach=True)

    race = Race(place, make)
    for number in range(STEPS):
        for opt in (race.opt, race.ref):
            opt.param_groups[0]["lr"].fill_(0.01 / (1 + number))
        race.step()
    return race.figures()


def grads_stay_or_move(place: Place) -> Figures:
    """Gradients written in place, then at other addresses, then in place again."""
    race = _against(place)
    for number in range(STEPS + 2):
        race.step(moved=number in (0, 3, 4))
    return race.figures()


def parameters_move(place: Place) -> Figures:
    """`p.data` at another address and in another layout of memory."""
    race = _against(place)
    for number in range(STEPS):
        if number >= 2:
            for params in (race.params, race.others):
                for p in params:
                    p.data = p.data.clone()
        race.step()
    return race.figures()


def some_without_grads(place: Place) -> Figures:
    """Parameters without a gradient are left alone."""
    race = _against(place)
    for number in range(STEPS):
        set_grads(place, (race.params, race.others), number)
        for params in (race.params, race.others):
            params[4].grad = None
        race.step(grads=False)
    return race.figures()


def counters_on_the_host(place: Place) -> Figures:
    """State of an eager run is taken over; its step counters stay on the CPU."""
    params, others = parameters(place), parameters(place)
    opt, ref = _adamw()(params), _adamw()(others)
    for number in range(2):
        set_grads(place, (params, others), number)
        opt.step()
        ref.step()
    race = object.__new__(Race)
    import fuseopt

    race.__dict__.update(
        place=place, known=not place.exact, worst=0.0, where="", count=10, ref=ref,
        awkward=False,
        params=params, others=others, before=len(fuseopt.reports()),
        opt=fuseopt.compile(opt, **place.options(fallback="error")),
    )  # fmt: skip
    for _ in range(STEPS):
        race.step()
    return race.figures()


def several_groups(place: Place) -> Figures:
    """Groups with hyperparameters of their own, each changed."""

    def groups(params: list[Tensor]) -> list[dict[str, Any]]:
        return [
            {"params": params[:7], "lr": 0.01},
            {"params": params[7:12], "weight_decay": 0.0, "betas": (0.5, 0.9)},
            {"params": params[12:], "amsgrad": True, "maximize": True},
        ]

    race = Race(place, lambda params: _adamw()(groups(params)))
    for number in range(STEPS):
        change(race, lr=lambda x: x * 0.9)
        race.step(moved=number % 2 == 0)
    return race.figures()


def awkward_layouts(place: Place) -> Figures:
    """Tensors with gaps among the others: eager takes one parameter after the other."""
    race = _against(place, awkward=True)
    for number in range(STEPS):
        race.step(moved=number % 2 == 0)
    return race.figures()


def awkward_momentum(place: Place) -> Figures:
    """The same of SGD with momentum."""

    def make(params: Any) -> Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)

    race = Race(place, make, awkward=True)
    for _ in range(STEPS):
        race.step()
    return race.figures()


def another_stream(place: Place) -> Figures:
    """Calls on streams other than the first one's."""
    race = _against(place)
    for number in range(STEPS + 1):
        if number % 2:
            with place.stream():
                race.step()
        else:
            race.step()
    return race.figures()


def state_carried_over(place: Place) -> Figures:
    """`state_dict` and `load_state_dict`, through copies."""
    race = _against(place)
    for number in range(STEPS):
        if number == 3:
            for opt in (race.opt, race.ref):
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        race.step()
    return race.figures()


def clip_and_step(place: Place) -> Figures:
    """Clipping by the total norm and the step in one graph; max_norm changes.

    The norm is a sum in an order of its own, so the bits may differ.
    """
    import fuseopt
    from fuseopt.backend import fuseopt as backend

    race = object.__new__(Race)
    params, others = parameters(place, DTYPES[:1]), parameters(place, DTYPES[:1])
    race.__dict__.update(
        place=place, known=True, worst=0.0, where="", count=0, params=params,
        awkward=False,
        others=others, opt=_adamw()(params), ref=_adamw()(others),
        before=len(fuseopt.reports()),
    )  # fmt: skip

    def both(opt: Optimizer, of: list[Tensor], limit: float) -> None:
        torch.nn.utils.clip_grad_norm_(of, limit, foreach=True)
        opt.step()

    fast = torch.compile(both, backend=backend, options=place.options())
    for limit in (1.0, 0.5, 10.0, 1e9, 0.1):
        race.count += 1
        set_grads(place, (params, others), race.count)
        torch.nn.utils.clip_grad_norm_(others, limit, foreach=True)
        eager_step(race.ref)
        fast(race.opt, params, limit)
        race.check()
    return race.figures()


def verified(place: Place) -> Figures:
    """`options={"verify": True}` runs eager beside each step: no difference."""
    race = _against(place, verify=True)
    for _ in range(3):
        race.step()
    return race.figures()


def many_elements(place: Place) -> Figures:
    """One tensor of more than 2**31 elements, bfloat16, with SGD and momentum."""
    import fuseopt

    count = 1000 if place.tiny else 2**31 + 4099
    torch.manual_seed(0)
    mine = torch.nn.Parameter(
        torch.empty(count, dtype=torch.bfloat16, device=place.device).normal_()
    )
    other = torch.nn.Parameter(mine.detach().clone())
    mine.grad = other.grad = torch.empty_like(mine).normal_()

    def make(p: Tensor) -> Optimizer:
        return torch.optim.SGD([p], lr=0.1, momentum=0.9, foreach=True)

    opt = fuseopt.compile(make(mine), **place.options(fallback="error"))
    ref = make(other)
    for number in range(2):
        opt.step()
        ref.step()
        part = 2**26
        for start in range(0, count, part):
            a, b = (x.detach()[start : start + part] for x in (mine, other))
            if not torch.equal(a.view(torch.int16), b.view(torch.int16)):
                wrong = (a.view(torch.int16) != b.view(torch.int16)).nonzero()
                i = int(wrong[0])
                raise Different(
                    f"step {number + 1}: bfloat16 element {start + i} is "
                    f"{a[i].item()!r}, eager has {b[i].item()!r}"
                )
    return {"elements": count}


SCENARIOS: dict[str, Callable[[Place], Figures]] = {
    "live hyperparameters": live_hyperparameters,
    "live momentum": live_momentum,
    "live tensor rate": live_tensor_rate,
    "grads stay or move": grads_stay_or_move,
    "parameters move": parameters_move,
    "some without grads": some_without_grads,
    "counters on the host": counters_on_the_host,
    "several groups": several_groups,
    "awkward layouts": awkward_layouts,
    "awkward momentum": awkward_momentum,
    "another stream": another_stream,
    "state carried over": state_carried_over,
    "clip and step": clip_and_step,
    "verified": verified,
    "more than 2**31 elements": many_elements,
}
