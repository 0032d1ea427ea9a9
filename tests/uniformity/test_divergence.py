"""Lanes are led only where the code shows that it treats them alike.

Every trap has eager's bits, before and after what it depends on was changed; every
harmless optimizer is led. The optimizers are in `tests/uniformity/divergence`.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import fuseopt
from fuseopt.compiler.session import COMPILED
from fuseopt.replicate import worth
from tests.steps import differences, eager_step, make_params, set_grads
from tests.uniformity.divergence import harmless, identity, numbers

SHAPES = [(3, 4), (5,)] * 3
TRAPS = [*numbers.TRAPS, *identity.TRAPS]
#: Dynamo follows these to other bits, whatever the backend and however few the lanes.
DYNAMOS = {identity.Version, identity.Hooked, identity.Property, identity.ClassMethod}
#: Whole classes are refused, which have no line.
ODD = {identity.Getattr}
#: Nothing stands against these until they are sprung: the code is harmless.
LATER = {
    identity.OwnGradient,
    identity.SharedState,
    identity.IsKept,
    identity.Method,
    identity.ClassMethod,
    numbers.StateNumber,  # in the first step the state keeps what may be a counter
}


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "FEW", 4)


def kept(kind: Any) -> dict[str, Any]:
    """What a trap may change of its class, its module and its functions."""
    module = vars(numbers)
    return {
        "class": {
            k: copy.copy(v) if isinstance(v, (list, dict)) else v
            for k, v in vars(kind).items()
            if k[:2] != "__"
        },
        "table": list(module["TABLE"]),
        "config": dict(module["CONFIG"]),
        "helper": list(numbers.helper.table),  # type: ignore[attr-defined]
    }


def restore(kind: Any, known: dict[str, Any]) -> None:
    for name, value in known["class"].items():
        setattr(kind, name, value)
    numbers.TABLE[:] = known["table"]
    numbers.CONFIG.update(known["config"])
    numbers.helper.table = known["helper"]  # type: ignore[attr-defined]


def run(kind: Any, compiled: bool) -> tuple[list[Any], Optimizer, list[Any]]:
    """Four steps, in whose midst the trap is sprung; what each left of parameters."""
    params = make_params(SHAPES)
    others = make_params(SHAPES)
    known = kept(kind)
    try:
        opt = kind(params)
        if compiled:
            fuseopt.compile(opt)
        seen = []
        for n in range(4):
            if n == 2:
                opt.spring(params)
            set_grads(others, params, n)
            if getattr(opt, "aliased", False):
                params[0].grad = params[0].data
            if compiled:
                opt.step()
            else:
                eager_step(opt)
            seen.append([p.detach().clone() for p in params])
        return seen, opt, params
    finally:
        restore(kind, known)


@pytest.mark.family(12)
@pytest.mark.filterwarnings("ignore")  # where Dynamo ends its graph
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=() if n % 9 == 0 or k in LATER else (pytest.mark.slow,))
        for n, k in enumerate(TRAPS)
    ],
    ids=lambda k: k.__name__,
)
def test_a_trap_has_the_bits_of_eager(kind: Any) -> None:
    want, plain, theirs = run(kind, compiled=False)
    got, opt, mine = run(kind, compiled=True)
    if kind not in DYNAMOS:
        for n, (a, b) in enumerate(zip(want, got, strict=True)):
            assert all(map(torch.equal, a, b)), f"step {n}"
        assert differences(theirs, plain, mine, opt) == []
    why = reason(opt)
    assert why
    if kind not in LATER:
        assert re.search(r"\((/.*\.py):\d+\)$", why) or kind in ODD, why
    for report in fuseopt.reports():
        if kind not in LATER:
            assert "they stand for" not in report.traced


def reason(opt: Any) -> str:
    """Why no few lanes lead any more."""
    why: str = getattr(opt.step, COMPILED).leader.refusal
    return why


def test_there_are_many_traps() -> None:
    assert len(TRAPS) >= 60
    assert len(harmless.HARMLESS) >= 20


@pytest.mark.family(6)
@pytest.mark.parametrize("kind", harmless.HARMLESS, ids=lambda k: k.__name__)
def test_a_harmless_optimizer_is_led(kind: Any) -> None:
    want, plain, theirs = run(kind, compiled=False)
    got, opt, mine = run(kind, compiled=True)
    for n, (a, b) in enumerate(zip(want, got, strict=True)):
        assert all(map(torch.equal, a, b)), f"step {n}"
    assert differences(theirs, plain, mine, opt) == []
    told = [r.traced for r in fuseopt.reports()]
    assert told
    assert {t.partition("; ")[2] for t in told} == {"they stand for the others"}, told
