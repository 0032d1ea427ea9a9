"""What a shadow takes over from its optimizer: numbers that have moved, or more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

import fuseopt
from fuseopt.inputs.change import SAME, Change
from fuseopt.inputs.contents import Contents
from fuseopt.shadow.optimizer import Shadow


def params(n: int = 4) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(3) * (k + 1)) for k in range(n)]
    for p in made:
        p.grad = torch.ones_like(p)
    return made


def test_what_counts_as_moved() -> None:
    table: dict[Any, Any] = {"lr": 0.1, "steps": 3, "name": "a", "flag": True}
    other: dict[Any, Any] = {1: 0.5}
    row = [1.0]

    def noted() -> Contents:
        return Contents([table, other, row])

    seen = noted()
    assert seen.compare() is SAME
    table["lr"], other[1] = 0.2, 7
    moved = [(4, table, "lr", 0.2), (9, other, 1, 7)]
    assert seen.compare() == (Change.NUMBERS, "", moved)

    def name() -> None:
        table["name"] = "b"

    def flag() -> None:
        table["flag"] = False

    def number_for_text() -> None:
        table["name"] = 1.0

    def text_for_number() -> None:
        table["lr"] = "0.1"

    def none_for_number() -> None:
        table["lr"] = None

    def another_key() -> None:
        other[2] = other.pop(1)

    def more() -> None:
        other[2] = 1.0

    def a_row() -> None:
        row[0] = 2.0

    changes: list[Callable[[], None]] = [
        *(name, flag, number_for_text, text_for_number, none_for_number),
        *(another_key, more, a_row),
    ]
    for change in changes:
        table.update(lr=0.1, steps=3, name="a", flag=True)
        other.clear()
        other[1] = 0.5
        row[0] = 1.0
        seen = noted()
        change()
        found = seen.compare()
        assert found.change is Change.STRUCTURE, change.__name__
        assert found.reason


def test_a_shadow_follows_numbers_and_all_else() -> None:
    opt = SGD(params(), lr=0.1)
    opt.scale = 1.0  # type: ignore[attr-defined]
    shadow = Shadow(opt)
    shadow.refresh(opt)
    group = opt.param_groups[0]
    changes: list[dict[str, Any]] = [
        {"lr": 0.2},
        {"lr": 0.3, "momentum": 0.9},
        {"lr": 1},
        {"nesterov": True},
        {"lr": torch.tensor(0.5)},
        {"lr": 0.25},
        {"weight_decay": 0.1, "maximize": True},
        {"extra": 3.0},
    ]
    for k, change in enumerate(changes):
        group.update(change)
        opt.scale = float(k)  # type: ignore[attr-defined]
        shadow.refresh(opt)
        own = shadow.stand_in.param_groups[0]
        rest = {key: x for key, x in own.items() if key != "params"}
        assert rest == {key: x for key, x in group.items() if key != "params"}
        assert shadow.stand_in.scale == k
        assert not shadow.changed()
        own["lr"] = 9.0
        assert shadow.changed()
        shadow.clean = False
        shadow.refresh(opt)
        assert not shadow.changed()


class Counted(AdamW):
    """Its own counter moves in each step, too."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.calls = 0


@pytest.mark.parametrize("build", [AdamW, Counted])
def test_a_schedule_copies_no_groups(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates that move at each step, in each of 5 groups: no group is copied."""

    def made() -> tuple[Optimizer, list[Any]]:
        own = params(20)
        groups = [{"params": own[k::5], "lr": 0.01 * (k + 1)} for k in range(5)]
        return build(groups), own

    plain, theirs = made()
    opt, mine = made()
    fuseopt.compile(opt, fallback="error")
    copied: list[int] = []
    mirror = Shadow._mirror_plain

    def counted(self: Shadow, *args: Any) -> None:
        copied.append(1)
        mirror(self, *args)

    for k in range(12):
        if k == 4:
            monkeypatch.setattr(Shadow, "_mirror_plain", counted)
        for one in (plain, opt):
            if isinstance(one, Counted):
                one.calls += 1
            for g, group in enumerate(one.param_groups):
                group["lr"] = 0.01 * (g + 1) / (k + 1)
            one.step()
        assert all(map(torch.equal, mine, theirs))
    assert not copied
    assert len(fuseopt.reports()) <= 3
