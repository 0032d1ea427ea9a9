"""Tails with each of their options, and with options that change between calls."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from fuseopt.compiler.session import session
from tests.cases.trainer import SIZES, TURNS, Change, Loop, beside


def nothing(loop: Loop, turn: int) -> None:
    """Gradients alone change."""


def not_finite(loop: Loop, turn: int) -> None:
    if turn in (0, 2, 4):
        loop.params[3].grad.view(-1)[0] = math.nan if turn == 4 else math.inf


def missing(loop: Loop, turn: int) -> None:
    for p in loop.params[turn::5]:
        p.grad = None


# ---------------------------------------------------------------- options that change

#: The values that an option takes. Every value follows every other one.
VALUES: dict[str, list[Any]] = {
    "zero_grad": [False, True, "zeros"],
    "clip_grad_norm": [None, 1.0, 1e9],
    "clip_grad_value": [None, 0.01, 5],
    "norm_type": [2.0, 1.0, math.inf],
    "skip_nonfinite": [False, True],
    "error_if_nonfinite": [False, True],
    "grad_divisor": [None, 3, 4.0],
    "stats": [False, True],
}


def walk(values: list[Any]) -> list[Any]:
    """A walk over them in which each follows each of the others, and itself."""
    pairs = [[a, b] for a in range(len(values)) for b in range(len(values))]
    path = [0]
    while pairs:
        following = [pair for pair in pairs if pair[0] == path[-1]]
        # the way back to the first one comes last, as it may be a dead end
        pair = max(following, key=lambda pair: pair[1])
        pairs.remove(pair)
        path.append(pair[1])
    return [values[k] for k in path]


def test_a_walk_has_every_pair() -> None:
    path = walk([0, 1, 2])
    assert {*itertools.pairwise(path)} == {*itertools.product(range(3), repeat=2)}


@pytest.mark.family(14)
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("option", VALUES)
@pytest.mark.parametrize("several", [False, True], ids=["one", "two optimizers"])
def test_an_option_that_changes(several: bool, option: str, lanes: int) -> None:
    path = walk(VALUES[option])

    def change(loop: Loop, turn: int) -> None:
        loop.set(**{option: path[turn]})
        if "nonfinite" in option and turn % 3 == 1:
            loop.params[3].grad.view(-1)[0] = math.inf

    assert not beside(change, lanes, turns=len(path), optimizers=1 + several) or (
        option == "error_if_nonfinite"
    )


@pytest.mark.family(4)
@pytest.mark.parametrize("lanes", SIZES)
def test_gradients_that_are_read_now_and_then_are_planned_twice(lanes: int) -> None:
    """With them and without, however often that changes."""

    def change(loop: Loop, turn: int) -> None:
        loop.set(zero_grad=turn % 2 == 0)

    assert not beside(change, lanes, turns=12)
    assert len(session.reports) == 2
    assert not any(report.fallback for report in session.reports)


def several_that_change(loop: Loop, turn: int) -> None:
    loop.set(
        zero_grad=[True, False, "zeros", False, True, True, False][turn],
        clip_grad_norm=[1.0, 0.5, None, 1e-3, None, 2, 1.0][turn],
        clip_grad_value=[None, 0.01, 0.02, None, 1.0, 0.003, 5][turn],
    )


def a_decay_of_a_schedule(loop: Loop, turn: int) -> None:
    loop.set_decay(min(0.999, (1 + turn) / (10 + turn)))


def decays_at_the_ends(loop: Loop, turn: int) -> None:
    loop.set_decay([0.0, 1.0, 0.5, 0.49, 0.9999999, 0.9, 0.0][turn])


def a_decay_that_is_a_tensor(loop: Loop, turn: int) -> None:
    loop.set_decay(torch.tensor([0.9, 0.5, 0.4][turn % 3], dtype=torch.float64))


def averages_at_every_second_turn(loop: Loop, turn: int) -> dict[str, Any]:
    return {"average": turn % 2 == 0}


def another_number_of_batches(loop: Loop, turn: int) -> dict[str, Any]:
    return {"accumulated": [4, 3, 4, 1, 2, 7, 4][turn]}


def copies_that_somebody_writes(loop: Loop, turn: int) -> None:
    if turn == 3:
        loop.copies[2].zero_()
        loop.ema[2].mul_(2)


def accumulated_twice(loop: Loop, turn: int) -> None:
    if turn in (1, 3):
        first = [p.grad for p in loop.params]
        loop.set_grads(50 + turn)
        for p, grad in zip(loop.params, first, strict=True):
            p.grad.add_(grad)


# ---------------------------------------------------------------- scalers


def unscaled_before(loop: Loop, turn: int) -> None:
    """By the user, at every second turn."""
    if turn in (2, 3):
        loop.params[3].grad.view(-1)[0] = math.inf
    vars(loop.scaler).pop("unscale_", None)
    if turn % 2:
        loop.scaler.unscale_(loop.opt)
        if not loop.fused:
            loop.scaler.unscale_ = lambda _: None


def switched_off(loop: Loop, turn: int) -> None:
    loop.scaler._enabled = turn not in (3, 4)


def another_scale(loop: Loop, turn: int) -> None:
    if turn == 3:
        loop.scaler.update(new_scale=64.0)
    if turn == 4:
        loop.scaler.load_state_dict(
            {**loop.scaler.state_dict(), "scale": 32.0, "_growth_tracker": 1}
        )


def overflow(loop: Loop, turn: int) -> None:
    if turn == 2:
        loop.params[0].grad.fill_(60000.0)


# ---------------------------------------------------------------- orders of the norm


def an_order_that_changes(loop: Loop, turn: int) -> None:
    if turn == 3:
        loop.order.reverse()


def backwards(params: Any) -> Any:
    return [*params][::-1]


def decayed_first(params: Any) -> Any:
    groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def amsgrad(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.01, foreach=True, amsgrad=True)


def momentum(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


CASES: dict[str, tuple[Change, dict[str, Any]]] = {
    "plain": (nothing, {}),
    "gradients to None": (nothing, {"zero_grad": True}),
    "gradients to zeros": (nothing, {"zero_grad": "zeros"}),
    "several options that change": (several_that_change, {}),
    "the absolute norm": (nothing, {"norm_type": 1.0}),
    "the largest element": (nothing, {"norm_type": math.inf}),
    "infinities": (not_finite, {}),
    "infinities are skipped": (not_finite, {"skip_nonfinite": True}),
    "infinities raise": (not_finite, {"error_if_nonfinite": True}),
    "no option": (nothing, {"clip_grad_norm": None}),
    "values alone": (nothing, {"clip_grad_norm": None, "clip_grad_value": 0.5}),
    "a schedule of decays": (a_decay_of_a_schedule, {}),
    "decays of 0 and 1": (decays_at_the_ends, {}),
    "a decay in a tensor": (a_decay_that_is_a_tensor, {}),
    "averages now and then": (averages_at_every_second_turn, {}),
    "batches": (another_number_of_batches, {"grad_divisor": 4}),
    "batches and a scaler": (nothing, {"grad_divisor": 3, "scaled": True}),
    "accumulated by hand": (accumulated_twice, {"zero_grad": True}),
    "copies": (nothing, {"copied": True}),
    "copies that are written": (copies_that_somebody_writes, {"copied": True}),
    "a scaler": (not_finite, {"scaled": True}),
    "a scaler of two": (not_finite, {"scaled": True, "optimizers": 2}),
    "a scaler of doubles": (not_finite, {"scaled": True, "dtype": torch.float64}),
    "unscaled before": (unscaled_before, {"scaled": True}),
    "a scaler switched off": (switched_off, {"scaled": True}),
    "another scale": (another_scale, {"scaled": True}),
    "a scaler, gradients missing": (missing, {"scaled": True}),
    "backwards": (nothing, {"order": backwards}),
    "an order that changes": (an_order_that_changes, {"order": list}),
    "two groups": (nothing, {"make": decayed_first}),
    "two groups, ordered": (nothing, {"make": decayed_first, "order": list}),
    "three optimizers": (missing, {"optimizers": 3}),
    "amsgrad": (nothing, {"make": amsgrad}),
    "momentum": (missing, {"make": momentum}),
    "bfloat16": (nothing, {"dtype": torch.bfloat16}),
    "float16": (overflow, {"dtype": torch.float16}),
}
#: Where each turn of both may raise; else none of them does.
RAISING = {"infinities raise"}


@pytest.mark.family(40)
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_a_tail_with(name: str, lanes: int) -> None:
    change, setup = CASES[name]
    assert bool(beside(change, lanes, **setup)) == (name in RAISING)


@pytest.mark.parametrize("lanes", SIZES[1:3])
def test_a_tail_that_forgets_a_clip_is_found(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(loop: Loop, turn: int) -> None:
        loop.set(clip_grad_norm=1.0 if loop.fused or turn != TURNS - 1 else None)

    with pytest.raises(AssertionError, match=f"{TURNS - 1}"):
        beside(change, lanes)
