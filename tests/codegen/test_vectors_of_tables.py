"""A compiler makes vectors of the loops that look codes up and search them."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from fuseopt.codegen.cpp.tables import table
from fuseopt.ir.tables import TABLES
from fuseopt.runtime.cpp.toolchain import COMMON_FLAGS

LOOPS = """
void search(const float* __restrict__ x, uint8_t* __restrict__ codes, int64_t n,
            int32_t part, float scale) {{
  #pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) codes[j] = (uint8_t)search{0}(x[j] / scale, part);
}}
void look_up(const uint8_t* __restrict__ codes, float* __restrict__ x, int64_t n,
             int32_t part, float scale) {{
  #pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) x[j] = lookup{0}(codes[j], part) * scale;
}}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.skipif(shutil.which("g++") is None, reason="GCC's reports")
@pytest.mark.parametrize("number", range(len(TABLES)))
def test_loops_over_a_table_are_vectors(number: int, tmp_path: Path) -> None:
    """With a choice by `?` of the part that all elements share, GCC 12 makes none."""
    text = "\n".join(
        ["#include <math.h>", "#include <stdint.h>", *table(number)]
    ) + LOOPS.format(number)
    source = tmp_path / "loops.cpp"
    source.write_text(text)
    loops = [i for i, x in enumerate(text.splitlines(), 1) if "int64_t j = 0" in x]
    flags = ["-march=x86-64-v3" if x == "-march=native" else x for x in COMMON_FLAGS]
    command = ["g++", *flags, "-fopt-info-vec-optimized", source.name, "-o", "loops.so"]
    made = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    for line in loops:
        assert f"loops.cpp:{line}:" in made.stderr, made.stderr
