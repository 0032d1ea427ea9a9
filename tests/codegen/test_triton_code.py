"""What Triton makes of the kernels for GPUs that need not be here: width of accesses,
loads in flight, registers, the stack. Instructions: test_triton_counts.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseopt.codegen.target import Source
from fuseopt.codegen.triton.chunks import MANY
from fuseopt.codegen.triton.kernel import TritonTarget
from fuseopt.ir.graph import DTYPE_BYTES, Kernel
from fuseopt.runtime.triton.build import TritonBuilder, compile_offline
from tests.codegen.sass import Machine, loads_before_use, resources
from tests.papers import momentum, reducing, schedules
from tests.triton_cases import CASES, Case, kernels, options, parameters, planned

pytest.importorskip("triton")

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
    cuda = CUDA if gpu.startswith("sm_") else None
    source = TritonTarget(fast=fast, cuda=cuda).render(kernel)
    return source, compile_offline(source, gpu, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("kernels"))


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
    # those of the first chunk, and in the loop those of the next; whole, and in part
    # where there are registers for both
    kinds = 2 - (dtype == BF16 and loads >= 2 * MANY)
    assert len(re.findall(r"\bld\.global\.v4\.b32", ptx)) == 2 * kinds * loads
    assert len(re.findall(r"\bst\.global\.v4\.b32", ptx)) == stores
    used = resources(made["cubin"], folder)
    assert used["STACK"] == used["LOCAL"] == 0
    assert not re.search(r"\.local\b", ptx)
    assert used["REG"] <= 168
    assert loads_before_use(Machine(made["cubin"], folder), loads) == loads
    # powers, roots of lane code stand there once, not once per element
    per_thread = block // (warps * 32)
    assert len(re.findall(r"\b(?:ex2|lg2)\.", ptx)) < per_thread
    for element in (element_function(source.text), main_function(source.text)):
        assert not re.search(r"float64|libdevice|exp|log|pow", element)
    # no product contracted with a sum, no denormal lost, IEEE roots and quotients
    assert not re.search(r"(?:add|mul|fma|div|sqrt)\.\w*\.?ftz", ptx)
    # but that CUDA's powf, in lane code, begins with an estimate of one quotient, and
    # that a root of a bfloat16 that becomes one is an estimate: codegen.triton.halves
    estimates = re.findall(r"(?:div|sqrt|rcp)\.(?:approx|full)\.f32", ptx)
    roots = re.findall(r"= tl\.sqrt\(", main_function(source.text))
    assert estimates.count("sqrt.approx.f32") == per_thread * len(roots)
    assert not roots or dtype == BF16
    estimates = [x for x in estimates if x != "sqrt.approx.f32"]
    powers = re.findall(r"= power\(", source.text)
    assert set(estimates) <= {"div.full.f32"}
    # a function may stand in two others; of elements there would be one a register
    assert len(estimates) <= 2 * len(powers)


@pytest.mark.family(20)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_kernels(name: str, dtype: torch.dtype, folder: str) -> None:
    check_nvidia(name, dtype, "sm_90", folder)


@pytest.mark.family(4)
@pytest.mark.parametrize("gpu", NVIDIA)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_other_nvidia_gpus(gpu: str, dtype: torch.dtype, folder: str) -> None:
    check_nvidia("AdamW", dtype, gpu, folder)


@pytest.mark.slow
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
    assert len(wide_stores) == stores
    # of a full chunk and of one that is not, where those are not one
    assert loads < len(first) <= 2 * loads
    # all loads of a chunk are under way before anything is divided or stored
    assert first[-1].start() < wide_stores[0].start()
    assert len(then) >= 2 * loads
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


def test_no_ticket_between_loads_and_stores(folder: str) -> None:
    """The ticket's fence and its answer are waited for when the elements are stored."""
    _, made = compiled("AdamW", F32, "sm_90", folder)
    machine = Machine(made["cubin"], folder)
    assert machine.places("LDG.E.128")
    for name in ("MEMBAR", "ATOMG", "CCTL.IVALL"):
        (place,) = machine.places(name)
        assert place > machine.places("STG.E.128")[-1]


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
