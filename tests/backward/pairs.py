"""Two equal models: one is trained in eager, the other steps in backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import fuseopt
from fuseopt.backward.handle import InBackward
from tests.steps import same_bits


class Block(torch.nn.Module):
    """A matrix, a vector, a number, and one parameter that is used twice."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(n, n)
        self.norm = torch.nn.LayerNorm(n)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.off = False

    def forward(self, x: Tensor) -> Tensor:
        if self.off:
            return x
        y = torch.tanh(self.first(x)) * self.scale
        return self.norm(x + self.first(y))


def model(blocks: int = 4, n: int = 6) -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(*[Block(n) for _ in range(blocks)])


class Pair:
    """`theirs` is trained in eager by `plain`, `mine` by `handle`."""

    def __init__(
        self,
        build: Callable[[Any], Optimizer],
        buckets: Any = "layer",
        groups: Callable[[Any], Any] = lambda m: [*m.parameters()],
        of: Callable[[], Any] = model,
        **options: Any,
    ) -> None:
        self.theirs = of()
        self.mine = copy.deepcopy(self.theirs)
        self.plain = build(groups(self.theirs))
        given = groups(self.mine)
        self.handle: InBackward = fuseopt.in_backward(
            self.mine, lambda _: build(given), buckets=buckets, **options
        )
        self.generator = torch.Generator().manual_seed(5)

    def input(self, n: int = 6) -> Tensor:
        return torch.randn(3, n, generator=self.generator)

    def backward(self, loss: Any = None) -> None:
        """A backward of each; that of eager without its step."""
        x = self.input()
        for m in (self.theirs, self.mine):
            out = m(x)
            (out.square().mean() if loss is None else loss(out, m)).backward()

    def step(self, loss: Any = None) -> None:
        self.backward(loss)
        self.plain.step()
        self.plain.zero_grad()
        self.check()

    def both(self, change: Callable[[Any, Any], None]) -> None:
        """Change both models and optimizers in the same way."""
        change(self.theirs, self.plain)
        change(self.mine, self.handle)

    def check(self, grads: bool = False) -> None:
        """The bits of eager in all that is held."""
        for p, q in zip(self.theirs.parameters(), self.mine.parameters(), strict=True):
            assert same_bits(q.detach(), p.detach())
            if grads and p.grad is not None:
                assert q.grad is not None
                assert same_bits(q.grad, p.grad)
            else:
                assert q.grad is None
        mine, theirs = self.handle.state_dict(), self.plain.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for k, state in theirs["state"].items():
            own = mine["state"][k]
            assert list(own) == list(state)
            for key, value in state.items():
                assert type(own[key]) is type(value)
                if isinstance(value, Tensor):
                    assert same_bits(own[key], value), key
                else:
                    assert own[key] == value, key
