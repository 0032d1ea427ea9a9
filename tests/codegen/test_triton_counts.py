"""Instructions of an element on sm_90, counted in machine code: of AdamW, the look-ups,
lane code, checks of divisors and tickets of its programs included.

What a GPU can begin while the bytes of an element pass is about 90 for bfloat16 and
twice as many for float32: see bench/NOTES.md.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

from bench.models import model_shapes, profiles
from fuseopt.codegen.target import Source
from fuseopt.codegen.triton.chunks import SMALL
from fuseopt.codegen.triton.kernel import TritonTarget
from fuseopt.ir.graph import Kernel
from fuseopt.runtime.triton.build import compile_offline
from fuseopt.runtime.triton.table import span_of
from tests.codegen.sass import Counts, Machine, counted, resources
from tests.codegen.test_triton_code import CUDA, accesses, kernels_of, sizes
from tests.simulated.twins import SimTwins

pytest.importorskip("triton")

F32, BF16 = torch.float32, torch.bfloat16
#: Instructions of an element at most, all included.
BARS = {F32: 50, BF16: 52}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("kernels"))


@functools.cache
def counts_of(kernel: Kernel, folder: str, fast: bool = False) -> Counts:
    """Along the main path of a kernel."""
    source = TritonTarget(fast=fast, cuda=CUDA).render(kernel)
    made = compile_offline(source, "sm_90", folder)
    used = resources(made["cubin"], folder)
    assert used["STACK"] == used["LOCAL"] == 0
    block, warps = sizes(source, folder)
    loads, stores = accesses(kernel, block, 32 * warps)
    ticket = any(s.domain == "lane" and s.write for s in kernel.variants[0].slots)
    machine = Machine(made["cubin"], folder)
    return counted(machine, loads, stores, block // (32 * warps), ticket)


def of_model(counts: Counts, name: str) -> float:
    """Instructions of an element in a model's step. What is left of a lane is counted
    as a whole chunk; not counted are lanes that share a program.
    """
    numels = [torch.Size(shape).numel() for shape in model_shapes(name)]
    alone = [n for n in numels if n > SMALL]
    chunk = 128 * counts.elements
    span = span_of(sum(-(-n // chunk) for n in numels))
    ran = 0
    for n in alone:
        whole, rest = divmod(-(-n // chunk), span)
        ran += 128 * (whole * counts.of(span) + (counts.of(rest) if rest else 0))
    return ran / sum(alone)


def of_models(counts: Counts, least: float = 0) -> list[float]:
    """The same of all profiles with so many elements at least."""
    found = {
        n: of_model(counts, n) for n, x in profiles().items() if x["elements"] >= least
    }
    most = max(found, key=lambda name: found[name])
    print(
        f"{len(found)} models: {min(found.values()):.1f} to {found[most]:.1f} ({most})"
    )
    return [round(x, 1) for x in found.values()]


def each_of(dtype: torch.dtype, counts: Counts) -> dict[int, float]:
    """Instructions of an element by the chunks of a program."""
    each = {chunks: round(counts.each(chunks), 1) for chunks in (1, 2, 4, 8, 16)}
    print(f"AdamW {dtype}: {counts}; by chunks of a program {each}")
    return each


def rendered(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """All kernels that are rendered from now on."""
    found: list[Kernel] = []
    render = TritonTarget.render

    def seen(target: TritonTarget, kernel: Kernel) -> Source:
        found.append(kernel)
        return render(target, kernel)

    monkeypatch.setattr(TritonTarget, "render", seen)
    return found


def numbers_of_the_host(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel of AdamW as torch makes it: counters and corrections on the CPU."""
    found = rendered(monkeypatch)
    twins = SimTwins(lambda ps: torch.optim.AdamW(ps, foreach=True), dtype=dtype)
    for _ in range(2):
        twins.step()
    return found[-1]


@pytest.mark.family(2)
@pytest.mark.parametrize("dtype", BARS, ids=str)
def test_corrections_of_the_host(
    dtype: torch.dtype, folder: str, sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own choice, at any size: no program has a power or a ticket."""
    counts = counts_of(numbers_of_the_host(dtype, monkeypatch), folder)
    assert max(each_of(dtype, counts).values()) <= BARS[dtype]
    assert max(of_models(counts, 6e6)) <= BARS[dtype]
    # of smaller ones more chunks are not full, whose idle threads count as well
    assert max(of_models(counts)) <= BARS[dtype] + 2


@pytest.mark.parametrize("dtype", BARS, ids=str)
def test_capturable(dtype: torch.dtype, folder: str) -> None:
    """Counters on the device: each program has two powers, its lane's ticket."""
    (kernel,) = kernels_of("AdamW", dtype)
    counts = counts_of(kernel, folder)
    each = each_of(dtype, counts)
    assert each[4] <= BARS[dtype]
    assert max(of_models(counts, 2e7)) <= BARS[dtype]
    # a program of one chunk pays all of it; there are few bytes to move as well
    assert each[1] <= BARS[dtype] + 18


@pytest.mark.parametrize(("dtype", "most"), [(F32, 35), (BF16, 45)], ids=str)
def test_fast(dtype: torch.dtype, most: int, folder: str) -> None:
    (kernel,) = kernels_of("AdamW", dtype)
    assert counts_of(kernel, folder, True).each(16) <= most


@pytest.mark.parametrize("name", ["AdamW", "amsgrad", "AdEMAMix"])
def test_four_programs_in_bfloat16(name: str, folder: str) -> None:
    """A candidate of `make gpu`: with 128 registers nothing goes to the stack."""
    (kernel,) = kernels_of(name, BF16)
    source = TritonTarget(cuda=CUDA, registers=128).render(kernel)
    used = resources(compile_offline(source, "sm_90", folder)["cubin"], folder)
    assert used["REG"] <= 128
    assert used["STACK"] == used["LOCAL"] == 0


@pytest.mark.parametrize("dtype", BARS, ids=str)
def test_lanes_at_odd_addresses(dtype: torch.dtype, folder: str) -> None:
    """Eight numbers of each tensor are under way in a thread, four times as many as the
    general path has, in no more registers than the rest takes.
    """
    (kernel,) = kernels_of("AdamW", dtype)
    source = TritonTarget(cuda=CUDA).render(kernel)
    made = compile_offline(source, "sm_90", folder)
    width = torch.finfo(dtype).bits
    loads = re.compile(rf"^\s*(?:@%p\d+ )?ld\.global\.b{width} ", re.MULTILINE)
    slots = kernel.variants[0].slots
    read = sum(s.domain == "element" and s.read for s in slots)
    block, warps = sizes(source, folder)
    rest = 64 * warps // (32 * warps)
    under_way = block // 2 // (32 * warps)
    assert under_way == 4 * rest == 8
    assert len(loads.findall(made["ptx"])) >= read * (under_way + rest)
    # three programs of a multiprocessor, as without this path
    assert resources(made["cubin"], folder)["REG"] <= 168
