"""What Triton makes of the kernels for GPUs that need not be here: width of accesses,
loads in flight, registers, the stack, instructions per element.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseopt.codegen.target import Source
from fuseopt.codegen.triton.kernel import TritonTarget
from fuseopt.ir.graph import DTYPE_BYTES, Kernel
from fuseopt.runtime.triton import table as triton_table
from fuseopt.runtime.triton.build import TritonBuilder, compile_offline
from tests.papers import momentum, reducing, schedules
from tests.triton_cases import CASES, Case, kernels, options, parameters, planned

triton = pytest.importorskip("triton")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#: Elementwise ones, by name: the class, its options.
ELEMENTWISE: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, options(lr=0.1)),
    "momentum": (torch.optim.SGD, options(lr=0.1, momentum=0.9)),
    "AdamW": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.AdamW, options(amsgrad=True)),
    "Adagrad": (torch.optim.Adagrad, options(lr_decay=0.1)),
    "ASGD": (torch.optim.ASGD, options(weight_decay=0.1)),
    "Lion": (momentum.Lion, {}),
    "Adan": (schedules.Adan, {}),
    "AdEMAMix": (schedules.AdEMAMix, {}),
}
REDUCING = {
    "LAMB": (reducing.LAMB, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}
#: As for a torch built with it: its own powers.
CUDA = (13, 0)
NVIDIA = ("sm_80", "sm_100")
AMD = ("gfx942", "gfx950")


@functools.cache
def kernels_of(name: str, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """The kernels of the second step."""
    kind, given = {**ELEMENTWISE, **REDUCING}[name]
    params = parameters((dtype,), ((5,), (7, 3)))
    foreach = {"foreach": True} if kind.__module__.startswith("torch") else {}
    optimizer = kind(params, **given, **foreach)
    found: list[Kernel] = []

    def backend(gm: torch.fx.GraphModule, args: Sequence[Any]) -> Any:
        _, plan = planned(gm, args)
        found[:] = [step for step in plan.steps if isinstance(step, Kernel)]
        return gm

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        step = torch.compile(optimizer.step, backend=backend)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            step()
    return tuple(found)


@functools.cache
def compiled(
    name: str, dtype: torch.dtype, gpu: str, folder: str, fast: bool = False
) -> tuple[Source, dict[str, Any]]:
    """Text and what Triton makes of it, of an optimizer's one kernel."""
    (kernel,) = kernels_of(name, dtype)
    source = TritonTarget(fast=fast, cuda=CUDA).render(kernel)
    return source, compile_offline(source, gpu, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("kernels"))


def tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


def run_tool(name: str, cubin: bytes, folder: str, *flags: str) -> str:
    path = Path(folder) / "kernel.cubin"
    path.write_bytes(cubin)
    command = [tool(name), *flags, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes, folder: str) -> dict[str, int]:
    """What a kernel needs of registers, stack, local memory."""
    text = run_tool("cuobjdump", cubin, folder, "--dump-resource-usage")
    found = re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)
    return {name: int(number) for name, number in found}


def sizes(source: Source, folder: str) -> tuple[int, int]:
    """Elements of a chunk, warps of a program."""
    module = TritonBuilder().load(source, folder, interpret=False)
    return module.sizes["BLOCK"], module.options["num_warps"]


def accesses(kernel: Kernel, block: int, threads: int) -> tuple[int, int]:
    """Loads and stores of 16 bytes that a thread needs for its elements of a chunk."""
    (v,) = [v for v in kernel.variants if any(s.domain == "element" for s in v.slots)]
    loads = stores = 0
    for s in v.slots:
        if s.domain == "element":
            count = block * DTYPE_BYTES[s.dtype] // (16 * threads)
            loads += count * s.read
            stores += count * s.write
    return loads, stores


def loads_before_use(sass: str) -> int:
    """Loads of 16 bytes that are begun before the first register of one is read."""
    loaded: set[int] = set()
    count = 0
    for line in sass.splitlines():
        found = re.search(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s+(.*?);", line)
        if not found:
            continue
        op, operands = found.groups()
        first, _, rest = operands.partition(",")
        if op.startswith("LDG.E.128"):
            start = int(first.strip().removeprefix("R"))
            loaded.update(range(start, start + 4))
            count += 1
            continue
        read = operands if op.startswith("STG") else rest
        if loaded & {int(r) for r in re.findall(r"\bR(\d+)", read)}:
            return count
    return count


def element_function(text: str) -> str:
    """The arithmetic of an element, of the variant that has one."""
    (found,) = re.findall(r"^def element\d+\(.*?(?=^@triton)", text, re.M | re.S)
    return str(found)


def main_function(text: str) -> str:
    """The same for the main path, "" where it has no other."""
    found = re.findall(r"^def main\d+\(.*?(?=^@triton)", text, re.M | re.S)
    return "".join(found)


def check_nvidia(name: str, dtype: torch.dtype, gpu: str, folder: str) -> None:
    source, made = compiled(name, dtype, gpu, folder)
    (kernel,) = kernels_of(name, dtype)
    block, warps = sizes(source, folder)
    loads, stores = accesses(kernel, block, warps * 32)
    ptx = made["ptx"]
    # those of the first chunk, and in the loop those of the next
    assert len(re.findall(r"\bld\.global\.v4\.b32", ptx)) == 2 * loads
    assert len(re.findall(r"\bst\.global\.v4\.b32", ptx)) == stores
    used = resources(made["cubin"], folder)
    assert used["STACK"] == used["LOCAL"] == 0
    assert not re.search(r"\.local\b", ptx)
    assert used["REG"] <= 168
    sass = run_tool("nvdisasm", made["cubin"], folder, "-c")
    assert loads_before_use(sass) == loads
    # powers, roots of lane code stand there once, not once per element
    per_thread = block // (warps * 32)
    assert len(re.findall(r"\b(?:ex2|lg2)\.", ptx)) < per_thread
    for element in (element_function(source.text), main_function(source.text)):
        assert not re.search(r"float64|libdevice|exp|log|pow", element)
    # no product contracted with a sum, no denormal lost, IEEE roots and quotients
    assert not re.search(r"(?:add|mul|fma|div|sqrt)\.\w*\.?ftz", ptx)
    # but that CUDA's powf, in lane code, begins with an estimate of one quotient
    estimates = re.findall(r"(?:div|sqrt|rcp)\.(?:approx|full)\.f32", ptx)
    powers = re.findall(r"= power\(", source.text)
    assert set(estimates) <= {"div.full.f32"}
    # a function may stand in two others; of elements there would be one a register
    assert len(estimates) <= 2 * len(powers)


@pytest.mark.family(5)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_kernels(name: str, dtype: torch.dtype, folder: str) -> None:
    check_nvidia(name, dtype, "sm_90", folder)


@pytest.mark.parametrize("gpu", NVIDIA)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_other_nvidia_gpus(gpu: str, dtype: torch.dtype, folder: str) -> None:
    check_nvidia("AdamW", dtype, gpu, folder)


def test_float16(folder: str) -> None:
    check_nvidia("AdamW", F16, "sm_90", folder)


@pytest.mark.parametrize("gpu", AMD)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_amd_gpus(gpu: str, dtype: torch.dtype, folder: str) -> None:
    source, made = compiled("AdamW", dtype, gpu, folder)
    (kernel,) = kernels_of("AdamW", dtype)
    text = made["amdgcn"]
    block, warps = sizes(source, folder)
    loads, stores = accesses(kernel, block, warps * 64)
    # (records of lanes are read with global loads of that width, before the loop)
    first = list(re.finditer(r"\bbuffer_load_dwordx4", text))
    wide_stores = list(re.finditer(r"\bglobal_store_dwordx4", text))
    then = re.findall(r"\bglobal_load_dwordx4", text[wide_stores[0].start() :])
    assert (len(first), len(wide_stores)) == (loads, stores)
    # all loads of a chunk are under way before anything is divided or stored
    assert first[-1].start() < wide_stores[0].start()
    assert len(then) >= loads
    assert re.search(r"\.vgpr_spill_count:\s+0\b", text)
    assert re.search(r"\.private_segment_fixed_size:\s+0\b", text)
    # each wave has its lane's numbers before it comes to the first barrier
    before = text[: text.index("s_barrier")]
    assert "s_load_dword" in before
    assert re.search(r"s_waitcnt[^\n]*lgkmcnt\(0\)(?!.*s_load)", before, re.S)


@pytest.mark.parametrize("name", REDUCING)
def test_reductions_use_no_stack(name: str, folder: str) -> None:
    for kernel in kernels_of(name, F32):
        made = compile_offline(TritonTarget().render(kernel), "sm_90", folder)
        used = resources(made["cubin"], folder)
        assert used["STACK"] == used["LOCAL"] == 0


LABEL = re.compile(r"(\.L_\S+):")
#: Instructions of a ticket: a barrier, a fence, an atomic, their addresses.
TICKETS = 60


def instructions(sass: str) -> int:
    """Instructions, without those that only numbers near the ends of a range need."""
    lines = []
    for line in sass.splitlines():
        label = re.match(r"(\.L_\S+):", line)
        found = re.search(r"\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);", line)
        if label:
            lines.append((label[1], "", False))
        elif found:
            lines.append(("", found[2] + " " + found[3], bool(found[1])))
    place = {name: k for k, (name, _, _) in enumerate(lines) if name}
    count = at = 0
    while at < len(lines):
        _, text, guarded = lines[at]
        count += bool(text)
        to = re.search(r"^BRA.*`\((\.L_\S+)\)", text)
        if to and guarded and at < place.get(to[1], 0) < at + 40:
            around = lines[at + 1 : place[to[1]]]
            if any(x.startswith("CALL") for _, x, _ in around):
                at = place[to[1]]
                continue
        at += 1
    return count


#: Chunks of 2,048 elements that a program takes in the counts below: as many as it does
#: from 131 million elements on, or where it has half as many.
SPANS = (triton_table.SPAN, triton_table.SPAN // 2)


def main_loop(sass: str) -> tuple[int, int]:
    """Instructions of the main path: outside of its loop, and a turn of it.

    Not counted: what follows the loop but for the ticket, which stands at the end and
    is a few dozen: the general path, that of small lanes, slow paths.
    """
    lines = sass.splitlines()
    place = {found[1]: k for k, x in enumerate(lines) if (found := LABEL.match(x))}
    stores = [k for k, x in enumerate(lines) if "STG.E.128" in x]
    loops = []
    for k, line in enumerate(lines):
        to = re.search(r"\bBRA.*`\((\.L_\S+)\)", line)
        if to and place[to[1]] < stores[0] < stores[-1] < k:
            loops.append((place[to[1]], k + 1))
    begin, end = min(loops, key=lambda loop: loop[1] - loop[0])
    before, turn = "\n".join(lines[:begin]), "\n".join(lines[begin:end])
    return instructions(before), instructions(turn)


def per_element(
    name: str, dtype: torch.dtype, fast: bool, folder: str
) -> tuple[float, float, float]:
    """Instructions of an element: of the loop alone, then all included."""
    source, made = compiled(name, dtype, "sm_90", folder, fast)
    sass = run_tool("nvdisasm", made["cubin"], folder, "-c")
    before, turn = main_loop(sass)
    block, warps = sizes(source, folder)
    each = block // (32 * warps)
    long, half = ((before + TICKETS + n * turn) / (n * each) for n in SPANS)
    return turn / each, long, half


@pytest.mark.parametrize(
    ("dtype", "exact", "fast"), [(F32, 50, 35), (BF16, 60, 45)], ids=str
)
def test_instructions_per_element(
    dtype: torch.dtype, exact: int, fast: int, folder: str
) -> None:
    """What a GPU can begin while the bytes of an element pass is about 90 for bfloat16,
    twice as many for float32: see bench/NOTES.md. All included: look-ups, lane code,
    the checks of divisors, the ticket.
    """
    turn, long, half = per_element("AdamW", dtype, False, folder)
    print(f"AdamW {dtype}: {turn:.1f} a turn, {long:.1f} and {half:.1f} in all")
    assert turn < long < half <= exact
    assert per_element("AdamW", dtype, True, folder)[1] <= fast


def test_no_ticket_between_loads_and_stores(folder: str) -> None:
    """The ticket's fence and its answer are waited for when the elements are stored."""
    _, made = compiled("AdamW", F32, "sm_90", folder)
    sass = run_tool("nvdisasm", made["cubin"], folder, "-c").splitlines()
    places = {
        name: [k for k, line in enumerate(sass) if name in line]
        for name in ("LDG.E.128", "STG.E.128", "MEMBAR", "ATOMG", "CCTL.IVALL")
    }
    assert places["LDG.E.128"]
    for name in ("MEMBAR", "ATOMG", "CCTL.IVALL"):
        assert len(places[name]) == 1
        assert places[name][0] > places["STG.E.128"][-1]


def test_fast_has_no_branches_and_keeps_halves_wide(folder: str) -> None:
    exact, _ = compiled("AdamW", BF16, "sm_90", folder)
    source, made = compiled("AdamW", BF16, "sm_90", folder, fast=True)
    assert not re.search(r"(?:div|sqrt)\.rn\.f32", made["ptx"])
    assert '"enable_fp_fusion": True' in source.text
    rounded = "to(tl.bfloat16)"
    few, many = (element_function(x.text).count(rounded) for x in (source, exact))
    assert few == many  # for what is stored; nobody reads the others
    assert "tl.sqrt(" in source.text
    assert "tl.div_rn(" not in element_function(source.text)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, torch.float64, BF16, F16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_optimizer_compiles_without_spills(
    case: Case, dtype: torch.dtype, tmp_path: Path
) -> None:
    (kernel,) = kernels(replace(case, make=lambda: parameters((dtype,), ((5,), (7,)))))
    made = compile_offline(TritonTarget().render(kernel), "sm_90", str(tmp_path))
    wide = r"global\.v2\.b64" if dtype == torch.float64 else r"global\.v4\.b32"
    assert re.search(rf"\bld\.{wide}", made["ptx"])
    assert re.search(rf"\bst\.{wide}", made["ptx"])
    used = resources(made["cubin"], str(tmp_path))
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["REG"] <= 168
