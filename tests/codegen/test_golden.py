"""Whole kernels as text: two bodies by hand, and what the text may depend on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from fuseopt.codegen import CppTarget
from fuseopt.ir.graph import Instr, Kernel, Literal, ScalarRef, Slot, Symbol, Variant
from fuseopt.runtime.cpp.toolchain import COMMON_FLAGS, EXACT_FLAGS
from tests.build_graphs import GraphBuilder, adaptive, kernels, momentum, planned


class VariantBuilder:
    """Writes a Variant: slots by name, instructions in the order in which they come."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.instrs: list[Instr] = []
        self.lane: list[int] = []
        self.stores: list[tuple[int, int]] = []
        self.n_scalars = 0

    def slot(
        self, dtype: str, domain: str = "element", read: bool = True, write: bool = True
    ) -> int:
        self.slots.append(Slot(dtype, domain, read, write))
        return len(self.slots) - 1

    def emit(
        self,
        op: str,
        *args: int,
        dtype: str = "f32",
        attr: float | None = None,
        lane: bool = False,
    ) -> int:
        self.instrs.append(Instr(op, args, dtype, attr))
        if lane:
            self.lane.append(len(self.instrs) - 1)
        return len(self.instrs) - 1

    def load(self, slot: int) -> int:
        s = self.slots[slot]
        return self.emit("load", dtype=s.dtype, attr=slot, lane=s.domain == "lane")

    def scalar(self) -> int:
        self.n_scalars += 1
        return self.emit("scalar", attr=self.n_scalars - 1, lane=True)

    def store(self, value: int, slot: int) -> None:
        self.stores.append((value, slot))

    def variant(
        self,
        lanes: int,
        shape: tuple[int, ...],
        scalars: ScalarRef,
    ) -> Variant:
        n = len(self.instrs)
        return Variant(
            tuple(self.instrs),
            tuple(self.lane),
            tuple(i for i in range(n) if i not in self.lane),
            tuple(self.stores),
            tuple(self.slots),
            tuple(
                tuple(range(s * lanes, (s + 1) * lanes)) for s in range(len(self.slots))
            ),
            ((scalars,) * lanes,) * self.n_scalars,
            (shape,) * lanes,
        )


def momentum_kernel(
    lanes: int = 3,
    shape: tuple[int, ...] = (4, 5),
    scalars: ScalarRef = Literal(0.9),  # noqa: B008
) -> Kernel:
    """p -= lr * (buf = beta * buf + grad), one variant in float32."""
    b = VariantBuilder()
    p, buf, grad = b.slot("f32"), b.slot("f32"), b.slot("f32", write=False)
    beta, rate = b.scalar(), b.scalar()
    kept = b.emit("mul", b.load(buf), beta)
    moved = b.emit("add", kept, b.load(grad))
    b.store(moved, buf)
    b.store(b.emit("fma", moved, rate, b.load(p)), p)
    return Kernel("kernel0", (b.variant(lanes, shape, scalars),))


def adaptive_variant(dtype: str) -> VariantBuilder:
    """Two moments and a step counter; `dtype` is that of the tensors in memory."""
    b = VariantBuilder()
    p, m, v = (b.slot(dtype) for _ in range(3))
    grad = b.slot(dtype, write=False)
    step = b.slot("f32", "lane")
    rate, beta1, beta2, eps = (b.scalar() for _ in range(4))
    one = b.emit("const", attr=1.0, lane=True)
    count = b.emit("add", b.load(step), one, lane=True)
    b.store(count, step)

    def correction(beta: int) -> int:
        power = b.emit("pow", beta, count, lane=True)
        return b.emit("sub", one, power, lane=True)

    first = correction(beta1)
    second = b.emit("vsqrt", correction(beta2), lane=True)
    size = b.emit("div", rate, first, lane=True)

    def again(x: int) -> int:
        return x if dtype == "f32" else b.emit("cast", x)

    def wide(slot: int) -> int:
        return again(b.load(slot))

    def keep(x: int, slot: int) -> int:
        if dtype != "f32":
            x = b.emit("cast", x, dtype=dtype)
        b.store(x, slot)
        return x

    g = wide(grad)
    weight = b.emit("sub", one, beta1, lane=True)
    mean = wide(m)
    mean = again(keep(b.emit("fma", weight, b.emit("sub", g, mean), mean), m))
    square = b.emit("mul", b.emit("sub", one, beta2, lane=True), b.emit("mul", g, g))
    spread = again(keep(b.emit("add", b.emit("mul", wide(v), beta2), square), v))
    root = b.emit("vsqrt", spread)
    below = b.emit("add", b.emit("div", root, second), eps)
    change = b.emit("div", b.emit("mul", size, mean), below)
    keep(b.emit("sub", wide(p), change), p)
    return b


def adaptive_kernel(
    lanes: int = 3,
    shape: tuple[int, ...] = (4, 5),
    scalars: ScalarRef = Literal(0.9),  # noqa: B008
) -> Kernel:
    variants = tuple(
        adaptive_variant(d).variant(lanes, shape, scalars) for d in ("f32", "bf16")
    )
    return Kernel("kernel0", variants)


KERNELS = {"momentum": momentum_kernel, "adaptive": adaptive_kernel}


@pytest.mark.parametrize("name", KERNELS)
def test_whole_text(name: str, golden) -> None:
    golden(f"{name}.cpp", CppTarget().render(KERNELS[name]()).text)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "other",
    [
        {"lanes": 1000},
        {"lanes": 1, "shape": ()},
        {"shape": (7, 1, 3)},
        {"scalars": Literal(0.5)},
        {"scalars": Symbol(2)},
    ],
    ids=str,
)
def test_text_depends_on_bodies_alone(name: str, other: dict) -> None:
    target = CppTarget()
    assert target.render(KERNELS[name]()) == target.render(KERNELS[name](**other))


def test_layout() -> None:
    first, second = CppTarget().render(adaptive_kernel()).layout
    assert first.slots == (*("element:f32",) * 4, "lane:f32")
    assert second.slots == (*("element:bf16",) * 4, "lane:f32")
    assert first.scalars == second.scalars == 4
    # 1 - beta1, 1 - beta2, lr / correction, root of the other correction
    assert first.lane_values == second.lane_values == 4


@pytest.mark.parametrize("build", [momentum, adaptive])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_text_of_captured_like_graphs(build, dtype: str) -> None:
    """The way from a Graph: the text is that of 3 lanes and of 60, of any shapes."""

    def text(shapes: list[tuple[int, ...]], **numbers: float) -> str:
        (kernel,) = kernels(planned(build(shapes, dtype=dtype, **numbers))[1])
        return CppTarget().render(kernel).text

    three = text([(3, 4), (5,), (2, 2, 2)])
    assert three == text([(7,)] * 60)
    assert three == text([(3, 4), (5,), (2, 2, 2)], lr=0.5)


def test_text_does_not_depend_on_which_lane_comes_first() -> None:
    def text(dtypes: Sequence[str]) -> str:
        g = GraphBuilder()
        for k, dtype in enumerate(dtypes):
            momentum([(4,)], dtype=dtype, g=g, name=f"group{k}.")
        (kernel,) = kernels(planned(g)[1])
        return CppTarget().render(kernel).text

    assert text(["f32", "bf16"]) == text(["bf16", "f32"])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("name", KERNELS)
def test_text_compiles_without_warnings(name: str, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text(CppTarget().render(KERNELS[name]()).text, encoding="utf-8")
    flags = [f for f in (*COMMON_FLAGS, *EXACT_FLAGS) if f != "-w"]
    quiet = ["-Wno-unused", "-Wno-unused-parameter"]
    done = subprocess.run(
        ["g++", *flags, "-Wall", "-Wextra", *quiet, "-o", "kernel.so", str(source)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
