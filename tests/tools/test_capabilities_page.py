"""docs/capabilities.md is what its generator makes of the table."""

from __future__ import annotations

from fuseopt import compat
from tests.tools.capabilities_page import PAGE, page


def test_the_page_is_that_of_the_table() -> None:
    """To mend: `python -m tests.tools.capabilities_page`."""
    assert page() == PAGE.read_text(encoding="utf-8")


def test_every_capability_says_what_it_gives() -> None:
    table = compat.switches.table
    assert len(table) > 60
    assert set(table) >= {patch.name for patch in compat.HOOKS}
    for name, capability in table.items():
        assert name == capability.name
        assert capability.gives
        assert capability.without
