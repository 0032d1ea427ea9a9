"""Tensors of different layouts in one lane: the bits are eager's in every block.

A C++ kernel goes over such lanes in blocks of elements, gathers what is apart and
scatters what it wrote; short rows and columns are folded several at a time.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from bench.optimizers import LAMB, Adafactor
from fuseopt.backend import fuseopt as backend
from fuseopt.codegen.cpp.headers import header
from tests.steps import same_bits

Step = Callable[..., tuple[Tensor, ...]]


def rand(*shape: int, seed: int = 5) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made + made.sign() * 0.1  # nothing near zero, to divide by


def body(text: str, name: str) -> str:
    """The lines of a function of generated text, from its name to a line `}`."""
    text = re.sub(r" *//.*", "", text)
    found = re.search(rf"^( *)[^\n;]*\b{name}\([^;]*?\{{\n.*?^\1\}}", text, re.M | re.S)
    assert found, name
    return found[0]


def test_from_block_to_block_nothing_is_divided() -> None:
    """A division is 20 cycles for each of three elements in rows of a convolution."""
    for name in (
        "taken",
        "take",
        "advance",
        "move",
        "place",
        "gather",
        "scatter",
        "shuffle",
    ):
        assert not re.search(r"[^/]/[^/]|%", body(header("walk"), name)), name
    assert "%" in body(header("walk"), "seek")


def check(step: Step, make: Callable[[], list[Tensor]]) -> None:
    """One compiled step, run by one to three threads."""
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, options={"fallback": "error"})
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            mine, theirs = make(), make()
            got, want = [*compiled(*mine), *mine], [*step(*theirs), *theirs]
            wrong = [
                i
                for i, (g, w) in enumerate(zip(got, want, strict=True))
                if not same_bits(g, w)
            ]
            assert (threads, wrong) == (threads, [])
    finally:
        torch.set_num_threads(before)
    for report in fuseopt.reports():  # one for each number of threads
        assert report.externs == [], str(report)


def mixed(p: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Element passes that read each layout, write two, and call the vector library."""
    p.mul_(0.5)
    for other in others:
        p.add_(p * other.expand_as(p))
    made = p / (p * p + 1).sqrt()
    others[-1].add_(made) if others[-1].shape == p.shape else None
    return (made,)


def layouts(shape: tuple[int, ...]) -> list[list[Tensor]]:
    """Lanes of one shape whose tensors differ in every way there is."""
    plain = rand(*shape)
    if not shape:
        return [[plain, rand()]]
    doubled = tuple(2 * n for n in shape)
    order = tuple(reversed(range(len(shape))))
    turned = rand(*reversed(shape), seed=6).permute(order)
    stepped = rand(*doubled, seed=7)[tuple(slice(None, None, 2) for _ in shape)]
    offset = rand(*(n + 1 for n in shape), seed=8)[tuple(slice(1, None) for _ in shape)]
    kept = [
        rand(*(n if k in some else 1 for k, n in enumerate(shape)), seed=9)
        for size in range(len(shape))
        for some in itertools.combinations(range(len(shape)), size)
    ]
    return [
        [plain, turned],
        [turned, plain],
        [plain, *kept, rand(*shape, seed=4)],
        [turned, *kept],
        [plain, stepped, offset],
        [stepped, turned, plain],
        [offset, rand(1, seed=3), turned],
    ]


#: rows of a convolution, of a dozen; more than one chunk, and none whole; more than a
#: block; a dimension of one element; a number
SHAPES = [
    (7, 5, 3, 3),
    (61, 31, 3, 3),
    (4, 6, 1, 12),
    (3, 200),
    (200, 3),
    (150, 130),
    (2, 3, 5, 2, 3),
    (1,),
    (),
]


@pytest.mark.family(9)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_element_passes(shape: tuple[int, ...]) -> None:
    counts = [len(lane) for lane in layouts(shape)]

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        made: list[Tensor] = []
        begin = 0
        for count in counts:
            made += mixed(*tensors[begin : begin + count])
            begin += count
        return tuple(made)

    def make() -> list[Tensor]:
        tensors = [t for lane in layouts(shape) for t in lane]
        tensors[0].view(-1)[-1] = float("nan")
        return tensors

    check(step, make)


def folded(dims: Sequence[int]) -> Step:
    def step(count: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, ...]:
        count.add_(1)
        made = p * q  # an operand of another layout beside the one that is folded
        own = dims if len(dims) < p.dim() else None
        kinds = (
            lambda x: x.sum(own, keepdim=True),
            lambda x: x.norm(2, own, keepdim=True),
            lambda x: x.norm(1, own, keepdim=True),
            lambda x: x.amax(dims),
            lambda x: (x * x + 1).mean(own, keepdim=True).sqrt(),
        )
        results = tuple(kind(x) for x in (p, made) for kind in kinds)
        return (*results, p / results[4] - results[0])

    return step


@pytest.mark.family(20)
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((61, 31, 3, 3), (3,)),
        ((61, 31, 3, 3), (2,)),
        ((61, 31, 3, 3), (1,)),
        ((61, 31, 3, 3), (2, 3)),
        ((61, 31, 3, 3), (1, 2, 3)),
        ((61, 31, 3, 3), (0, 2)),
        ((61, 31, 3, 3), (0, 1, 2, 3)),
        ((40, 3, 5), (1,)),  # columns that eager folds by four, and one left over
        ((30, 17, 5), (1,)),
        ((9, 70, 1), (1,)),
        ((50, 7, 11), (0, 1)),
        ((6, 11, 37), (1,)),
        ((5, 20, 70), (1,)),  # two groups of 32 and a rest, in rows longer than a block
        ((3, 700, 2), (1,)),
        ((300, 300), (0,)),
        ((129, 65), (1,)),
        ((130, 2), (1,)),  # so few that the compiler is told how many
        ((90, 4), (1,)),
        ((40, 7, 7), (2,)),
        ((30, 5, 5), (1,)),
        ((70, 60, 1, 1), (3,)),  # nothing meets, in more than a block of results
        ((3, 1, 700), (1,)),
    ],
    ids=str,
)
def test_folds(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    one = folded(dims)

    def step(count: Tensor, p: Tensor, turned: Tensor, row: Tensor) -> Any:
        return (*one(count, p, turned), *one(count, p, row))

    def make() -> list[Tensor]:
        order = tuple(reversed(range(len(shape))))
        turned = rand(*reversed(shape), seed=6).permute(order)
        p = rand(*shape)
        p.view(-1)[7] = float("nan")
        return [torch.zeros(()), p, turned, rand(shape[-1])]

    check(step, make)


@pytest.mark.slow
def test_short_rows_keep_the_signs_of_zero() -> None:
    """A fold of a few numbers at once begins where the fold of many does."""

    def make() -> list[Tensor]:
        p = -torch.zeros(40, 3, 3)
        p[::3] = 1e-40
        p[::4, 1] = -1e-40
        return [torch.zeros(()), p, p.clone().mT.contiguous().mT]

    for dims in ((1,), (2,), (1, 2)):
        check(folded(dims), make)


@pytest.mark.slow
def test_nothing_behind_a_tensor_is_read() -> None:
    """A vector of neighbours from which elements are taken ends within the tensor."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(first + page), page, 0) == 0
    for shape in ((42, 3, 1), (42, 1, 3), (42, 1, 1), (14, 3, 1), (61, 1, 3)):
        values = rand(*shape, seed=8)
        offset = page - 4 * values.numel()
        held = (ctypes.c_float * values.numel()).from_address(first + offset)
        edge = torch.frombuffer(held, dtype=torch.float32).view(shape)
        edge.copy_(values)

        def make(edge: Tensor = edge) -> list[Tensor]:
            return [rand(len(edge), 3, 3), edge]

        check(lambda p, q: mixed(p, q), make)


def test_roots_of_results_are_taken_many_at_once() -> None:
    """A call of the library for each of 131,072 results was 3 ms."""

    def step(p: Tensor) -> None:
        p.div_(p.square().mean(-1, keepdim=True).sqrt())

    torch._dynamo.reset()
    torch.compile(step, backend=backend)(rand(60, 3))
    (report,) = fuseopt.reports()
    assert re.search(r"library_sqrt_f32\(t.library, count,", report.kernels[0].source)
    assert "library_sqrt_f32(t.library, 1," not in report.kernels[0].source


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        pytest.param(Adafactor, torch.float32, marks=pytest.mark.slow),
        (LAMB, torch.bfloat16),
    ],
    ids=["Adafactor", "LAMB"],
)
def test_optimizers_on_convolutions(
    make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    """Parameters in channels_last, linear ones transposed, gradients in row order."""
    shapes = [
        (16, 8, 3, 3),
        (40, 30, 1, 1),
        (7, 3, 5, 5),
        (33, 20),
        (20,),
        (1, 9),
        (1,),
    ]

    def params() -> list[Tensor]:
        made = [rand(*s, seed=k).to(dtype) for k, s in enumerate(shapes)]
        made[0] = made[0].contiguous(memory_format=torch.channels_last)
        made[2] = made[2].contiguous(memory_format=torch.channels_last)
        made[3] = made[3].t().contiguous().t()
        return made

    mine, theirs = params(), params()
    torch._dynamo.reset()
    one, other = make(mine), make(theirs)
    compiled = torch.compile(one.step, backend=backend, options={"fallback": "error"})
    for turn in range(3):
        for k, (p, q) in enumerate(zip(mine, theirs, strict=True)):
            p.grad = rand(*p.shape, seed=90 + 10 * turn + k).to(dtype)
            q.grad = p.grad.clone()
        other.step()
        compiled()
        for p, q in zip(mine, theirs, strict=True):
            assert same_bits(p, q)
