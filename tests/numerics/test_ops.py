"""The table of ops: its page, and the bits of eager for every rule, in every dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt import compat
from fuseopt.capture.aten.dtypes import DTYPE_NAMES
from fuseopt.lowering.pointwise import RULES
from tests.op_cases import BOOLS, INTEGERS, OPS
from tests.steps import DTYPES, name_of, same_bits
from tests.tools import ops_page

#: Rules that OPS reaches under another name or on another processor, copies, and what
#: tests/storage compares.
UNNAMED = set(
    "maximum_of_ordered_zeros minimum_of_ordered_zeros "
    "add_parts sub_parts mul_rounded lerp_listed div_exact root fma copy "
    "fill lt le gt ge eq ne isnan isinf logical_and logical_or logical_xor "
    "logical_not bitcast nextafter fuseopt::index_like".split()
)


def test_the_page_is_what_the_code_says() -> None:
    """`python -m tests.tools.ops_page` makes it so."""
    text = ops_page.PAGE.read_text(encoding="utf-8")
    assert ops_page.filled(text) == text


def test_every_rule_is_compared() -> None:
    named = {name.split()[0] for name in (*OPS, *INTEGERS)}
    assert named | UNNAMED >= RULES.keys()


def runs_as_it_is(op: str) -> bool:
    """Has this torch's kernel of an op another form than its rule, on a CPU?"""
    name = op.split(".")[1]
    given = [(dtype, n) for dtype in DTYPES for n in (1, 2)]
    return not all(compat.is_as_ruled(name, *x) for x in given)


def compiled(ops: dict[str, Callable[..., Tensor]], *args: Tensor) -> dict[str, Tensor]:
    """The results of many ops, from one compiled function in one launch."""
    torch._dynamo.reset()
    outs = {name: torch.empty_like(op(*args)) for name, op in ops.items()}

    def every(outs: dict[str, Tensor], *args: Tensor) -> None:
        for name, op in ops.items():
            outs[name].copy_(op(*args))

    options = {"fallback": "error"}
    torch.compile(every, backend="fuseopt", options=options)(outs, *args)
    (report,) = fuseopt.reports()
    assert [x for x in report.externs if not runs_as_it_is(x[0])] == []
    assert report.launches <= 1 + len(report.externs)
    return outs


# ---------------------------------------------------------------- floats


def awkward(dtype: torch.dtype) -> Tensor:
    """Zeros, infinities, NaN, ties, denormals, the limits of a type."""
    info = torch.finfo(dtype)
    least = info.tiny * info.eps
    plain = [0.5, 1.0, 1.5, 2.5, 3.0, 0.1, 0.3, 0.7, 1e-3, 9.5, 40.0, 88.0, 123.75]
    limits = [0.0, math.inf, info.max, info.tiny, least]
    signed = [s * x for x in (*plain, *limits) for s in (1, -1)]
    return torch.tensor([*signed, math.nan], dtype=torch.float64).to(dtype)


def triples(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random numbers over more than a part of eager's loops, then awkward pairs.

    Their count is odd, so that vector loops leave some over.
    """
    g = torch.Generator().manual_seed(1)
    plain = [3 * torch.randn(32_000, generator=g).to(dtype) for _ in range(3)]
    pairs = torch.meshgrid(awkward(dtype), awkward(dtype), indexing="ij")
    x, y = (t.flatten() for t in pairs)
    x, y, z = (torch.cat(t) for t in zip(plain, (x, y, x.roll(7)), strict=True))
    return x, y, z


@pytest.fixture(scope="module")
def floats() -> dict[torch.dtype, tuple[tuple[Tensor, ...], dict[str, Tensor]]]:
    found = {}
    for dtype in DTYPES:
        args = triples(dtype)
        assert args[0].numel() % 32 not in (0, 1)
        found[dtype] = args, compiled(OPS, *args)
    return found


@pytest.mark.family(40)
@pytest.mark.parametrize("name", OPS)
def test_every_op_has_the_bits_of_eager(name: str, floats: Any) -> None:
    for dtype, (args, got) in floats.items():
        want = OPS[name](*args)
        if not same_bits(got[name], want):
            i = [same_bits(a, b) for a, b in zip(got[name], want, strict=True)]
            at = i.index(False)
            shown = [t[at].item() for t in (*args, got[name], want)]
            raise AssertionError(f"{name_of(dtype)}: {i.count(False)}, first {shown}")


@pytest.mark.family(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_awkward_numbers_that_vector_loops_leave_over(dtype: torch.dtype) -> None:
    """softshrink and fmod, whose loops have no vectors of AVX-512, differed."""
    args = tuple(t[32_403 : 32_403 + 63].clone() for t in triples(dtype))
    got = compiled(OPS, *args)
    for name, op in OPS.items():
        assert same_bits(got[name], op(*args)), name


@pytest.mark.parametrize("n", [1, 31, 63, 97])
def test_what_vector_loops_leave_over(n: int) -> None:
    """Loops over f32 and f64 end at other places: in one kernel, both are known."""
    names = ("pow by a number", "sinh", "atan2", "sigmoid", "log1p", "softshrink")
    ops = {name: OPS[name] for name in names}
    x, y = (t[:n].clone() for t in triples(torch.float32)[:2])

    def both(
        name: str,
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        op = ops[name]
        return lambda x, y, v, w: op(x, y, x).double() + op(v, w, v)

    mixed = {name: both(name) for name in ops}
    args = (x, y, x.double() * 1.1, y.double() * 1.1)
    got = compiled(mixed, *args)
    for name, op in mixed.items():
        assert same_bits(got[name], op(*args)), name


def test_nextafter() -> None:
    for dtype in (torch.float32, torch.float64):
        x, y, _ = triples(dtype)
        ops = {"nextafter": lambda x, y: x.nextafter(y)}
        assert same_bits(compiled(ops, x, y)["nextafter"], x.nextafter(y))


# ---------------------------------------------------------------- integers


def whole(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers of an integer type, with its limits, and small ones, zeros among them."""
    g = torch.Generator().manual_seed(1)
    if dtype == torch.bool:
        x, y = (torch.randint(0, 2, (77,), generator=g).bool() for _ in range(2))
        return x, y
    info = torch.iinfo(dtype)
    low = 0 if info.min == 0 else -20
    x = torch.randint(info.min, info.max, (77,), generator=g).to(dtype)
    x[:40] = torch.randint(low, 20, (40,), generator=g).to(dtype)
    x[40:42] = torch.tensor([info.min, info.max]).to(dtype)
    return x, torch.randint(low // 5, 11, (77,), generator=g).to(dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int64,
        torch.int32,
        pytest.param(torch.int16, marks=pytest.mark.slow),
        pytest.param(torch.int8, marks=pytest.mark.slow),
        torch.uint8,
        torch.bool,
    ],
    ids=name_of,
)
def test_integers_have_the_bits_of_eager(dtype: torch.dtype) -> None:
    x, y = whole(dtype)
    ops = BOOLS if dtype == torch.bool else INTEGERS
    if dtype == torch.uint8:
        ops = {name: op for name, op in ops.items() if "negative" not in name}
    got = compiled(ops, x, y)
    for name, op in ops.items():
        assert same_bits(got[name], op(x, y)), name


def test_division_of_integers_by_a_tensor_is_eagers_own() -> None:
    """It ends with an error where a divisor is zero."""

    def update(x: Tensor, y: Tensor) -> None:
        x.copy_(x // y)

    step = torch.compile(update, backend="fuseopt")
    x = torch.tensor([7, -7, 8])
    step(x, torch.tensor([2, 2, -3]))
    assert x.tolist() == [3, -4, -3]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        step(x, torch.tensor([2, 0, -3]))


def test_copies_between_all_types() -> None:
    floats = torch.tensor([0.0, -0.0, 1.5, 2.5, 99.99, 100.6, 0.1, 3.0, 1e-3, 77.0])
    sources = [
        floats.to(dtype).repeat(7)
        if dtype.is_floating_point
        else whole(dtype)[0].int().abs().to(dtype)
        for dtype in DTYPE_NAMES
    ]
    pairs = {
        f"{a}->{b}": (i, b) for i, a in enumerate(DTYPE_NAMES) for b in DTYPE_NAMES
    }
    ops = {name: (lambda *ts, i=i, b=b: ts[i].to(b)) for name, (i, b) in pairs.items()}
    got = compiled(ops, *sources)
    for name, op in ops.items():
        assert same_bits(got[name], op(*sources)), name


# ---------------------------------------------------------------- bits of memory


def round_by_bits(p: Tensor, g: Tensor, noise: Tensor) -> None:
    """A step rounded at random, as mixed-precision optimizers write it."""
    new = p.float() - 0.1 * g.float()
    bits = (new.view(torch.int32) + noise) & -65536
    p.copy_(bits.view(torch.float32))


def round_in_place(p: Tensor, g: Tensor, noise: Tensor) -> None:
    noise = noise.clone()
    noise.add_((p.float() - 0.1 * g.float()).view(torch.int32)).bitwise_and_(-65536)
    p.copy_(noise.view(torch.float32))


def next_number(p: Tensor, g: Tensor, noise: Tensor) -> None:
    whole = torch.int16 if p.element_size() == 2 else torch.int32
    p.copy_((p.view(whole) + 1).view(p.dtype))
    p.add_(g)


def through_a_view(p: Tensor, g: Tensor, noise: Tensor) -> None:
    """Writes through both views of one memory, and reads each after the other."""
    whole = torch.int16 if p.element_size() == 2 else torch.int32
    bits = p.view(whole)
    p.add_(g * (bits < 0))
    bits.bitwise_xor_(1)
    p.mul_(2)
    g.copy_((bits & 7).to(g.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize(
    ("body", "launches"),
    [(round_by_bits, 1), (round_in_place, 1), (next_number, 1), (through_a_view, None)],
)
def test_views_as_another_dtype(
    body: Callable[..., None], launches: int | None, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = ((5, 7), (33,), (), (129,))
    own = [
        (
            torch.randn(s, generator=g).to(dtype),
            torch.randn(s, generator=g).to(dtype),
            torch.randint(0, 1 << 16, s, generator=g, dtype=torch.int32),
        )
        for s in shapes
    ]
    others = [tuple(t.clone() for t in lane) for lane in own]

    def step(lanes: Any) -> None:
        for lane in lanes:
            body(*lane)

    compiled_step = torch.compile(
        step, backend="fuseopt", options={"fallback": "error"}
    )
    for _ in range(2):
        step(others)
        compiled_step(own)
    (report,) = fuseopt.reports()
    assert [x for x in report.externs if not runs_as_it_is(x[0])] == []
    assert report.launches == (launches or report.launches)
    for lane, other in zip(own, others, strict=True):
        for got, want in zip(lane, other, strict=True):
            assert same_bits(got, want)
