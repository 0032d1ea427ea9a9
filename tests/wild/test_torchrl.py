"""`integrations.torchrl`: a captured learner on the simulated device, to eager's bits.

tensordict's class is the real one; it sees the simulated device as CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("tensordict", reason="tensordict is not installed (make wild)")
import tensordict.nn.cudagraphs as theirs

from fuseopt.errors import ConfigError, LaunchError
from fuseopt.integrations.torchrl import CapturedLearner
from tests.simulated.twins import SimTwins

#: Warnings of the package are its own.
pytestmark = pytest.mark.filterwarnings("default")

Make = Callable[[list[Any]], torch.optim.Optimizer]
STEPS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
}


class Torch:
    """torch, with the simulated device in the place of CUDA."""

    def __init__(self, sim: ModuleType) -> None:
        self.cuda = sim

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def captures(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sim, "is_available", lambda: True, raising=False)
    monkeypatch.setattr(theirs, "torch", Torch(sim))
    return sim


class Learning:
    """Twins, of which one learns by a captured update. Its gradients are written
    within the update, from memory that a replay finds again.
    """

    def __init__(self, make: Make, warmup: int, anew: bool) -> None:
        self.twins = SimTwins(make)
        self.anew = anew
        self.batch = [torch.zeros_like(p) for p in self.twins.params]
        self.learner = self.learner_of(warmup)

    def learner_of(self, warmup: int) -> CapturedLearner:
        return CapturedLearner(
            self.update,
            warmup=warmup,
            optimizers=[self.twins.optimizer],
            options={"cudagraphs": True},
        )

    def update(self) -> None:
        """`anew`: as where a backward allocates the gradients."""
        for p, grad in zip(self.twins.params, self.batch, strict=True):
            if self.anew or p.grad is None:
                p.grad = grad * 1.0
            else:
                p.grad.copy_(grad)
        self.twins.optimizer.step()

    def step(self, **numbers: Any) -> list[str]:
        """One step of both, with other numbers; what differs after it."""
        twins = self.twins
        twins.set(**numbers)
        for p, grad in zip(twins.eager_params, self.batch, strict=True):
            p.grad = torch.randn(p.shape, generator=twins.generator)
            grad.copy_(p.grad)
        twins.step_eager()
        self.learner()
        return twins.differences()


@pytest.mark.parametrize("anew", [False, True], ids=["in place", "anew"])
@pytest.mark.parametrize("warmup", [2, 3, 5])
@pytest.mark.parametrize("name", STEPS)
def test_rates_and_counters_are_live(
    captures: ModuleType, name: str, warmup: int, anew: bool
) -> None:
    learning = Learning(STEPS[name], warmup, anew)
    for k in range(warmup + 6):
        assert learning.step(lr=0.1 / (k + 1)) == [], f"call {k}"
    with captures.counting() as found:
        assert learning.step(lr=0.5) == []
    assert (found.replays, found.captures) == (1, 0)
    assert learning.learner.counter == warmup


def test_without_the_refresh_the_numbers_would_stay(captures: ModuleType) -> None:
    """tensordict's own class repeats the rate of the capture."""
    learning = Learning(STEPS["momentum"], 3, False)
    learning.learner.optimizers.clear()
    for _ in range(4):
        learning.step()
    assert learning.step(lr=0.5) != []


def test_a_gradient_that_moved_is_refused(captures: ModuleType) -> None:
    learning = Learning(STEPS["AdamW"], 2, False)
    for _ in range(4):
        assert learning.step() == []
    learning.twins.params[0].grad = None
    with pytest.raises(LaunchError, match="compiled anew since it was captured"):
        learning.learner()
    # another learner captures again
    learning.learner = learning.learner_of(2)
    for _ in range(4):
        assert learning.step(lr=0.03) == []


def test_the_first_call_cannot_be_captured() -> None:
    with pytest.raises(ConfigError, match="warmup=2 or more"):
        CapturedLearner(lambda: None, warmup=1, optimizers=[])
