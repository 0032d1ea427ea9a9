"""The table of ops: its page, integers, bits, and what eager does at the limits."""

from __future__ import annotations

from . import ops_table


def test_the_page_is_what_the_code_says() -> None:
    """`python -m tests.ops_table` makes it so."""
    text = ops_table.PAGE.read_text(encoding="utf-8")
    assert ops_table.filled(text) == text
