"""Lanes of few elements share a program on a GPU: how many programs that saves, and
how many threads have nothing to do, over the shapes of real models.
"""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseopt.codegen.triton.chunks import COLUMNS, ROWS, SMALL
from fuseopt.codegen.triton.kernel import TritonTarget
from fuseopt.ir.graph import Instr, Kernel, Slot, Variant
from fuseopt.runtime.cpp.table import TensorLayout
from fuseopt.runtime.triton.table import TritonTable, triton_factory
from tests import ROOT

pytest.importorskip("triton")


def shapes_of(model: str) -> list[tuple[int, ...]]:
    found: Any = json.loads((ROOT / "bench/data/model_shapes.json").read_text())
    found = found.get("models", found) if isinstance(found, dict) else found
    if isinstance(found, list):
        found = {m["name"]: m for m in found}
    return [tuple(s) for s, n in found[model]["shapes"] for _ in range(n)]


def doubled(shapes: list[tuple[int, ...]]) -> Kernel:
    """p += p; step += step: a number and elements in each lane."""
    n = len(shapes)
    variant = Variant(
        (
            Instr("load", (), "f32", 0),
            Instr("add", (0, 0)),
            Instr("load", (), "f32", 1),
            Instr("add", (2, 2)),
        ),
        (0, 1),
        (2, 3),
        ((1, 0), (3, 1)),
        (Slot("f32", "lane", True, True), Slot("f32", "element", True, True)),
        (tuple(range(n)), tuple(range(n, 2 * n))),
        (),
        tuple(shapes),
    )
    return Kernel("doubled", (variant,))


def table_of(
    shapes: list[tuple[int, ...]], folder: Path, tensors: list[torch.Tensor] | None
) -> TritonTable:
    """The table for such lanes; without tensors it can be looked at, not launched."""
    kernel = doubled(shapes)
    layouts = {}
    for k, shape in enumerate([()] * len(shapes) + list(shapes)):
        stride = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        layouts[k] = TensorLayout(tuple(shape), tuple(stride))
    addresses = [t.data_ptr() for t in tensors] if tensors else [0] * len(layouts)
    make = triton_factory(
        TritonTarget().render(kernel), str(folder), "cpu", interpret=True
    )
    table = make(kernel, array("Q", addresses), {k: k for k in layouts}, layouts)
    assert isinstance(table, TritonTable)
    return table


def idle(table: TritonTable, elements: int) -> int:
    """Places of threads that have no element."""
    chunks = table.constants[0][1:]
    packed = chunks[:, 0] < 0
    turns = (chunks[packed, 3] + COLUMNS - 1) // COLUMNS
    places = int(turns.sum()) * ROWS * COLUMNS
    block = table.module.sizes["BLOCK"]
    alone = chunks[~packed].long()
    left = table.lanes[alone[:, 1] + 1] - alone[:, 2] * table.span * block
    turns = (left.clamp(1, table.span * block) + block - 1) // block
    return places + int(turns.sum()) * block - elements


def programs_alone(shapes: list[tuple[int, ...]], block: int) -> int:
    return sum(max(1, -(-math.prod(s) // block)) for s in shapes)


def test_a_thousand_biases_are_a_few_programs(tmp_path: Path) -> None:
    table = table_of([(8,)] * 1000, tmp_path, None)
    assert table.programs == 1000 // ROWS
    assert idle(table, 8000) == 1000 * (COLUMNS - 8)


#: Programs, and with one for each lane; threads without an element in percent, and so.
PROFILES = {
    "efficientnet_b0": (2681, 2723, 3.66, 5.45),
    "gpt2": (3892, 3892, 0.10, 0.10),
    "tf_efficientnetv2_xl": (7051, 7153, 0.36, 0.47),
}


@pytest.mark.parametrize("model", PROFILES)
def test_programs_over_real_models(model: str, tmp_path: Path) -> None:
    shapes = shapes_of(model)
    table = table_of(shapes, tmp_path, None)
    elements = sum(map(math.prod, shapes))
    alone = programs_alone(shapes, table.module.sizes["BLOCK"] * table.span)
    small = sum(math.prod(s) <= SMALL for s in shapes)
    assert table.programs == alone - small + -(-small // ROWS)
    places = programs_alone(shapes, table.module.sizes["BLOCK"])
    places *= table.module.sizes["BLOCK"]
    shares = [100 * x / elements for x in (idle(table, elements), places - elements)]
    assert (table.programs, alone, *(round(x, 2) for x in shares)) == PROFILES[model]


def test_lanes_that_share_a_program_give_the_bits_of_others(tmp_path: Path) -> None:
    """Sizes that fill no row, a program that is not full, odd addresses, no element."""
    torch.manual_seed(0)
    shapes = [(n,) for n in (1, 128, 33, 0, 129, 32, 31, 7, 5000, 64, 2, 3, 100)]
    steps = [torch.tensor(float(k + 1)) for k in range(len(shapes))]
    params = [torch.randn(s[0] + 1)[1:] for s in shapes]
    expected = [t + t for t in (*steps, *params)]
    table = table_of(shapes, tmp_path, [*steps, *params])
    chunks = table.constants[0][1:]
    assert int((chunks[:, 0] < 0).sum()) == 2
    table.fill_rows(())
    table.launch()
    for got, want in zip((*steps, *params), expected, strict=True):
        assert torch.equal(got, want)


def test_one_small_lane_is_a_chunk_like_others(tmp_path: Path) -> None:
    table = table_of([(8,), (5000,)], tmp_path, None)
    assert (table.constants[0][1:, 0] >= 0).all()


def test_tables_hold_more_than_2_to_the_31_elements(tmp_path: Path) -> None:
    """Columns of 32 bits count chunks; places of elements have 64 bits."""
    shapes = [(2**32 + 1,), (2**31,)]
    table = table_of(shapes, tmp_path, None)
    block = table.module.sizes["BLOCK"]
    chunks = table.constants[0]
    many = block * table.span
    assert table.programs == 2**32 // many + 1 + 2**31 // many
    assert int(chunks[1:, 2].max()) == 2**32 // many
    assert int(chunks.min()) >= 0
    numel = table.lanes.view(2, -1)[:, 1]
    assert sorted(numel.tolist()) == [2**31, 2**32 + 1]
    assert torch.iinfo(chunks.dtype).max * block > 2**41
