"""Folds and the cache: tiles of columns, memory that is read ahead, their order."""

from __future__ import annotations

import ctypes
import subprocess
from array import array
from pathlib import Path

import pytest
import torch

import fuseopt
from fuseopt.codegen.cpp.headers import header
from fuseopt.runtime.cpp.toolchain import COMMON_FLAGS, find_compiler

TEXT = """
extern "C" int64_t tiles(const int64_t* g, int64_t threads, int64_t most,
                         int64_t* widths) {
  const Rows rows(g, 0, threads, most);
  for (int64_t k = 0, c; k < rows.tiles(); ++k) rows.tile(k, &c, widths + k);
  return rows.tiles();
}
extern "C" int64_t of_squares() { return widest(sizeof(SquaresColumns<float>)); }
extern "C" int64_t of_sums() { return widest(sizeof(SumColumns<float>)); }
extern "C" int64_t bytes_of_sums() { return sizeof(SumColumns<float>); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("tiles")
    names = ("prelude", "walk", "folds", "pieces", "rows")
    (folder / "tiles.cpp").write_text("\n".join([*map(header, names), TEXT]))
    command = [find_compiler().path, *COMMON_FLAGS, "tiles.cpp", "-o", "tiles.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "tiles.so"))


def widths(
    library: ctypes.CDLL, columns: int, threads: int, most: int, group: int = 0
) -> list[int]:
    """The widths of the tiles of a matrix with 1,000 rows."""
    # columns, any layout, groups, no leader, one run, no batches, one reduced dimension
    geometry = array("q", [1, 1, group, -1, 1, 0, 1, 1000, columns])
    found = array("q", bytes(8 * columns))
    n, places = ctypes.c_int64, ctypes.c_void_p
    library.tiles.argtypes = [places, n, n, places]
    count = library.tiles(
        geometry.buffer_info()[0], threads, most, found.buffer_info()[0]
    )
    return found[:count].tolist()


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("columns", [1, 31, 32, 128, 577, 768, 4096, 5001])
@pytest.mark.parametrize("most", [128, 192, 576])
@pytest.mark.parametrize("group", [0, 32])
def test_tiles_have_all_columns_and_fit(
    columns: int, threads: int, most: int, group: int, library: ctypes.CDLL
) -> None:
    found = widths(library, columns, threads, most, group)
    assert sum(found) == columns
    assert max(found) <= most
    assert min(found) > 0


def test_wide_rows_have_few_tiles_of_one_width(library: ctypes.CDLL) -> None:
    assert library.of_squares() == 576
    assert widths(library, 768, 1, 576) == [384, 384]
    assert widths(library, 768, 2, 576) == [384, 384]
    assert widths(library, 768, 4, 576) == [192] * 4
    assert widths(library, 768, 1, 128) == [128] * 6


def test_larger_sums_have_narrower_tiles(library: ctypes.CDLL) -> None:
    most = library.of_sums()
    assert 128 <= most < 576
    assert most * library.bytes_of_sums() <= 32 * 16384


# ---------------------------------------------------------------- reading memory


def test_a_chain_of_squares_reads_ahead(tmp_path: Path) -> None:
    text = """
    void norm(SquaresRun<float, NATIVE>& run, const float* x, int64_t n) {
      run.load(x, n);
    }
    """
    names = ("prelude", "walk", "folds")
    (tmp_path / "norm.cpp").write_text("\n".join([*map(header, names), text]))
    command = [find_compiler().path, *COMMON_FLAGS, "-S", "norm.cpp", "-o", "norm.s"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    code = (tmp_path / "norm.s").read_text()
    assert code.count("prefetch") + code.count("prfm") >= 1


def test_whole_lanes_are_folded_before_rows() -> None:
    """Else a norm of the weights takes the cache from gradients that columns read."""
    (p,) = params = [torch.nn.Parameter(torch.ones(24, 40))]
    p.grad = torch.ones_like(p)
    step = fuseopt.compile(torch.optim.Adafactor(params)).step
    for _ in range(2):
        step()
    text = fuseopt.reports()[-1].kernels[0].source
    main = text.index('extern "C" void fuseopt_step')
    assert text.index("fold_lane<", main) < text.index("fold_items<", main)
