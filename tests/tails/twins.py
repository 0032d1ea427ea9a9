"""Two optimizers alike: one is stepped as trainers write it, the other by a tail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

import fuseopt
from fuseopt.tails.outcome import Outcome
from fuseopt.tails.tail import Tail

SHAPES = [(7, 5), (13,), (3, 2), (), (64,), (1, 1)]
Make = Callable[[list[Any]], Optimizer]


class Side:
    """Parameters, averages of them, an optimizer, a scaler."""

    def __init__(
        self,
        make: Make,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        scaled: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in shapes]
        self.opt = make(self.params)
        self.ema = [p.detach().clone() for p in self.params]
        self.scaler: Any = None
        if scaled:
            self.scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=3)
            self.scaler.scale(torch.ones(()))

    def set_grads(self, seed: int, bad: bool = False) -> None:
        g = torch.Generator().manual_seed(seed)
        for p in self.params:
            grad = torch.randn(p.shape, generator=g) * 30.0
            p.grad = grad.to(p.dtype)
        if bad:
            p = self.params[seed % len(self.params)]
            assert p.grad is not None
            p.grad.view(-1)[-1] = float("inf") if seed % 2 else float("nan")

    def eager(
        self,
        max_norm: Any = None,
        decay: Any = None,
        max_value: Any = None,
        norm_type: float = 2.0,
        keep: bool = True,
    ) -> torch.Tensor | None:
        """What trainers write."""
        if self.scaler is not None:
            self.scaler.unscale_(self.opt)
        norm = None
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.params, max_norm, norm_type)
        if max_value is not None:
            torch.nn.utils.clip_grad_value_(self.params, max_value)
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
        if decay is not None:
            with torch.no_grad():
                torch._foreach_lerp_(self.ema, self.params, 1 - decay)
        if self.scaler is not None:
            self.scaler.update()
        if not keep:
            self.opt.zero_grad()
        return norm


def tail_of(side: Side, **options: Any) -> Tail:
    """A tail that must be one graph."""
    given: dict[str, Any] = {"fallback": "error", "check": True, **options}
    return fuseopt.tail(side.opt, scaler=side.scaler, **given)


def call(side: Side, tail: Tail) -> Outcome:
    out = tail()
    if side.scaler is not None:
        side.scaler.update()
    return out


def same(a: Any, b: Any) -> bool:
    """The same type and bits, or both NaN?"""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        equal = (a == b) & (torch.signbit(a) == torch.signbit(b))
        return bool((equal | (a.isnan() & b.isnan())).all())
    return type(a) is type(b) and bool(a == b)


def differences(one: Side, other: Side, grads: bool = False) -> list[str]:
    """Where two sides hold other bits."""
    found = []
    for k, (p, q) in enumerate(zip(one.params, other.params, strict=True)):
        if not same(p.data, q.data):
            found.append(f"parameter {k}")
        if not same(one.ema[k], other.ema[k]):
            found.append(f"average {k}")
        if grads and not same(p.grad, q.grad):
            found.append(f"gradient {k}")
        a, b = (dict(x.opt.state.get(y, {})) for x, y in ((one, p), (other, q)))
        if [*a] != [*b] or not all(same(a[key], b[key]) for key in a):
            found.append(f"state {k}")
    if one.scaler is not None and one.scaler.state_dict() != other.scaler.state_dict():
        found.append("scaler")
    groups = zip(one.opt.param_groups, other.opt.param_groups, strict=True)
    for a, b in groups:
        found += [f"group {k}" for k in a if k != "params" and not same(a[k], b.get(k))]
    return found
