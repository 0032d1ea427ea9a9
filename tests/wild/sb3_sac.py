"""Stable-Baselines3's SAC: three optimizers, one of which has one number to learn."""

from __future__ import annotations

from pathlib import Path

from stable_baselines3 import SAC

from tests.wild.trained import STEPS, Compile, Trained, tensors_of

#: Moves before the first step.
BEFORE = 16


def change(compile: Compile, agent: SAC) -> None:
    """The lines that a user adds for an agent, one for each optimizer."""
    compile(agent.actor.optimizer)
    compile(agent.critic.optimizer)
    compile(agent.ent_coef_optimizer)


def agent_of(compile: Compile) -> SAC:
    """An agent with small networks."""
    agent = SAC(
        "MlpPolicy",
        "Pendulum-v1",
        learning_starts=BEFORE,
        batch_size=16,
        buffer_size=1000,
        policy_kwargs={"net_arch": [16, 16]},
        device="cpu",
        seed=0,
    )
    change(compile, agent)
    return agent


def trained_by(agent: SAC) -> Trained:
    tensors = tensors_of(agent.policy)
    tensors["entropy"] = agent.log_ent_coef.detach().clone()
    made = agent.actor.optimizer, agent.critic.optimizer, agent.ent_coef_optimizer
    return Trained(tensors, list(made))


def train(compile: Compile) -> Trained:
    """Learn after each move, once there are enough."""
    agent = agent_of(compile)
    agent.learn(BEFORE + STEPS)
    return trained_by(agent)


def resume(compile: Compile, folder: Path) -> Trained:
    """Save what was learnt, load it and learn on; what was loaded is compiled as well.

    The moves begin anew, which an archive of the agent does not hold.
    """
    agent = agent_of(compile)
    agent.learn(BEFORE + STEPS // 2)
    agent.save(folder / "agent.zip")
    other = SAC.load(folder / "agent.zip", env=agent.get_env(), device="cpu")
    change(compile, other)
    other.set_random_seed(1)
    other.learn(BEFORE + STEPS // 2)
    return trained_by(other)
