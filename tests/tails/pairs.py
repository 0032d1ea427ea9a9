"""A tail of an optimizer, and its twin in eager, which clips and steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import fuseopt
from tests.replicate.steady_twins import OPTIONS, WAYS, Pair, Side

NORM = 0.1


def params_of(side: Side) -> list[Any]:
    return [p for group in side.opt.param_groups for p in group["params"]]


def pair_of(name: str, clips: bool = True, **options: Any) -> Pair:
    """Return a tail with these options, and its twin."""
    given: dict[str, Any] = {"clip_grad_norm": NORM} if clips else {"zero_grad": False}
    given |= {**OPTIONS, **options}

    def by_tail(side: Side) -> None:
        tail = fuseopt.tail(side.opt, **given)
        side.call = lambda: tail()

    with mock.patch.dict(WAYS, tail=by_tail):
        pair = Pair(name, "tail")
    twin = pair.twin

    def eager() -> None:
        if clips:
            torch.nn.utils.clip_grad_norm_(params_of(twin), NORM, foreach=True)
        twin.opt.step()

    twin.call = eager
    return pair
