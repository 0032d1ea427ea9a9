"""An error at any place of a step of packed state, or of masters, leaves it whole.

Parameters, masters and packed state are as before the step or as after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt import compat
from fuseopt.compiler import pipeline
from fuseopt.offload import MasterOptimizer
from tests.runtime.test_undo import At, AtExtern, AtFunction, raised_at_each
from tests.storage.reference import Params, give_grads, params_of

#: The race is off: which step runs is not to depend on time.
OPTIONS: Any = {"eager_if_faster": False}


def of_plain(make: Any, storage: Any, **options: Any) -> Callable[[Params], Any]:
    return lambda params: fuseopt.compile(
        make(params, **options), storage=storage, **OPTIONS
    )


def masters(make: Any, **options: Any) -> Callable[[Params], Any]:
    return lambda params: MasterOptimizer(params, make, **options)


AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
KINDS: dict[str, Callable[[Params], Any]] = {
    "bf16": of_plain(AdamW, "bf16"),
    "stochastic": of_plain(AdamW, "bf16-stochastic"),
    "split": of_plain(AdamW, "split"),
    "8bit": of_plain(SGD, fuseopt.Storage("8bit/64", least=0), lr=0.1, momentum=0.9),
    "products": of_plain(torch.optim.Muon, "bf16", lr=0.01, ns_steps=2),
    "fp32 masters": masters(AdamW),
    "split masters": masters(AdamW, master="split", storage="bf16"),
}


class Packed:
    """One optimizer with parameters and gradients of its own."""

    def __init__(self, kind: str, lanes: int) -> None:
        dtype = torch.bfloat16 if "masters" in kind else torch.float32
        sizes = [(5, 8)] if kind == "products" else [(5, 8), (16,), (37,)]
        self.params = params_of(lanes, dtype=dtype, sizes=sizes)
        self.opt = KINDS[kind](self.params)
        self.turn = 0

    def set_grads(self) -> None:
        self.turn += 1
        give_grads(self.turn, self.params)

    def step(self) -> None:
        self.opt.step()

    def held(self) -> list[Any]:
        held: list[Any] = [p.detach().clone() for p in self.params]
        for p in self.params:
            for key, x in self.opt.state[p].items():
                held += [key, x.clone() if isinstance(x, Tensor) else x]
        return held


def at_each(kind: str, lanes: int, at: At, every: int) -> int:
    return raised_at_each(Packed(kind, lanes), Packed(kind, lanes), at, every)


@pytest.mark.parametrize(
    ("kind", "lanes", "every"),
    [
        ("stochastic", 4, 5),
        ("split masters", 4, 5),
        *(
            pytest.param(kind, lanes, 1, marks=pytest.mark.slow)
            for kind in KINDS
            for lanes in (4, 18)
        ),
    ],
)
@pytest.mark.mishaps
@pytest.mark.filterwarnings("ignore")
def test_errors_of_python_calls(kind: str, lanes: int, every: int) -> None:
    """At every function of fuseopt's that a steady step enters."""
    assert at_each(kind, lanes, AtFunction, every) > 20


@pytest.mark.parametrize("lanes", [2, pytest.param(18, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_errors_of_aten_calls(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python makes each call; tests/runtime/test_series.py has those of C."""
    monkeypatch.setattr(pipeline, "_chains", lambda *_: None)
    with compat.switches.without("products-in-c"):
        assert at_each("products", lanes, AtExtern, 1) > 4
