"""A led step that is refused has written nothing, or says that it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.errors import LaunchError
from fuseopt.inputs.keys import LanesDiffer
from fuseopt.replicate.writes import Writes
from fuseopt.runtime.commit import Pending
from tests.replicate.test_counters import Powers


class Scaled(torch.optim.Optimizer):
    """Keeps numbers of all lanes, which Python reads from its graph, and of each."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.size = 1.0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.size = group["lr"] + 1e16 - 1e16
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                state["m"] = state.get("m", 2**60) + 1
                state["far"] = 0.5 * state["m"] - 2.0**59 + self.size
                p.add_(p.grad, alpha=float(state["n"]))


def made(kind: Any) -> tuple[list[torch.nn.Parameter], Any]:
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(18)]
    return params, kind(params)


def step(params: list[torch.nn.Parameter], optimizer: Any) -> None:
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_a_refused_step_is_done_once() -> None:
    params, optimizer = made(Scaled)
    fuseopt.compile(optimizer)
    done = 0
    for turn in range(1, 5):
        optimizer.param_groups[0]["lr"] = 0.1 * turn
        step(params, optimizer)
        done += turn
        assert {p[0].item() for p in params} == {done}
        assert {s["n"] for s in optimizer.state.values()} == {turn}


def test_a_refusal_behind_a_launch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attempt would be a second step."""
    params, optimizer = made(Powers)
    fuseopt.compile(optimizer)
    for _ in range(3):
        step(params, optimizer)
    before = params[0].detach().clone()
    start = Pending.start

    def at_once(self: Pending, *given: Any) -> object:
        call = start(self, *given)
        self.open = False
        return call

    def refuse(self: Writes, *given: Any) -> None:
        raise LanesDiffer("a reason")

    monkeypatch.setattr(Pending, "start", at_once)
    monkeypatch.setattr(Writes, "to", refuse)
    with pytest.raises(LaunchError, match=r"has written parameters.*a reason"):
        step(params, optimizer)
    moved = params[0].detach() - before
    assert -0.5 < moved[0].item() < 0
