"""Huge pages for memory that a call takes and gives back."""

from __future__ import annotations

import ctypes
import sys

import torch

#: Bytes of a huge page on x86-64, and on ARM with pages of 4 KiB.
HUGE = 2 << 20
#: MADV_HUGEPAGE of Linux.
ADVICE = 14


def use_huge_pages(t: torch.Tensor) -> None:
    """Let Linux back the whole huge pages of a new tensor of the CPU with such pages.

    Memory of a call is new to the process each time. The kernel clears a page when it
    is first touched, which costs more for 512 small ones than for a huge one. An error
    is ignored: the memory is usable then, too.
    """
    if not sys.platform.startswith("linux"):
        return
    begin = -(-t.data_ptr() // HUGE) * HUGE
    size = (t.data_ptr() + t.nbytes - begin) // HUGE * HUGE
    if size > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_int(ADVICE))
