"""An optimizer in eager on the CPU, and the same compiled on "sim", bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import fuseopt

from ..steps import eager_step, same_bits

SHAPES = ((17, 5), (9,), (), (12, 8))
#: Whose norms are the same in whatever order they are added.
SINGLE = ((1, 1), (1,), ())
Make = Callable[[list[Any]], Optimizer]


class ExactRoots(TorchDispatchMode):
    """Roots as any GPU takes them. The vector library that eager calls on a CPU is now
    and then an ulp off.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("sqrt", "sqrt_", "_foreach_sqrt", "_foreach_sqrt_"):
            return func(*args, **(kwargs or {}))
        many = isinstance(args[0], (list, tuple))
        exact = [t.double().sqrt().to(t.dtype) for t in (args[0] if many else args[:1])]
        if name.endswith("_"):
            for t, root in zip(args[0] if many else args[:1], exact, strict=True):
                t.copy_(root)
            return None if many else args[0]
        return exact if many else exact[0]


class Clipped(Optimizer):
    """Clips by the total norm within its step: two launches, with memory between."""

    def __init__(self, params: Any, lr: float = 0.1, limit: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "limit": limit})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norms = torch.stack([p.grad.norm() for p in group["params"]])
            scale = group["limit"] / (norms.norm() + 1e-6)
            for p in group["params"]:
                p.sub_(p.grad * scale * group["lr"])


class SimTwins:
    """`make(params)` twice. Grads of each step lie at addresses of their own, unless
    they stay in place. `whole`: one number of each is not zero, and it is whole, so
    that all norms are exact.
    """

    def __init__(
        self,
        make: Make,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        device: str = "sim",
        dtype: torch.dtype = torch.float32,
        whole: bool = False,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        start = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
        self.eager_params = [torch.nn.Parameter(t.clone()) for t in start]
        self.params = [torch.nn.Parameter(t.to(device)) for t in start]
        self.eager = make(self.eager_params)
        # a graph of one launch, too, unless a test says otherwise
        options = {"cudagraphs": True, **options}
        self.optimizer = fuseopt.compile(make(self.params), **options)
        self.generator = generator
        self.kept: list[Any] = []
        self.whole = whole

    def set_grads(self, stay: bool = False) -> None:
        """Fresh gradients for both."""
        self.kept.append([p.grad for p in self.params])  # so that none is used again
        for p, q in zip(self.eager_params, self.params, strict=True):
            grad = torch.randn(p.shape, generator=self.generator)
            if self.whole:
                grad.view(-1)[1:] = 0
                grad = (grad * 5).round()
            grad = grad.to(p.dtype)
            p.grad = grad
            if stay and q.grad is not None:
                q.grad.copy_(grad)
            else:
                q.grad = grad.to(q.device)

    def step(self, stay: bool = False) -> None:
        """One step of both."""
        self.set_grads(stay)
        self.step_eager()
        self.optimizer.step()

    def step_eager(self) -> None:
        """One step of the eager one alone."""
        with ExactRoots():
            eager_step(self.eager)

    def set(self, **changes: Any) -> None:
        """Change hyperparameters of both."""
        for optimizer in (self.eager, self.optimizer):
            for group in optimizer.param_groups:
                for name, value in changes.items():
                    if isinstance(group[name], Tensor):
                        group[name].fill_(value)
                    else:
                        group[name] = value

    def differences(self) -> list[str]:
        """Parameters and state that differ in a bit."""
        found = []
        for i, (p, q) in enumerate(zip(self.eager_params, self.params, strict=True)):
            if not same_bits(q.detach().cpu(), p.detach()):
                found.append(f"parameter {i} {tuple(p.shape)}")
            mine, theirs = self.optimizer.state.get(q, {}), self.eager.state.get(p, {})
            found += [f"state {i}: {sorted(mine)}"] * (mine.keys() != theirs.keys())
            for key, value in theirs.items():
                got = mine.get(key)
                if isinstance(value, dict):
                    alike = (same_bits(got[k].cpu(), t) for k, t in value.items())
                    found += [f"{key} of {i}"] * (not all(alike))
                elif not isinstance(value, Tensor):
                    found += [f"{key} of {i}"] * (got != value)
                elif got is None or not same_bits(got.detach().cpu(), value):
                    found.append(f"{key} of {i}")
        return found

    @property
    def report(self) -> fuseopt.Report:
        """Of what was compiled last."""
        return fuseopt.reports()[-1]
