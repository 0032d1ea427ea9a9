"""docs/house.md follows an address and a rate: the files that a call enters are those
that it names, each once.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

import fuseopt
from tests import ROOT
from tests.frames import entered, lines
from tests.steps import make_params, set_grads

PACKAGE = ROOT / "fuseopt"
PAGE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
WALK = PAGE[PAGE.index("## Two things followed") : PAGE.index("## To add an op")]


def files_of(call: Callable[[], object]) -> set[str]:
    """The files of the package whose functions a call enters."""
    files = {code.co_filename for code in entered(call)}
    inside = f"{PACKAGE}/"
    return {f.removeprefix(inside) for f in files if f.startswith(inside)}


def named(title: str) -> list[str]:
    """The files of the table with this title."""
    _, _, table = WALK.partition(f"| file | {title} |")
    rows = re.findall(r"^\| `([^`]+)` \|", table.partition("\n\n")[0], re.MULTILINE)
    assert len(rows) == len(set(rows))
    return rows


def test_a_call_enters_the_files_that_are_named() -> None:
    params = make_params([(3, 4), (5,)] * 12)
    optimizer = fuseopt.compile(torch.optim.AdamW(params, foreach=True))
    for seed in range(4):
        set_grads(params, params, seed)
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()
    optimizer.step()
    always = named("in every call")
    assert files_of(optimizer.step) == set(always)
    assert len(entered(optimizer.step)) <= 18
    assert lines(optimizer.step).total() <= 84
    set_grads(params, params, 5)
    optimizer.param_groups[0]["lr"] *= 0.9
    more = named("and where gradients have moved and the rate has changed")
    assert files_of(optimizer.step) - set(always) == set(more)


def test_a_tail_enters_the_files_that_are_named() -> None:
    params = make_params([(3, 4), (5,)] * 12)
    tail = fuseopt.tail(torch.optim.AdamW(params, foreach=True), clip_grad_norm=1.0)
    for seed in range(6):
        set_grads(params, params, seed)
        tail()
    set_grads(params, params, 7)
    common = {"replicate/single_call.py", "runtime/commit.py", "compat/hooks.py"}
    files = common.union(named("in every call of a tail"))
    assert files_of(tail) == files
    assert len(files) <= 12
    set_grads(params, params, 8)
    assert len(entered(tail)) <= 30
    assert lines(tail).total() <= 133


def test_all_files_that_are_followed_exist() -> None:
    names = re.findall(r"`([a-z_/]+\.(?:py|h))`", WALK)
    assert len(names) > 30
    for name in names:
        home = ROOT if name.startswith("tests/") else PACKAGE
        assert (home / name).is_file(), name
