"""No result of a Triton kernel depends on the order in which its programs run."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fuseopt.codegen.target import Source
from fuseopt.codegen.triton.kernel import TritonTarget
from fuseopt.ir.graph import Instr, Kernel, Literal, Slot, Variant
from fuseopt.runtime.cpp.table import TensorLayout
from fuseopt.runtime.triton import table as triton_table
from fuseopt.runtime.triton.table import TritonTable, triton_factory
from tests.codegen.triton_orders import running

pytest.importorskip("triton")

ORDERS = ("backward", "late", 0, 1, 2)
#: Elements of a chunk, so small that a few lanes have many chunks.
BLOCK = 32
SIZES = (300, 7, 64, 33)


def counted() -> tuple[Kernel, list[torch.Tensor]]:
    """p += step; step += 1: each chunk of a lane reads the number that one stores."""
    n = len(SIZES)
    instrs = (
        Instr("load", (), "f32", 0),
        Instr("const", (), "f32", 1.0),
        Instr("add", (0, 1)),
        Instr("load", (), "f32", 1),
        Instr("add", (3, 2)),
    )
    variant = Variant(
        instrs,
        (0, 1, 2),
        (3, 4),
        ((2, 0), (4, 1)),
        (Slot("f32", "lane", True, True), Slot("f32", "element", True, True)),
        (tuple(range(n)), tuple(range(n, 2 * n))),
        (),
        tuple((size,) for size in SIZES),
    )
    torch.manual_seed(0)
    steps = [torch.tensor(float(k)) for k in range(n)]
    return Kernel("counted", (variant,)), [*steps, *(torch.randn(s) for s in SIZES)]


def totalled() -> tuple[Kernel, list[torch.Tensor]]:
    """The sums of lanes, side by side in a tensor; then the sum of those, halved."""
    n = len(SIZES)
    fold = (Instr("load", (), "f32", 0), Instr("sum", (0,), "f32", 0))
    sums = Variant(
        fold,
        (),
        (0,),
        ((1, 1),),
        (Slot("f32", "element", True, False), Slot("f32", "output", False, True)),
        (tuple(range(n)), tuple(range(n, 2 * n))),
        (),
        tuple((size,) for size in SIZES),
        output_code=(1,),
        reduction="full",
        reduced=((0,),) * n,
        operands=tuple(range(n)),
    )
    total = Variant(
        (*fold, Instr("scalar", (), "f32", 0), Instr("mul", (1, 2))),
        (2,),
        (0,),
        ((3, 1),),
        (Slot("f32", "element", True, False), Slot("f32", "output", False, True)),
        ((2 * n,), (2 * n + 1,)),
        ((Literal(0.5),),),
        ((n,),),
        output_code=(1, 3),
        reduction="full",
        reduced=((0,),),
        operands=(2 * n,),
    )
    torch.manual_seed(0)
    stack = torch.zeros(n)
    tensors = [torch.randn(s) for s in SIZES]
    tensors += [*stack.unbind(), stack, torch.zeros(())]
    return Kernel("totalled", (sums,), (total,)), tensors


def launched(
    made: tuple[Kernel, list[torch.Tensor]],
    folder: Path,
    how: str | int,
    edit: Callable[[str], str] = lambda text: text,
    launches: int = 2,
) -> list[torch.Tensor]:
    """What is in the tensors after some launches in the order `how`."""
    kernel, tensors = made
    source = TritonTarget(block=BLOCK).render(kernel)
    source = Source(source.target, edit(source.text), source.entry, source.layout)
    make = triton_factory(source, str(folder), "cpu", interpret=True)
    layouts = {
        k: TensorLayout(tuple(t.shape), t.stride()) for k, t in enumerate(tensors)
    }
    pool = array("Q", [t.data_ptr() for t in tensors])
    table = make(kernel, pool, {k: k for k in layouts}, layouts)
    assert isinstance(table, TritonTable)
    table.fill_rows(())
    with running(how):
        for _ in range(launches):
            table.launch()
    return [t.clone() for t in tensors]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.family(6)
@pytest.mark.parametrize("programs", [triton_table.PROGRAMS, 5, 1])
@pytest.mark.parametrize("make", [counted, totalled])
def test_every_order_gives_the_same_bits(
    make: Callable[[], tuple[Kernel, list[torch.Tensor]]],
    programs: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = launched(make(), tmp_path, "forward")
    # a program takes 1, 3, 15 of the 15 chunks
    monkeypatch.setattr(triton_table, "PROGRAMS", programs)
    for how in ORDERS:
        assert same(launched(make(), tmp_path, how), expected), how
    if make is totalled:
        total = torch.stack([t.sum() for t in expected[: len(SIZES)]]).sum() / 2
        torch.testing.assert_close(expected[-1], total)
    else:
        assert [float(t) for t in expected[: len(SIZES)]] == [2.0, 3.0, 4.0, 5.0]


def cut(*pairs: tuple[str, str]) -> Callable[[str], str]:
    """Exchange parts of a text that must be there."""

    def edit(text: str) -> str:
        for old, new in pairs:
            assert old in text, old
            text = text.replace(old, new)
        return text

    return edit


#: What a kernel with a race looks like, and which results show it.
BROKEN = {
    "the first chunk stores the counter": (
        counted,
        cut(("last = taken == programs - 1", "last = ordinal == 0")),
    ),
    "the last chunk stores the counter": (
        counted,
        cut(("last = taken == programs - 1", "last = ordinal == programs - 1")),
    ),
    "the last chunk of the table finishes its lane": (
        totalled,
        cut(("last = taken == programs - 1", "last = ordinal == programs - 1")),
    ),
    "the last lane of the table finishes all": (
        totalled,
        cut(
            (
                "last = taken == tl.load(chunks + 2) - 1",
                "last = (ordinal == 0) & "
                "(lane.to(tl.int64) == lanes.to(tl.int64) + 144)",
            )
        ),
    ),
    "a lane's ticket releases nothing": (
        totalled,
        cut(
            (
                'tl.atomic_add(ticket, 1, sem="acq_rel"',
                'tl.atomic_add(ticket, 1, sem="relaxed"',
            )
        ),
    ),
    "the ticket of all releases nothing": (
        totalled,
        cut(
            (
                'tl.atomic_add(tickets, 1, sem="acq_rel"',
                'tl.atomic_add(tickets, 1, sem="relaxed"',
            )
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_race_is_seen(name: str, tmp_path: Path) -> None:
    make, edit = BROKEN[name]
    # a second launch would find what the first has left
    expected = launched(make(), tmp_path, "forward", launches=1)
    seen = [launched(make(), tmp_path, x, edit, 1) for x in ("forward", *ORDERS)]
    assert not all(same(x, expected) for x in seen)
