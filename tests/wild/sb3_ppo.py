"""Stable-Baselines3's PPO, which makes its optimizer itself, on a pole in a cart."""

from __future__ import annotations

from pathlib import Path

from stable_baselines3 import PPO

from tests.wild.trained import Compile, Trained, tensors_of

#: Moves that are collected before they are learnt from, and how often they are.
COLLECTED, BATCH, EPOCHS = 64, 32, 5
ROLLOUTS = 2


def agent_of(compile: Compile) -> PPO:
    """An agent with a small network."""
    agent = PPO(
        "MlpPolicy",
        "CartPole-v1",
        n_steps=COLLECTED,
        batch_size=BATCH,
        n_epochs=EPOCHS,
        policy_kwargs={"net_arch": [16, 16]},
        device="cpu",
        seed=0,
    )
    change(compile, agent)
    return agent


def change(compile: Compile, agent: PPO) -> None:
    """The line that a user adds for an agent, made or loaded."""
    compile(agent.policy.optimizer)


def trained_by(agent: PPO) -> Trained:
    return Trained(tensors_of(agent.policy), [agent.policy.optimizer])


def train(compile: Compile) -> Trained:
    """Learn from all moves."""
    agent = agent_of(compile)
    agent.learn(ROLLOUTS * COLLECTED)
    return trained_by(agent)


def resume(compile: Compile, folder: Path) -> Trained:
    """Learn from half of them, save, load; what was loaded is compiled as well.

    The world begins anew, which an archive of the agent does not hold.
    """
    first = agent_of(compile)
    first.learn(COLLECTED)
    first.save(folder / "agent.zip")
    agent = PPO.load(folder / "agent.zip", env=first.get_env(), device="cpu")
    change(compile, agent)
    agent.set_random_seed(1)
    agent.learn(COLLECTED)
    return trained_by(agent)
