"""Pyro's SVI with PyroOptim, which makes one optimizer for each parameter."""

from __future__ import annotations

from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from torch.distributions import constraints

from tests.wild.inverses import of_torch
from tests.wild.trained import STEPS, Compile, Trained


def model(x: Tensor, y: Tensor) -> None:
    """A line with noise."""
    slope = pyro.sample("slope", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
    noise = pyro.param("noise", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(x @ slope + shift, noise), obs=y)


class Inference:
    """The guide, the optimizers and the objective."""

    def __init__(self, compile: Compile) -> None:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        self.optimizers = pyro.optim.PyroOptim(
            lambda params, **options: compile(torch.optim.Adam(params, **options)),
            {"lr": 1e-2},
        )
        self.svi = SVI(model, AutoNormal(model), self.optimizers, Trace_ELBO())
        self.x = torch.randn(16, 3)
        self.y = self.x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.svi.step(self.x, self.y)

    def trained(self) -> Trained:
        store = pyro.get_param_store()
        tensors = {name: value.detach().clone() for name, value in store.items()}
        # they are made in the order of a set
        made = self.optimizers.optim_objs
        return Trained(tensors, [made[p] for p in sorted(made, key=store.param_name)])


@of_torch()
def train(compile: Compile) -> Trained:
    """Train from the first step to the last."""
    inference = Inference(compile)
    inference.train(STEPS)
    return inference.trained()


@of_torch()
def resume(compile: Compile, folder: Path) -> Trained:
    """The same in two inferences, the second of which draws where the first ended."""
    first = Inference(compile)
    first.train(STEPS // 2)
    first.optimizers.save(str(folder / "optimizers.pt"))
    pyro.get_param_store().save(str(folder / "params.pt"))
    drawn = torch.get_rng_state()
    second = Inference(compile)
    pyro.get_param_store().load(str(folder / "params.pt"))
    second.optimizers.load(str(folder / "optimizers.pt"))
    second.svi.guide(second.x, second.y)  # its parameters are those of the store
    torch.set_rng_state(drawn)
    second.train(STEPS - STEPS // 2)
    return second.trained()
