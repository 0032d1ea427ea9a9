"""What packages do that takes a compiled step away: docs/wild.md says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fuseopt
from fuseopt.compiler.session import COMPILED
from tests.wild.trained import STEPS, seed_all

#: The packages' own warnings are their own.
pytestmark = pytest.mark.filterwarnings("default")


def is_compiled(optimizer: torch.optim.Optimizer) -> bool:
    return hasattr(optimizer.step, COMPILED)


def test_fit_of_skorch_makes_another_optimizer() -> None:
    """So it is told how to make one that is compiled."""
    skorch = pytest.importorskip("skorch", reason="skorch is not installed (make wild)")
    net = skorch.NeuralNetRegressor(
        torch.nn.Linear(4, 1), train_split=None, max_epochs=1, verbose=0
    ).initialize()
    made = fuseopt.compile(net.optimizer_)
    net.fit(torch.randn(8, 4), torch.randn(8, 1))
    assert net.optimizer_ is not made
    assert not is_compiled(net.optimizer_)
    assert fuseopt.reports() == []


def test_a_loaded_agent_of_stable_baselines3_has_a_plain_optimizer(
    tmp_path: Path,
) -> None:
    pytest.importorskip(
        "stable_baselines3", reason="stable-baselines3 is not installed (make wild)"
    )
    from stable_baselines3 import PPO

    agent = PPO("MlpPolicy", "CartPole-v1", device="cpu", n_steps=8, batch_size=8)
    fuseopt.compile(agent.policy.optimizer)
    agent.save(tmp_path / "agent")
    loaded = PPO.load(tmp_path / "agent", device="cpu")
    assert is_compiled(agent.policy.optimizer)
    assert not is_compiled(loaded.policy.optimizer)


def test_pyro_makes_an_optimizer_for_each_parameter() -> None:
    pytest.importorskip("pyro", reason="pyro-ppl is not installed (make wild)")
    from tests.wild import pyro_svi

    seed_all()
    trained = pyro_svi.train(lambda optimizer: optimizer)
    sizes = [len(o.param_groups[0]["params"]) for o in trained.optimizers]
    assert sizes == [1] * len(trained.tensors)


def test_lightning_gives_a_closure() -> None:
    """Forward and backward are in it; of the update all parameters are traced."""
    pytest.importorskip("lightning", reason="lightning is not installed (make wild)")
    from tests.wild import lightning_automatic

    given: list[object] = []

    def watched(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.register_step_pre_hook(
            lambda _, args, kwargs: given.extend([*args[1:], *kwargs.values()])
        )
        return optimizer

    lightning_automatic.train(watched)
    assert len(given) == STEPS
    assert all(map(callable, given))
