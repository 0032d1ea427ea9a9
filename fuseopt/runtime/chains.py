"""Chains of products of small matrices: one call of C for all products of all rows.

Generated code makes products with the sums' order of BLAS (cpp/chains.h), where a probe
finds eager's bits. Batches that follow each other in this way are a chain: C makes all
products of one row, then those of the next. What only the chain reads never leaves the
cache.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..codegen import Source
from ..codegen.cpp.headers import header
from ..codegen.cpp.structs import enumerators, fields
from ..ir.products import IN_PLACE, SCALED, Layout, Trial
from .cpp.toolchain import processor
from .tables.host_numbers import CPU
from .tables.words import HelperCall

_KINDS = ("", "pair_", "half_")
_FILES = (Path(__file__).parent / "cpp" / f"{x}chains.h" for x in _KINDS)
TEXT = "\n".join((header("modes"), *(x.read_text("utf-8") for x in _FILES)))
SOURCE = Source("cpp", TEXT, "fuseopt_chain", ())
#: The ops of a chain, and its dtypes.
OPS, DTYPES = ("mm", "addmm", "bmm", SCALED, IN_PLACE), ("f32", "f64")
#: Products of bfloat16 that ATen makes without oneDNN have at most so many
#: multiplications. Larger ones are faster in a batch.
HALF, MOST_HALF = "bf16", 16**3
#: The ops whose scales and sum are those of BLAS.
ADDED = ("addmm", IN_PLACE)
#: Rows of a trial.
ROWS = 2
#: Most terms of one sum in MKL, by processor.
MOST_TERMS = (256, 192, 384, 320, 512, 128)
#: Ends the name of an order in which BLAS multiplies the right matrix of `addmm`.
TIMES_RIGHT = " right"
#: Ends the name of an order in which BLAS adds the first sum to zero.
ZEROED = " zeroed"
#: The names of all orders.
ORDER = rf"[1-9][0-9]{{0,8}}({TIMES_RIGHT})?({ZEROED})?|pairs"
#: The order of oneDNN's sums of bfloat16: pairs of terms in turn.
IN_PAIRS = "pairs"
#: Bytes of two vectors, which a row of a panel has.
_PANEL = 2 * 64
#: What the rooms of threads begin at, and how far they are apart.
_ALIGNED, _APART = 64, 4096
#: In place of the bytes from row to row: what lies in the room of a thread, and rows
#: whose addresses are in the pool.
_IN_ROOM, _IN_POOL = enumerators(TEXT, "IN_ROOM", "IN_POOL")
#: Kinds of products, and parts of a kind of bfloat16; see cpp/chains.h.
_SCALED, _ADDED = enumerators(TEXT, "SCALED", "ADDED")
_RIGHT, _ZEROED = enumerators(TEXT, "TIMES_RIGHT", "ZEROED")
_TREE, _COUNT, _PAIRS = enumerators(TEXT, "TREE", "COUNT", "IN_PAIRS")


class ProductChain(ctypes.Structure):
    """Products that C makes for each row in turn."""

    _fields_ = fields(TEXT, "ProductChain")
    #: keeps `memory` alive
    rooms: object = None


class Chains(NamedTuple):
    """The library that makes chains. `key` names it, with its compiler and flags.

    `pairs`: whether it has the order IN_PAIRS.
    """

    library: ctypes.CDLL
    key: str
    pairs: bool = False


def multiplies_pairs() -> bool:
    """Has this processor the instructions of the order IN_PAIRS, and not AMX?"""
    features = processor().split()
    return "avx512_bf16" in features and "amx_bf16" not in features


def of_two_rows(trial: Trial) -> Trial:
    """Return a trial of two rows that decides for any number of rows.

    A chain computes each row by itself, wherever it lies.
    """
    stacked: list[Layout] = []
    for shape, stride, offset in trial.stacked:
        last = sum((n - 1) * s for n, s in zip(shape[1:], stride[1:], strict=True))
        count = shape[0] // trial.rows * ROWS
        step = last + 1 if stride[0] else 0
        stacked.append(((count, *shape[1:]), (step, *stride[1:]), offset))
    return trial._replace(rows=ROWS, stacked=tuple(stacked))


def chains_of(library: ctypes.CDLL, key: str) -> Chains | None:
    """Return chains; None if this processor lacks the instructions of the library."""
    nothing = ProductChain()
    call = HelperCall(nothing, library.fuseopt_chain, {}, (), ctypes.c_int64)
    return Chains(library, key, bool(library.fuseopt_chain_pairs())) if call() else None


class Place(NamedTuple):
    """Place of a matrix: its address in the first row, or its offset in the room.

    `step` is the bytes from row to row, `stride` has its strides in elements.
    `positions` are those of rows whose addresses are in the pool; the chain sets `at`.
    """

    at: int
    step: int
    stride: tuple[int, int]
    positions: tuple[int, ...] = ()


class Step(NamedTuple):
    """One product of a chain, of m x k and k x n. `kind`, `terms`: see cpp/chains.h."""

    size: tuple[int, int, int]
    out: Place
    add: Place | None
    left: Place
    right: Place
    beta: float
    alpha: float
    kind: int
    terms: int


def may_chain(trial: Trial, chains: Chains) -> bool:
    """May products of this kind be in a chain?"""
    (result,) = trial.results if len(trial.results) == 1 else (None,)
    return (
        result is not None
        and trial.op in OPS
        and (trial.dtype in DTYPES or _is_chained_half(trial, chains))
        and trial.device == CPU
        and 1 in result.stride[-2:]
    )


def orders(trial: Trial) -> list[str]:
    """Return the orders in which BLAS may add up a product, by name.

    A name begins with the terms of one sum, before the next one begins. MKL has a
    fixed number. Its kernels for AMD halve what has fewer than two sums.
    """
    k = trial.layouts[-1][0][-2]
    if trial.dtype == HALF:
        return [str(k)] if _is_small(trial) else [IN_PAIRS]
    found: list[int] = []
    for most in MOST_TERMS:
        found.append(min(k, most))
        if most < k < 2 * most:
            found.append(k // 2)
        found.append(-(-k // -(-k // most)))  # equal sums
    rights = ("", TIMES_RIGHT) if trial.op in ADDED else ("",)
    ends = [f"{right}{zeroed}" for right in rights for zeroed in ("", ZEROED)]
    return [f"{n}{end}" for n in dict.fromkeys(found) for end in ends]


def _is_chained_half(trial: Trial, chains: Chains) -> bool:
    """Is it a product of bfloat16 whose order a chain has?"""
    ops = trial.op in ("mm", *ADDED)
    return trial.dtype == HALF and ops and (chains.pairs or _is_small(trial))


def _is_small(trial: Trial) -> bool:
    """Do ATen's own loops make such a product, if it is one of bfloat16?"""
    m, n = trial.results[0].shape[-2:]
    return m * n * trial.layouts[-1][0][-2] <= MOST_HALF


def place_of(t: torch.Tensor) -> Place:
    """Return the place of a batch's matrices."""
    step, *stride = t.stride()
    return Place(t.data_ptr(), step * t.itemsize, (stride[0], stride[1]))


def in_room(at: int, stride: tuple[int, int]) -> Place:
    """Return the place of a matrix that one thread needs for one row."""
    return Place(at, _IN_ROOM, stride)


def in_pool(positions: Sequence[int], stride: tuple[int, int]) -> Place:
    """Return the place of matrices whose addresses have these positions."""
    return Place(0, _IN_POOL, stride, tuple(positions))


def step_of(
    size: tuple[int, int, int],
    operands: Sequence[Place],
    out: Place,
    scales: Sequence[float],
    op: str = SCALED,
    itemsize: int = 4,
    order: str = "",
) -> Step:
    """Return a product of these operands, in the order of the call's arguments.

    `order`: one of `orders`; "" for one sum of all terms.
    """
    *add, left, right = operands
    beta, alpha = scales or (0.0, 1.0)
    first = add[0] if add else None
    terms, _, _ = order.partition(" ")
    kind, each = _ADDED if op in ADDED else _SCALED, size[2]
    if order == IN_PAIRS:
        kind += _PAIRS
    elif itemsize == 2:
        kind += _sums(left, right)
    else:
        kind = _RIGHT if TIMES_RIGHT in order else kind
        kind += _ZEROED if ZEROED in order else 0
        each = min(int(terms or each), each)
    return Step(size, out, first, left, right, beta, alpha, kind, each)


def _sums(left: Place, right: Place) -> int:
    """Return the sums that ATen's loops for bfloat16 make, as a kind has them.

    Four in turn; one if the left matrix is transposed; 8, added as a tree, if the
    right one is.
    """
    turned = [x.stride[0] == 1 != x.stride[1] for x in (left, right)]
    if turned == [True, False]:
        return _COUNT
    if turned == [False, True]:
        return 8 * _COUNT + _TREE
    return 4 * _COUNT


def chain_call(
    chains: Chains,
    rows: int,
    itemsize: int,
    steps: Sequence[Step],
    local: int,
    pool: array[int] | None = None,
) -> Callable[[int], HelperCall]:
    """Return a function: a number of threads -> a call of C with them. `local`: the
    bytes of the room that each thread needs for what the chain alone reads. `pool` has
    the addresses of rows by position.
    """
    words, scales, positions = array("q"), array("d"), array("q")
    copied = 0
    for x in steps:
        words.extend((*x.size, x.kind, x.terms))
        for place in (x.out, x.add, x.left, x.right):
            if place is not None and place.positions:
                first = len(positions)
                positions.extend(place.positions)
                place = place._replace(at=first)
            words.extend((0, 0, 0, 0) if place is None else _words(place))
        scales.extend((x.beta, x.alpha))
        m, n, k = x.size
        # a panel, a narrow result with what it adds, and a copied operand
        panels = (x.terms + 2 * max(m, n)) * _PANEL
        operand = (max(m, n) + 16) * (k + 1) + 16
        copied = max(copied, panels + operand * max(itemsize, 4))
        if itemsize == 2:
            width = -(-n // 16) * 16
            copied = max(copied, 4 * (m * k + 16 + (m + k) * width))
    struct = ProductChain(rows, len(steps), itemsize)
    struct.local = local
    struct.room = -(-(local + copied) // _APART) * _APART
    struct.rooms = memory = _Rooms()
    function = chains.library.fuseopt_chain
    arrays: dict[str, array[Any]] = {
        "words": words,
        "scales": scales,
        "positions": positions,
        **({} if pool is None else {"pool": pool}),
    }
    run = HelperCall(struct, function, arrays, (), ctypes.c_int64)

    def with_threads(threads: int) -> HelperCall:
        struct.threads = threads = min(threads, rows)
        struct.memory = memory.of(threads * struct.room)
        return run

    return with_threads


class _Rooms:
    """Memory of the threads of a chain, the same in each call if it is enough."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def of(self, size: int) -> int:
        """Return the address of at least so many bytes, aligned to _ALIGNED."""
        memory = self._memory
        if memory is None or memory.numel() < size + _ALIGNED:
            memory = self._memory = torch.empty(size + _ALIGNED, dtype=torch.uint8)
        return -(-memory.data_ptr() // _ALIGNED) * _ALIGNED


def _words(x: Place) -> tuple[int, int, int, int]:
    return (x.at, x.step, *x.stride)


def batched_in_chain(
    chains: Chains,
    operands: Sequence[torch.Tensor],
    out: torch.Tensor,
    scales: Sequence[float],
    op: str = SCALED,
    order: str = "",
) -> None:
    """Make one product of each row, as a chain of one; `order`: see `step_of`."""
    size = (out.shape[1], out.shape[2], operands[-1].shape[1])
    places = [*map(place_of, operands)]
    step = step_of(size, places, place_of(out), scales, op, out.itemsize, order)
    call = chain_call(chains, len(out), out.itemsize, [step], 0)
    call(torch.get_num_threads())()
