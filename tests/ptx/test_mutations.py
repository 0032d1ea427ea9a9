"""Kernels that are wrong on purpose: each is caught, by a fault or by its numbers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import Optimizer

from tests.papers import LAMB
from tests.simulated.twins import Clipped

from .kernels import Log
from .twins import PtxTwins

Make = Callable[[list[Any]], Optimizer]


def counted(params: list[Any]) -> Optimizer:
    """A step whose lanes have numbers on the device, with tickets."""
    return optim.AdamW(params, foreach=True, capturable=True)


def adamw(params: list[Any]) -> Optimizer:
    return optim.AdamW(params, foreach=True)


def momentum(params: list[Any]) -> Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new`: a pattern, in the kernel's text or (`ptx`) in that of PTX.

    `caught`: one of these at least must be found: kinds of faults, "bits" if numbers
    differ.
    """

    name: str
    make: Make
    old: str
    new: str | Callable[[re.Match[str]], str]
    caught: tuple[str, ...]
    ptx: bool = False
    dtype: torch.dtype = torch.float32
    count: int = 0

    def __call__(self, text: str) -> str:
        return re.sub(self.old, self.new, text, count=self.count, flags=re.M)


BITS, RACE, RANGE = "bits", "race", "out of range"
MISALIGNED, BARRIER = "misaligned", "a barrier that some threads leave out"
FRESH = "memory that nothing has written is read"

#: The type of a bfloat16 in memory, and where it is widened.
HALVES = r"pointer_type\(tl\.bfloat16\)|wide\((x\d+)\)"


def as_type(name: str, found: re.Match[str]) -> str:
    """A number of another type instead."""
    x = found[1]
    return f"{x}.to(tl.float32)" if x else f"pointer_type(tl.{name})"


MUTATIONS = (
    # tickets
    Mutation(
        "the first taker stores",
        counted,
        "taken == programs - 1",
        "taken == 0",
        (RACE,),
    ),
    Mutation(
        "all takers store", counted, "taken == programs - 1", "taken >= 0", (RACE,)
    ),
    Mutation(
        "one taker too few",
        counted,
        "taken == programs - 1",
        "taken == programs - 2",
        (RACE,),
    ),
    Mutation(
        "no taker is the last",
        counted,
        "taken == programs - 1",
        "taken == programs",
        (BITS,),
    ),
    Mutation("tickets stay taken", counted, r"tl\.store\(ticket, 0\)", "pass", (BITS,)),
    Mutation(
        "all lanes' ticket stays taken",
        Clipped,
        r"tl\.store\(tickets, 0\)",
        "pass",
        (BITS,),
    ),
    Mutation(
        "the end does not wait for all lanes",
        Clipped,
        r"last = taken == tl\.load\(chunks \+ 2\) - 1",
        "last = taken == 0",
        (RACE, FRESH),
    ),
    Mutation(
        "a ticket is not atomic",
        Clipped,
        r"taken = tl\.atomic_add\(ticket, 1.*",
        "taken = tl.load(ticket)\n    tl.store(ticket, taken + 1)",
        (RACE,),
    ),
    # order
    Mutation(
        "a ticket orders nothing",
        counted,
        r"atom\.global\.gpu\.acq_rel",
        "atom.global.gpu.relaxed",
        (RACE,),
        ptx=True,
    ),
    Mutation(
        "a ticket only releases",
        counted,
        r"atom\.global\.gpu\.acq_rel",
        "atom.global.gpu.release",
        (RACE,),
        ptx=True,
    ),
    Mutation(
        "a ticket only acquires",
        Clipped,
        r"atom\.global\.gpu\.acq_rel",
        "atom.global.gpu.acquire",
        (RACE,),
        ptx=True,
    ),
    Mutation(
        "a ticket of one program",
        Clipped,
        r"atom\.global\.gpu\.acq_rel",
        "atom.global.cta.acq_rel",
        (RACE,),
        ptx=True,
    ),
    Mutation("no barriers", Clipped, r"^\s*bar\.sync.*$", "", (RACE,), ptx=True),
    Mutation(
        "no barrier before a ticket",
        counted,
        r"tl\.debug_barrier\(\)\n    last = programs",
        "last = programs",
        (RACE,),
    ),
    Mutation(
        "a barrier of one thread",
        counted,
        r"^\s*bar\.sync",
        "setp.eq.s32 %p9999, %tid.x, 0;\n@%p9999 bar.sync",
        (BARRIER,),
        ptx=True,
        count=1,
    ),
    # masks
    Mutation(
        "one element too many",
        momentum,
        "mask = inside < count",
        "mask = inside <= count",
        (RANGE, RACE, BITS),
    ),
    Mutation(
        "no mask",
        momentum,
        "mask = inside < count",
        "mask = inside >= 0",
        (RANGE, RACE),
    ),
    Mutation(
        "one element too few",
        momentum,
        "mask = inside < count",
        "mask = inside < count - 1",
        (BITS,),
    ),
    Mutation(
        "a group too many",
        momentum,
        r"count // 16 \* 16",
        "(count + 15) // 16 * 16",
        (RANGE, RACE),
    ),
    Mutation(
        "a row without a lane",
        momentum,
        "there = each < count",
        "there = each <= count",
        (RANGE, RACE, BITS),
    ),
    Mutation(
        "longer than a lane",
        momentum,
        r"mask = inside < numel\[:, None\]",
        "mask = inside < longest",
        (RANGE, RACE, BITS),
    ),
    # places
    Mutation(
        "addresses need not be even",
        momentum,
        r"layout == -2",
        "layout <= -1",
        (MISALIGNED,),
    ),
    Mutation(
        "strides of another tensor",
        momentum,
        r"turn \* tl\.load\(shape \+ \d \* dims - d\)",
        "turn * tl.load(shape + 2 * dims - d)",
        (BITS, RANGE, RACE),
    ),
    Mutation(
        "chunks overlap",
        momentum,
        r"ordinal\.to\(tl\.int64\) \* \(span \* BLOCK\)",
        "ordinal.to(tl.int64) * (span * BLOCK - 16)",
        (RACE, BITS),
    ),
    Mutation(
        "the first record",
        momentum,
        r"lane = lanes \+ tl\.load\(chunk \+ 1\)",
        "lane = lanes",
        (RACE,),
    ),
    Mutation(
        "parts of another lane",
        LAMB,
        r"own = parts \+ ordinal \* (\d)",
        r"own = parts + ordinal * \1 + 1",
        (RACE, BITS, FRESH),
    ),
    # types
    Mutation(
        "halves as floats",
        adamw,
        HALVES,
        functools.partial(as_type, "float32"),
        (RANGE, RACE),
        dtype=torch.bfloat16,
    ),
    Mutation(
        "halves as other halves",
        adamw,
        HALVES,
        functools.partial(as_type, "float16"),
        (BITS,),
        dtype=torch.bfloat16,
    ),
    Mutation(
        "a counter as an integer",
        counted,
        r"p0 = (.*)tl\.float32",
        r"p0 = \1tl.int32",
        (BITS,),
    ),
    Mutation(
        "a contracted product",
        momentum,
        r"mul\.rn\.f32 \t(%r\d+), (%r\d+), (%r\d+);",
        r"mul.rn.f32 \t\1, \2, \2;",
        (BITS,),
        ptx=True,
    ),
)
#: In `make test`: those that change PTX need no compiler beside the sound kernel's.
QUICK = ("a ticket orders nothing", "no barriers", "one element too many")
#: Gradients of these lie at odd addresses, or have strides.
COURSE = ("moved", "odd", "strided", "stay")
SHAPES = ((17, 5), (9,), (128,), (129,), (64, 34), (4100,))


def kinds_of(log: Log, make: Make, dtype: torch.dtype) -> set[str]:
    """What is found in a course of steps."""
    log.seed = 5
    twins = PtxTwins(make, dtype=dtype, shapes=SHAPES, whole=make is Clipped)
    bits = twins.run(COURSE)
    return {fault.kind for fault in log.faults} | ({BITS} if bits else set())


def named(mutation: Mutation) -> Any:
    marks = [] if mutation.name in QUICK else [pytest.mark.slow]
    return pytest.param(mutation, id=mutation.name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("mutation", [named(x) for x in MUTATIONS])
def test_mutations_are_caught(ptx: Log, mutation: Mutation) -> None:
    changed = []

    def change(text: str) -> str:
        made = mutation(text)
        changed.append(made != text)
        return made

    if mutation.ptx:
        ptx.change = change
    else:
        ptx.change_source = change
    kinds = kinds_of(ptx, mutation.make, mutation.dtype)
    assert any(changed)
    assert kinds & {*mutation.caught}


SOUND = sorted({(x.make, x.dtype) for x in MUTATIONS}, key=str)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "dtype"), SOUND)
def test_what_is_not_changed_is_sound(ptx: Log, make: Make, dtype: torch.dtype) -> None:
    """But that sums of LAMB are added in another order."""
    assert kinds_of(ptx, make, dtype) <= ({BITS} if make is LAMB else set())
