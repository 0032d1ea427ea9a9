"""Steps that use `self` for its attributes alone, read from their instructions."""

from __future__ import annotations

import dis
from types import SimpleNamespace
from typing import Any

import pytest

from fuseopt.shadow import whole
from fuseopt.shadow.whole import keeps_to_itself


class Some:
    """What a step may be a method of."""

    size = 2

    def takes(self, x: Any) -> Any:
        self.size = x
        return self.size + self.size + x.size

    def hands_on(self, x: Any) -> Any:
        return str(self)

    def hands_on_before_an_attribute(self, x: Any) -> Any:
        return max(self, x.size)


def test_attributes_alone() -> None:
    assert keeps_to_itself(Some.takes, Some)
    assert not keeps_to_itself(Some.hands_on, Some)
    assert not keeps_to_itself(Some.hands_on_before_an_attribute, Some)


@pytest.mark.parametrize(
    ("instructions", "alone"),
    [
        # self.size = x
        ([("LOAD_FAST_LOAD_FAST", ("x", "self")), ("STORE_ATTR", "size")], True),
        # max(self, x.size)
        (
            [
                ("LOAD_GLOBAL", "max"),
                ("LOAD_FAST_LOAD_FAST", ("self", "x")),
                ("LOAD_ATTR", "size"),
                ("CALL", 2),
            ],
            False,
        ),
        # getattr(self, x)
        (
            [
                ("LOAD_GLOBAL", "getattr"),
                ("LOAD_FAST_LOAD_FAST", ("self", "x")),
                ("CALL", 2),
            ],
            True,
        ),
    ],
)
def test_instructions_that_load_two(
    instructions: list[tuple[str, Any]], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.13 has them: an attribute behind them is the second one's."""
    steps = [SimpleNamespace(opname=name, argval=value) for name, value in instructions]
    monkeypatch.setattr(whole.dis, "get_instructions", lambda code: steps)
    assert whole.dis is dis
    assert keeps_to_itself(Some.takes, Some) is alone
