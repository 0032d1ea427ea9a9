"""A training loop that ends in a tail, and the same in what trainers write."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import fuseopt
from fuseopt.compiler.session import session
from tests.cases.base import Ring
from tests.frozen import Freezer

SHAPES = ((7, 5), (13,), (3, 2), (5,), (6, 4), (1, 1))
SIZES = (4, 6, 18, 34)
TURNS = 7

Make = Callable[[Any], Any]
#: What a user does before the end of a turn; it returns the arguments of the tail.
Change = Callable[["Loop", int], Any]


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.01)


class Loop:
    """A loop over turns: `fused` ends each in a tail."""

    def __init__(
        self,
        fused: bool,
        lanes: int,
        make: Make = adamw,
        *,
        optimizers: int = 1,
        averaged: bool = True,
        copied: bool = False,
        scaled: bool = False,
        dtype: torch.dtype = torch.float32,
        order: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = (SHAPES * lanes)[:lanes]
        drawn = [torch.randn(s, generator=draw).to(dtype) for s in shapes]
        self.fused = fused
        self.params = Ring(map(torch.nn.Parameter, drawn))
        self.opts = [make([*self.params][k::optimizers]) for k in range(optimizers)]
        self.opt = self.opts[0]
        self.ema = Ring(p.detach().clone() for p in self.stepped()) if averaged else []
        self.decay: Any = 0.9
        self.copies = [p.detach().bfloat16() for p in self.stepped()] if copied else []
        self.scaler: Any = None
        if scaled:
            scale = {"init_scale": 1024.0, "growth_interval": 2}
            self.scaler = torch.amp.GradScaler("cpu", **scale)
            self.scaler.scale(torch.ones(()))
        self.order = order and order(self.params)
        self.options: dict[str, Any] = {"clip_grad_norm": 1.0, **options}
        #: what the scenario keeps, and what is compared beside all that the loop holds
        self.kept: Any = None
        self.seen: Any = None
        self.tail: Any = None
        if fused:
            self.begin()

    def begin(self) -> None:
        more: dict[str, Any] = {"eager_if_faster": False}
        if self.ema:
            more["ema"] = [(self.ema, self.decay)]
        if self.copies:
            more["copies"] = self.copies
        if self.order is not None:
            more["clip_parameters"] = self.order
        opts = self.opts if len(self.opts) > 1 else self.opt
        self.tail = fuseopt.tail(opts, scaler=self.scaler, **self.options, **more)

    def stepped(self) -> list[Any]:
        """All parameters in the order of the groups."""
        groups = [group for opt in self.opts for group in opt.param_groups]
        return [p for group in groups for p in group["params"]]

    def set_grads(self, turn: int) -> None:
        draw = torch.Generator().manual_seed(100 + turn)
        scale = self.scaler.get_scale() if self.scaler else 1
        for p in self.params:
            p.grad = (torch.randn(p.shape, generator=draw) * 3).to(p.dtype) * scale

    def set(self, **options: Any) -> None:
        """Options of the tail, for this turn and later ones."""
        self.options.update(options)
        for name, value in options.items() if self.fused else ():
            setattr(self.tail, name, value)

    def set_decay(self, decay: Any) -> None:
        self.decay = decay
        if self.fused:
            self.tail.decays = [decay]

    def end(self, average: bool = True, accumulated: Any = None) -> Any:
        """The end of a turn; the total norm."""
        if self.fused:
            norm = self.tail(average=average, accumulated=accumulated).norm
        else:
            norm = self.end_in_eager(average, accumulated)
        if self.scaler:
            self.scaler.update()
        clears = self.options.get("zero_grad")
        for opt in self.opts if clears and not self.fused else ():
            opt.zero_grad(set_to_none=clears is True)
        return norm

    def end_in_eager(self, average: bool, accumulated: Any) -> Any:
        options, params = self.options, self.stepped()
        with torch.no_grad():
            divisor = accumulated or options.get("grad_divisor")
            for p in params if divisor else ():
                if p.grad is not None:
                    p.grad.div_(divisor)
        for opt in self.opts if self.scaler else ():
            self.scaler.unscale_(opt)
        norm = None
        if options["clip_grad_norm"] is not None:
            clipped = params if self.order is None else self.order
            norm = torch.nn.utils.clip_grad_norm_(
                clipped,
                options["clip_grad_norm"],
                options.get("norm_type", 2.0),
                error_if_nonfinite=options.get("error_if_nonfinite", False),
            )
        if options.get("clip_grad_value") is not None:
            torch.nn.utils.clip_grad_value_(params, options["clip_grad_value"])
        skips = options.get("skip_nonfinite") and norm is not None
        if not (skips and not norm.isfinite()):  # type: ignore[union-attr]
            for opt in self.opts:
                self.scaler.step(opt) if self.scaler else opt.step()
        with torch.no_grad():
            if self.ema and average:
                torch._foreach_lerp_([*self.ema], params, 1 - self.decay)
            if self.copies:
                torch._foreach_copy_(self.copies, params)
        return norm

    def held(self) -> dict[str, Any]:
        """All that the loop holds, as values that compare with `==`."""
        freezer = Freezer([*self.params])
        states = [[opt.state.get(p) for p in self.params] for opt in self.opts]
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for opt in self.opts
            for group in opt.param_groups
        ]
        held = {
            "params": [p.detach() for p in self.params],
            "grads": [p.grad for p in self.params],
            "states": states,
            "groups": groups,
            "averages": [*self.ema],
            "copies": self.copies,
            "scaler": self.scaler and self.scaler.state_dict(),
            "seen": self.seen,
        }
        return {name: freezer.value(value) for name, value in held.items()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings and logs unseen, as they tell of a fallback; gradients on afterwards."""
    kept = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(kept)
        torch.set_grad_enabled(True)


def beside(
    change: Change,
    lanes: int,
    make: Make = adamw,
    unwritten: bool = False,
    turns: int = TURNS,
    **setup: Any,
) -> list[Any]:
    """Both loops, compared after each turn; an error is to come in both.

    With `unwritten`, what is held is not compared after an error: eager may write
    before it raises. Returns the errors.
    """
    errors = []
    with quiet():
        torch._dynamo.reset()
        session.reset()
        loops = [Loop(fused, lanes, make, **setup) for fused in (False, True)]
        for turn in range(turns):
            ends: list[Any] = []
            for loop in loops:
                loop.set_grads(turn)
                try:
                    ends.append((loop.end(**(change(loop, turn) or {})), None))
                except Exception as error:
                    ends.append((None, error))
            (norm, error), (fused_norm, fused_error) = ends
            assert type(fused_error) is type(error), (turn, fused_error, error)
            errors += [] if error is None else [error]
            if error is not None and unwritten:
                break
            assert Freezer([]).value(fused_norm) == Freezer([]).value(norm), turn
            eager, fused = (loop.held() for loop in loops)
            assert [k for k in eager if eager[k] != fused[k]] == [], turn
    return errors
