"""Steps that ask whether they are being compiled, and compute otherwise where they are.

Eager's answer is no, and so is a compiled step's: its bits are eager's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from tests.uniformity.traps.base import Momentum, Trap


class Asks(Trap):
    def scale(self, i, p, group):
        return 2.0 if torch.compiler.is_compiling() else 1.0


class AsksByName(Trap):
    def scale(self, i, p, group):
        return 2.0 if is_compiling() else 1.0


class AsksDynamo(Trap):
    def scale(self, i, p, group):
        return 2.0 if torch.compiler.is_dynamo_compiling() else 1.0


class AsksTheOldWay(Trap):
    def scale(self, i, p, group):
        return 2.0 if torch._dynamo.is_compiling() else 1.0


def compiles() -> bool:
    """As packages do that support several versions of torch."""
    if hasattr(torch, "compiler") and hasattr(torch.compiler, "is_compiling"):
        return torch.compiler.is_compiling()
    if hasattr(torch, "_dynamo") and hasattr(torch._dynamo, "is_compiling"):
        return torch._dynamo.is_compiling()
    return False


class AsksThroughAFunction(Trap):
    def scale(self, i, p, group):
        return 2.0 if not torch.jit.is_scripting() and compiles() else 1.0


class ReadsItsCounterAsInEager(Momentum):
    """A counter is a number of Python's in eager, and a tensor where it is compiled."""

    def ready(self, ps: Any) -> None:
        for p in ps:
            self.state[p]["step"] = torch.zeros(())

    def scale(self, i, p, group):
        self.state[p]["step"] += 1
        step = self.state[p]["step"]
        step = step if compiles() else step.item()
        return 1.0 / (1 - 0.9**step)


class DividesByAListAsInEager(Momentum):
    """A list of numbers in eager, of tensors where it is compiled."""

    def ready(self, ps: Any) -> None:
        for p in ps:
            self.state[p]["step"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            ps = [p for p in group["params"] if p.grad is not None]
            steps = [self.state[p]["step"] for p in ps]
            grads = [p.grad for p in ps]
            if not compiles() and steps and steps[0].is_cpu:
                torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)
            else:
                torch._foreach_add_(steps, 1)
            if compiles():
                rates = [0.9**step for step in steps]
                torch._foreach_mul_(rates, -group["lr"])
                torch._foreach_add_(ps, torch._foreach_mul(grads, rates))
            else:
                rates = [-group["lr"] * 0.9 ** step.item() for step in steps]
                torch._foreach_add_(ps, torch._foreach_mul(grads, rates))


class AsksWhetherToCheck(Trap):
    """Harmless: a check that is left out where it is compiled."""

    def lane(self, i, p, group):
        if not torch.compiler.is_compiling() and group["lr"] < 0:
            raise ValueError("a negative rate")
        p.sub_(p.grad, alpha=group["lr"])
