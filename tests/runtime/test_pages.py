"""Huge pages: Linux shows them as a flag of the memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fuseopt.runtime.pages import HUGE, use_huge_pages

MAPS = Path("/proc/self/smaps")
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> set[str]:
    """Return the flags of the mapping that has an address."""
    found: set[str] = set()
    inside = False
    for line in MAPS.read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            inside = int(head[1], 16) <= address < int(head[2], 16)
        elif inside and line.startswith("VmFlags:"):
            found = {*line.split()[1:]}
    return found


@pytest.mark.skipif(not (MAPS.exists() and THP.exists()), reason="no huge pages")
def test_large_memory_is_advised() -> None:
    t = torch.empty(80 << 20, dtype=torch.uint8)
    middle = t.data_ptr() + t.nbytes // 2
    assert "hg" not in flags_at(middle)
    use_huge_pages(t)
    assert "hg" in flags_at(middle)
    t.fill_(7)
    assert int(t.sum(dtype=torch.int64)) == 7 * t.numel()


def test_memory_without_a_whole_page_is_left_alone() -> None:
    for size in (0, 1, HUGE - 1):
        use_huge_pages(torch.empty(size, dtype=torch.uint8))
