"""The machine for PTX: its numbers, and each kind of fault that it reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.simulated import compiler

from .encode import Unknown
from .machine import Machine, Region, Run
from .text import parsed

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

HEAD = """
.version 8.7
.target sm_90a
.visible .entry kernel(.param .u64 kernel_param_0, .param .u64 kernel_param_1)
.reqntid {threads}
{{
  .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
  ld.param.b64 %rd1, [kernel_param_0];
  ld.param.b64 %rd2, [kernel_param_1];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mad.lo.s32 %r3, %r2, {threads}, %r1;
  mad.wide.u32 %rd3, %r3, {size}, %rd1;
  mad.wide.u32 %rd4, %r3, {out}, %rd2;
  setp.eq.s32 %p1, %r1, 0;
  {body}
  ret;
}}
"""


def machine(body: str, threads: int = 32, size: int = 4, out: int = 4) -> Machine:
    """%r1, %r2: thread, program; %rd3, %rd4: the thread's place in both arguments."""
    return Machine(HEAD.format(body=body, threads=threads, size=size, out=out), 256)


def run(kernel: Machine, x: Any, y: Any, n: int = 1, **more: int) -> Run:
    """So many programs of a kernel over two tensors."""
    places = [Region(t.data_ptr(), t.numel() * t.element_size()) for t in (x, y)]
    return kernel.run(n, [p.base for p in places], places, **more)


def converted(x: torch.Tensor, to: torch.dtype, body: str) -> torch.Tensor:
    """What a kernel of one instruction makes of each number."""
    n = x.numel()
    assert n % 128 == 0
    y = torch.zeros(n, dtype=to)
    kernel = machine(body, 128, x.element_size(), y.element_size())
    assert not run(kernel, x, y, n // 128).faults
    return y


# -------------------------------------------------------------------- numbers

HALF = {torch.float16: "f16", torch.bfloat16: "bf16"}


@pytest.mark.parametrize("dtype", HALF, ids=HALF.get)
def test_all_halves_become_floats(dtype: torch.dtype) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    halves[halves.isnan()] = 0
    got = converted(
        halves,
        torch.float32,
        f"ld.global.b16 {{ %rs1 }}, [ %rd3 + 0 ]; cvt.f32.{HALF[dtype]} %r4, %rs1;"
        "st.global.b32 [ %rd4 + 0 ], { %r4 };",
    )
    assert got.view(torch.int32).equal(halves.float().view(torch.int32))


@pytest.mark.parametrize("dtype", HALF, ids=HALF.get)
def test_floats_become_the_nearest_halves(dtype: torch.dtype) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    halves = halves[halves.isfinite()]
    words = halves.view(torch.int32)
    # each number, the ones beside it, the middle to the next one, and beside that
    middle = (
        ((halves.double() + halves.roll(-1).double()) / 2).float().view(torch.int32)
    )
    near = torch.cat([words, words + 1, words - 1, middle, middle + 1, middle - 1])
    floats = near.view(torch.float32)
    floats = floats[~floats.isnan()]
    floats = floats[: len(floats) // 128 * 128].contiguous()
    got = converted(
        floats,
        dtype,
        f"ld.global.b32 {{ %r4 }}, [ %rd3 + 0 ]; cvt.rn.{HALF[dtype]}.f32 %rs1, %r4;"
        "st.global.b16 [ %rd4 + 0 ], { %rs1 };",
    )
    assert got.view(torch.int16).equal(floats.to(dtype).view(torch.int16))


@pytest.mark.parametrize("dtype", HALF, ids=HALF.get)
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_pairs_of_halves(dtype: torch.dtype, name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1024, generator=generator).to(dtype)
    x.view(torch.int16)[:512] = torch.randint(
        -(2**15), 2**15, (512,), generator=generator, dtype=torch.int16
    )
    x[x.isnan()] = 1
    y = converted(
        x.view(torch.int32),
        torch.int32,
        f"ld.global.b32 {{ %r4 }}, [ %rd3 + 0 ];"
        "mov.b32 {%rs1, %rs2}, %r4; mov.b32 %r5, {%rs2, %rs1};"
        f"{name}.rn.{HALF[dtype]}x2 %r6, %r4, %r5;"
        "st.global.b32 [ %rd4 + 0 ], { %r6 };",
    ).view(dtype)
    pairs = x.view(-1, 2)
    want = getattr(torch, name)(pairs, pairs.flip(1)).flatten()
    same = (y.view(torch.int16) == want.view(torch.int16)) | (y.isnan() & want.isnan())
    assert same.all()


@pytest.mark.parametrize("dtype", HALF, ids=HALF.get)
@pytest.mark.parametrize("name", ["abs", "neg"])
def test_signs_of_pairs_of_halves(dtype: torch.dtype, name: str) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16)
    y = converted(
        x.view(torch.int32),
        torch.int32,
        f"ld.global.b32 {{ %r4 }}, [ %rd3 + 0 ]; {name}.{HALF[dtype]}x2 %r5, %r4;"
        "st.global.b32 [ %rd4 + 0 ], { %r5 };",
    ).view(torch.int16)
    want = x & 0x7FFF if name == "abs" else x ^ -(2**15)
    assert y.equal(want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["add.rn", "sub.rn", "mul.rn", "div.rn", "fma.rn"])
def test_arithmetic(dtype: torch.dtype, name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(256, generator=generator, dtype=torch.float64).to(dtype)
    bits, r = (32, "%r") if dtype == torch.float32 else (64, "%rd")
    more = f", {r}5" if name.startswith("fma") else ""
    y = converted(
        x,
        dtype,
        f"ld.global.b{bits} {{ {r}5 }}, [ %rd3 + 0 ];"
        f"{name}.f{bits} {r}6, {r}5, {r}5{more};"
        f"{name}.f{bits} {r}7, {r}6, {r}5{more};"
        f"st.global.b{bits} [ %rd4 + 0 ], {{ {r}7 }};",
    )

    def once(a: torch.Tensor) -> torch.Tensor:
        if more:
            return torch.addcmul(x.double(), a.double(), x.double()).to(dtype)
        return getattr(torch, name.split(".")[0])(a, x)

    if more and dtype == torch.float64:
        # a product whose rounding the sum would show: (1 + e) ** 2 - 1
        assert not y.equal((x * x + x) * x + x)
        return
    assert y.equal(once(once(x)))


def test_integers_wrap_and_shifts_end() -> None:
    x = torch.tensor([2**31 - 1, -(2**31), -7, 40] * 32, dtype=torch.int32)
    y = torch.zeros(128, 4, dtype=torch.int32)
    kernel = machine(
        "ld.global.b32 { %r4 }, [ %rd3 + 0 ];"
        "add.s32 %r5, %r4, 1; shr.s32 %r6, %r4, 33; shl.b32 %r7, %r4, 33;"
        "rem.s32 %r8, %r4, 4;"
        "st.global.v4.b32 [ %rd4 + 0 ], { %r5, %r6, %r7, %r8 };",
        128,
        4,
        16,
    )
    assert not run(kernel, x, y).faults
    assert y[:4].tolist() == [
        [-(2**31), 0, 0, 3],
        [-(2**31) + 1, -1, 0, 0],
        [-6, -1, 0, -3],
        [41, 0, 0, 0],
    ]


def test_a_warp_exchanges_and_folds() -> None:
    x = torch.arange(32, dtype=torch.int32)
    kernel = machine(
        "ld.global.b32 { %r4 }, [ %rd3 + 0 ];"
        "shfl.sync.bfly.b32 %r5, %r4, 16, 31, -1;"
        "redux.sync.or.b32 %r6, %r4, -1; add.s32 %r7, %r5, %r6;"
        "st.global.b32 [ %rd4 + 0 ], { %r7 };"
    )
    for seed in (0, 1):
        y = torch.zeros(32, dtype=torch.int32)
        assert not run(kernel, x, y, seed=seed).faults
        assert y.equal((x ^ 16) + 31)


def test_what_the_machine_lacks_is_named() -> None:
    with pytest.raises(Unknown, match=r"no tanh\.approx\.f32"):
        machine("tanh.approx.f32 %r4, %r1;")
    with pytest.raises(Unknown, match=r"no st that is wt"):
        machine("st.global.wt.b32 [ %rd3 + 0 ], { %r1 };")
    with pytest.raises(ValueError, match=r"not understood as PTX: '\.param"):
        machine("{ .param .b64 param0; }")
    with pytest.raises(ValueError, match="no end"):
        parsed(".entry k(.param .u64 p)\n{\n  ret;\n")


# -------------------------------------------------------------------- faults

LOAD = "ld.global.b32 { %r4 }, [ %rd3 + 0 ];"
STORE = "st.global.b32 [ %rd4 + 0 ], { %r4 };"
#: Two programs write; the one that takes the last ticket reads what the other wrote.
PUBLISH = """
  mad.wide.u32 %rd5, %r2, 4, %rd2;
  xor.b32 %r4, %r2, 1;
  mad.wide.u32 %rd6, %r4, 4, %rd2;
  @%p1 st.global.b32 [ %rd5 + 0 ], {{ %r2 }};
  {barrier}
  setp.eq.s32 %p1, %r1, 0;
  @!%p1 bra $L_end;
  atom.global.{order}.add.u32 %r5, [ %rd1 + 0 ], 1;
  setp.ne.s32 %p2, %r5, 1;
  @%p2 bra $L_end;
  ld.global.b32 {{ %r6 }}, [ %rd6 + 0 ];
  st.global.b32 [ %rd6 + 64 ], {{ %r6 }};
$L_end:
"""
FAULTS = {
    "out of range": "ld.global.b32 { %r4 }, [ %rd3 + 4096 ];",
    "out of range, behind": f"{LOAD} st.global.b32 [ %rd4 + 4 ], {{ %r4 }};",
    "misaligned": "@%p1 ld.global.b32 { %r4 }, [ %rd3 + 2 ];",
    "misaligned, of 16 bytes": "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [ %rd1 + 8 ];",
    "memory that nothing has written": f"{LOAD.replace('rd3', 'rd4')} {STORE}",
    "a register that nothing": "st.global.b32 [ %rd4 + 0 ], { %r7 };",
    "a register that nothing, but shared memory": (
        "mul.lo.s32 %r5, %r1, 4; st.shared.b32 [ %r5 + 0 ], %r1; bar.sync 0;"
        f"ld.shared.b32 %r4, [ %r5 + 4 ]; {STORE}"
    ),
    "a register that nothing, as a predicate": f"@%p3 bra $L_x; {LOAD} $L_x:",
    "a barrier that some": f"@%p1 bra $L_end; bar.sync 0; {LOAD} $L_end:",
    "a warp's instruction": (
        f"{LOAD} @%p1 bra $L_end; shfl.sync.bfly.b32 %r5, %r4, 1, 31, -1; $L_end:"
    ),
    "race": "st.global.b32 [ %rd2 + 0 ], { %r1 };",
    "race of shared memory": (
        "mul.lo.s32 %r5, %r1, 4; st.shared.b32 [ %r5 + 0 ], %r1; xor.b32 %r6, %r5, 4;"
        f"ld.shared.b32 %r4, [ %r6 + 0 ]; {STORE}"
    ),
}


def found(body: str, n: int = 1, seed: int = 0) -> set[str]:
    """Kinds of faults of a kernel over zeros and fresh memory."""
    x, y = torch.zeros(32 * n, dtype=torch.int32), torch.full((32 * n,), -1).int()
    return {fault.kind for fault in run(machine(body), x, y, n, seed=seed).faults}


@pytest.mark.parametrize("seed", [0, 9])
@pytest.mark.parametrize("what", FAULTS)
def test_faults_are_reported(what: str, seed: int) -> None:
    kinds = found(FAULTS[what], seed=seed)
    kind = what.split(",")[0].split(" of ")[0]
    assert any(k.startswith(kind) for k in kinds)
    # in another order, what is read too early may not be there
    assert len(kinds) == 1 or seed


def test_a_sound_kernel_has_no_fault() -> None:
    assert not found(LOAD + STORE, 4)
    assert not found("bar.sync 0;" + LOAD + STORE, 4, seed=3)


ORDERS = ("gpu.acq_rel", "gpu.relaxed", "gpu.release", "gpu.acquire", "cta.acq_rel")


@pytest.mark.parametrize("seed", [0, 5, 6])
@pytest.mark.parametrize("order", ORDERS)
def test_an_atomic_that_releases_and_acquires_orders(order: str, seed: int) -> None:
    kernel = machine(PUBLISH.format(order=order, barrier="bar.sync 0;"))
    x, y = torch.zeros(32).int(), torch.zeros(32).int()
    kinds = {fault.kind for fault in run(kernel, x, y, 2, seed=seed).faults}
    assert kinds == (set() if order == "gpu.acq_rel" else {"race"})


def test_what_a_barrier_puts_before_an_atomic() -> None:
    """Another thread's store is published only by a barrier before the ticket."""
    for barrier, kinds in (("bar.sync 0;", set()), ("", {"race"})):
        text = PUBLISH.format(order="gpu.acq_rel", barrier=barrier)
        kernel = machine("setp.eq.s32 %p1, %r1, 7;" + text)
        x, y = torch.zeros(32).int(), torch.zeros(32).int()
        assert {f.kind for f in run(kernel, x, y, 2).faults} == kinds


def test_a_number_that_one_thread_stores_and_others_only_load() -> None:
    """As lane code does; if the others use it, it is a race."""
    load = "ld.global.b32 { %r4 }, [ %rd1 + 0 ]; add.s32 %r5, %r4, 1;"
    one = "@%p1 st.global.b32 [ %rd1 + 0 ], { %r5 };"
    assert not found(load + one)
    assert found(load + one + "st.global.b32 [ %rd4 + 0 ], { %r5 };") == {"race"}
    assert not found(
        load + "bar.sync 0;" + one + "st.global.b32 [ %rd4 + 0 ], { %r5 };"
    )


def test_sectors_of_a_warp() -> None:
    x, y = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    x, y = x[-x.data_ptr() // 4 % 8 :][:40], y[-y.data_ptr() // 4 % 8 :][:40]
    whole = run(machine(LOAD + STORE), x, y).traffic
    assert [(t.loaded, t.loads, t.stored, t.stores) for t in whole] == [
        (128, 4, 0, 0),
        (0, 0, 128, 4),
    ]
    odd = run(machine("ld.global.b32 { %r4 }, [ %rd3 + 4 ];"), x, y).traffic[0]
    assert (odd.loaded, odd.loads) == (128, 5)
