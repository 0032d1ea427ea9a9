"""tests/golden/messages.txt has every message, and all of them keep the rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tools.messages import error_classes, faults, messages_of, page


def test_the_messages_are_those_of_the_golden_file(
    golden: Callable[[str, str], None],
) -> None:
    golden("messages.txt", page())


def test_the_messages_keep_the_rules() -> None:
    assert faults() == []


def test_the_classes_of_errors_are_found() -> None:
    found = error_classes()
    # of Python, of errors.py, derived from one of these, of the scheduler
    assert found >= {"ValueError", "CaptureError", "EagerOnly", "Refusal", "Refused"}
    assert "Graph" not in found


@pytest.mark.family(3)
@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ('raise ValueError("a limit of zero")', "error", "a limit of zero"),
        ('raise errors.EagerOnly(f"{name} is odd")', "error", "{name} is odd"),
        ('raise machine.refusal("it is odd", node)', "error", "it is odd"),
        ('warn_once(f"fuseopt: {why}.", "about")', "warning", "fuseopt: {why}."),
        ('log.warning("%s is odd", x)', "warning", "%s is odd"),
        ('Report(fallback="runs in eager here")', "reason", "runs in eager here"),
        ('why = "it is odd" if x else ""', "reason", "it is odd"),
        ('def f():\n    return "it " "is odd"', "reason", "it is odd"),
        ('raise ValueError("it is " + odd(x))', "error", "it is"),
    ],
)
def test_a_message_is_found(code: str, kind: str, text: str) -> None:
    assert (kind, text) in [*messages_of(code, error_classes())]


@pytest.mark.parametrize(
    "code",
    ['"""It is a docstring."""', 'x = "some other text"', 'f("some other text")'],
)
def test_other_texts_are_no_messages(code: str) -> None:
    assert [*messages_of(code, error_classes())] == []
