"""Whatever hangs on an optimizer, before its first tail or later, its tails do what
trainers write, and raise what that raises, with nothing written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuseopt
from tests import beside
from tests.hung import cases
from tests.isolate.test_hung import LATER, build, compare

#: A list that can be gone over once is gone over by clip, and then empty for the step.
ONCE = ("params: iterator", "params: generator", "params: filter")
CASES = {name: hang for name, hang in cases().items() if name not in ONCE}
#: Few parameters and many, from the first call on or later, take turns.
TABLE = [
    (name, size, 0 if first and not name.startswith(("state", "beside")) else LATER)
    for k, name in enumerate(CASES)
    for size, first in (
        ((4, 6)[k // 2 % 2], k % 2 == 1),
        ((18, 34)[k // 2 % 2], k % 2 == 0),
    )
]


def parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def written(run: beside.Run) -> None:
    """What trainers write."""
    torch.nn.utils.clip_grad_norm_(parameters(run.opt), 1.0, foreach=True)
    run.opt.step()
    run.opt.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "when"), TABLE)
def test_what_hangs_on_an_optimizer(name: str, size: int, when: int) -> None:
    twin, mine = build(torch.optim.AdamW, size), build(torch.optim.AdamW, size)
    twin.step = lambda: written(twin)
    with beside.quiet():
        mine.step = fuseopt.tail(mine.opt, clip_grad_norm=1.0, zero_grad=True)
        compare(twin, mine, CASES[name], when)
