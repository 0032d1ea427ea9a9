"""A step that reached Dynamo's limit is traced anew when calls settle."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

from fuseopt.compiler.diagnostics import AFTER
from fuseopt.compiler.session import session
from fuseopt.isolate.retries import Retries
from tests.beside import WAYS
from tests.frozen import bits


class Settles(Optimizer):
    """Each of its first steps goes a way of its own; all later ones go one."""

    def __init__(self, params: Any, ways: int) -> None:
        self.ways = [False] * ways
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        scale = 1.0
        for k, done in enumerate(self.ways):
            if not done:
                self.ways[k] = True
                scale = 1.0 + k
                break
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * scale)


def train(way: str, n: int, ways: int, steps: int) -> tuple[list[Any], Any, list[str]]:
    """The bits after each step, the number of Reports after each, and warnings."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(3, 4)) for _ in range(n)]
    opt = Settles(ps, ways)
    step = opt.step if way == "eager" else WAYS[way](opt)
    known, seen, told = len(session.reports), [], []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            for p in ps:
                p.grad = torch.randn(3, 4)
            step()
            seen.append([bits(p) for p in ps])
            told.append(len(session.reports) - known)
    return seen, told, [str(w.message) for w in said]


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 18])
@pytest.mark.parametrize("way", ["compile", "backend"])
def test_a_step_that_settles_is_compiled_after_the_limit(way: str, n: int) -> None:
    want, _, _ = train("eager", n, 30, 60)
    got, told, said = train(way, n, 30, 60)
    assert got == want
    limit = next(text for text in said if "hit its recompile limit" in text)
    assert "The guard that failed last: `" in limit
    assert "self.ways" in limit
    # it waits for so many calls without a trace, and one graph then does
    traced = [k for k in range(1, len(told)) if told[k] != told[k - 1]]
    *_, limited, settled = traced
    assert settled - limited >= AFTER[0]
    assert settled > 30
    assert told[-1] == told[30] + 1


def test_retries_are_few_and_wait_for_calls_without_a_trace() -> None:
    retries, due = Retries(), []
    for call in range(3000):
        if retries.due(reports=min(call, 40)):
            due.append(call)
    first = 40 + AFTER[0]
    assert due == [first, first + AFTER[1], first + AFTER[1] + AFTER[2]]


class Rate(float):
    def __mul__(self, other: Any) -> Any:
        return float(self) * other


@pytest.mark.family(8)
@pytest.mark.parametrize("n", [4, 18])
@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
@pytest.mark.parametrize("kind", [Rate, np.float32], ids=lambda x: x.__name__)
def test_no_part_of_a_step_in_eager_is_compiled_alone(
    kind: Any, name: str, way: str, n: int
) -> None:
    ps = [torch.nn.Parameter(torch.randn(3, 4)) for _ in range(n)]
    opt: Any = getattr(torch.optim, name)(ps, lr=kind(0.01))
    step, known = WAYS[way](opt), len(session.reports)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for t in range(10):
            opt.param_groups[0]["lr"] = kind(0.01 / (1 + t))
            for p in ps:
                p.grad = torch.randn(3, 4)
            step()
    texts = " ".join(str(w.message) for w in said)
    for helper in ("_get_value", "maybe_fallback", "_to_scalar"):
        assert helper not in texts
    reports = session.reports[known:]
    if kind is Rate:
        assert len(reports) == 1
        assert "its own operators" in reports[0].fallback
    assert not any("computes only numbers" in r.fallback for r in reports)


#: No state of a parameter, but among the states: Dynamo 2.13 fails on it, or takes it.
BESIDE_STATE = {
    "dtype": torch.float16,
    "number": 3,
    "list": [1.0],
    "tensor": torch.ones(3),
    "text": "note",
    "dict": {"calls": 1},
}


@pytest.mark.family(24)
@pytest.mark.parametrize("n", [4, 18])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["AdamW", "ASGD"])
@pytest.mark.parametrize("value", BESIDE_STATE)
def test_no_part_of_a_step_on_which_dynamo_fails_is_compiled_alone(
    value: str, name: str, way: str, n: int
) -> None:
    seen: list[Any] = []
    said: Any
    for how in ("eager", way):
        torch._dynamo.reset()
        torch.manual_seed(0)
        ps = [torch.nn.Parameter(torch.randn(3, 4)) for _ in range(n)]
        opt: Any = getattr(torch.optim, name)(ps, lr=0.01, foreach=False)
        step = opt.step if how == "eager" else WAYS[how](opt)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            known = len(session.reports)
            opt.state["note"] = BESIDE_STATE[value]
            for t in range(4):
                for p in ps[: n - t % 3]:
                    p.grad = torch.randn(3, 4)
                step()
                opt.zero_grad()
        seen.append([bits(p) for p in ps])
    assert seen[0] == seen[1]
    failed = ["Dynamo fails on it" in r.fallback for r in session.reports[known:]]
    assert not any(failed) or failed.index(True) == len(failed) - 1
    texts = " ".join(str(w.message) for w in said)
    for part in ("_get_value", "_single_tensor", "_to_scalar"):
        assert part not in texts
