"""Powers of float32 on a GPU: the bits of CUDA's own `powf`, of which eager is made.

What that gives was computed from the PTX that nvcc 13.0 makes of it, with an exact
reciprocal in place of the GPU's estimate, here and there alike: see tests/tools/ptx.py.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from fuseopt.codegen.triton import power
from fuseopt.codegen.triton.kernel import PRELUDE, TritonTarget
from fuseopt.compiler import pipeline
from fuseopt.config import Config
from fuseopt.ir.graph import Instr, Kernel, Literal, Variant
from fuseopt.runtime.triton.build import compile_offline
from fuseopt.runtime.triton.interpreter import interpreting
from tests.codegen.sass import run_tool
from tests.codegen.test_triton_target import lane
from tests.simulated.twins import SimTwins
from tests.tools import ptx

triton = pytest.importorskip("triton")

#: By beta, the digest of beta**t for t = 1 to 10,000: `python -m tests.tools.ptx`.
SWEEPS = {
    0.5: 0x070A5892,
    0.9: 0xD775301E,
    0.95: 0x40EAB8F2,
    0.98: 0x7B8E47FC,
    0.99: 0x9A281782,
    0.999: 0x6774FB0C,
    0.9999: 0x33021DC7,
}
EXTREMES = 0xB7FE749B

KERNELS = """

from triton.language.extra import libdevice


@triton.jit
def powers(x, y, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, power(tl.load(x + at), tl.load(y + at)))


@triton.jit
def one_power(x, y, out):
    tl.store(out, power(tl.load(x), tl.load(y)))


@triton.jit
def three_powers(x, y, out):
    x0, x1, x2 = tl.load(x), tl.load(x + 1), tl.load(x + 2)
    y0, y1, y2 = tl.load(y), tl.load(y + 1), tl.load(y + 2)
    LINES
    tl.store(out, z0)
    tl.store(out + 1, z1)
    tl.store(out + 2, z2)
""".replace(
    "LINES",
    "\n    ".join(power.side_by_side([(f"z{k}", f"x{k}", f"y{k}") for k in range(3)])),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The text of `power`, for the interpreter."""
    path = tmp_path_factory.mktemp("power") / "powers.py"
    path.write_text(f"{PRELUDE}\n\n{power.FROM_CUDA}{power.BESIDE}{KERNELS}")
    spec = importlib.util.spec_from_file_location("own_powers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module


def powers(text: ModuleType, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    size = 1 << 14
    whole = -(-len(x) // size) * size
    given = [torch.ones(whole), torch.ones(whole), torch.zeros(whole)]
    for t, a in zip(given, (x, y), strict=False):
        t[: len(a)] = torch.from_numpy(a)
    with interpreting():
        text.powers[(whole // size,)](*given, size)
    return given[2].numpy()[: len(x)]


@pytest.mark.parametrize("beta", SWEEPS)
def test_bias_corrections_of_ten_thousand_steps(text, beta):
    assert ptx.digest(powers(text, *ptx.sweep(beta))) == SWEEPS[beta]


def test_the_ends_of_the_range(text):
    assert ptx.digest(powers(text, *ptx.extremes())) == EXTREMES


def test_numbers_of_a_lane(text):
    """A number of a lane takes the same way as an element."""
    for x, y in ((0.999, 67.0), (0.9, 3.0), (-2.0, 3.0), (0.0, -1.0), (7.0, 0.0)):
        given = [torch.tensor(v, dtype=torch.float32) for v in (x, y, 0.0)]
        with interpreting():
            text.one_power[(1,)](*given)
        pair = [np.array([v], np.float32) for v in (x, y)]
        assert given[2].numpy().tobytes() == powers(text, *pair)[0].tobytes()


def test_powers_side_by_side_have_the_bits_of_each_alone(text):
    """Zeros of both signs, infinities, NaN too; the fourth place is nobody's."""
    inf, nan = np.inf, np.nan
    cases = [
        ((0.9, 0.999, 0.95), (67.0, 67.0, 3.0)),
        ((-0.0, 0.0, -inf), (3.0, 5.0, 3.0)),
        ((nan, inf, -2.0), (1.0, -1.0, 0.5)),
        ((1.0, 1e-30, 1e30), (nan, 2.0, 2.0)),
    ]
    for x, y in cases:
        xs, ys = (np.array(v, np.float32) for v in (x, y))
        out = torch.zeros(3)
        with interpreting():
            text.three_powers[(1,)](torch.from_numpy(xs), torch.from_numpy(ys), out)
        assert out.numpy().tobytes() == powers(text, xs, ys).tobytes()


def test_lane_code_whose_powers_depend_on_powers():
    """Those of a round stand side by side, and what uses them comes after."""
    code = (
        Instr("load", (), "f32", 0),
        Instr("scalar", (), "f32", 0),
        Instr("pow", (1, 0)),
        Instr("add", (2, 1)),
        Instr("pow", (3, 0)),
        Instr("pow", (0, 1)),
        Instr("mul", (4, 5)),
    )
    variant = replace(
        kernel().variants[0], instrs=code, lane_code=tuple(range(7)), stores=((6, 1),)
    )
    text = TritonTarget(cuda=(13, 0)).render(Kernel("powers", (variant,))).text
    start = text.index("def variant0(")
    body = text[start : text.index("@triton.jit", start)]
    lines = [line.strip() for line in body.splitlines()]
    order = [line.partition(" = ")[0] for line in lines if " = " in line]
    assert order.index("powers") < order.index("x2") < order.index("x3")
    assert order.index("x5") < order.index("x4") < order.index("x6")
    assert "x4 = power(x3, x0)" in lines  # alone in its round
    assert (
        "powers = power(tl.where(which == 0, x1, x0), tl.where(which == 0, x0, x1))"
        in lines
    )


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_digests_are_those_of_nvcc():
    made = ptx.Kernel(ptx.powf_of_nvcc())
    with np.errstate(all="ignore"):
        for beta, known in SWEEPS.items():
            assert ptx.digest(made(*ptx.sweep(beta))) == known
        assert ptx.digest(made(*ptx.extremes())) == EXTREMES


def test_a_wrong_bit_is_seen(text, monkeypatch):
    """The C library's powers, as the other form of the text has them here, differ."""
    beta, steps = ptx.sweep(0.999)
    other = np.power(beta.astype(np.float64), steps.astype(np.float64))
    other = other.astype(np.float32)
    own = powers(text, beta, steps)
    assert ptx.digest(other) != SWEEPS[0.999]
    # by an ulp
    np.testing.assert_array_max_ulp(own, other, 1)


# ---------------------------------------------------------------- which one


def kernel() -> Kernel:
    """out = 0.999 ** step."""
    code = (Instr("load", (), "f32", 0), Instr("scalar", (), "f32", 0))
    variant = Variant(
        (*code, Instr("pow", (1, 0))),
        (0, 1, 2),
        (),
        ((2, 1),),
        lane("f32", 2),
        ((0,), (1,)),
        ((Literal(0.999),),),
        ((),),
    )
    return Kernel("power", (variant,))


@pytest.mark.parametrize("cuda", [None, (11, 8), (12, 0), (12, 1), (12, 8), (13, 0)])
def test_the_text_is_that_of_eagers_cuda(cuda):
    text = TritonTarget(cuda=cuda).render(kernel()).text
    own = cuda is not None and cuda >= (12, 1)
    assert ("libdevice.pow(" in text) == (not own)
    assert ("tl.fma(" in text) == own


@pytest.mark.parametrize(
    ("built_with", "known"),
    [("13.0", (13, 0)), ("12.8", (12, 8)), ("13", (13, 0)), (None, None)],
)
def test_the_version_is_the_one_torch_was_built_with(monkeypatch, built_with, known):
    monkeypatch.setattr(torch.version, "cuda", built_with)
    target = pipeline.target_of(Config(), "cuda:0")
    assert isinstance(target, TritonTarget)
    assert target.cuda == known
    other = pipeline.target_of(Config(target="triton"), "cpu")
    assert isinstance(other, TritonTarget)
    assert other.cuda is None


def test_its_machine_code_is_as_long_as_nvccs(tmp_path: Path):
    """19 fused products, as in nvcc's own, and one estimate of a reciprocal: nothing
    was contracted, and no division is taken.
    """
    source = TritonTarget(cuda=(13, 0)).render(kernel())
    made = compile_offline(source, "sm_90", str(tmp_path))
    sass = run_tool("nvdisasm", made["cubin"], str(tmp_path), "-c")
    ops = [word for line in sass.splitlines() for word in line.split()]
    # it stands there twice: for a lane alone, and for several of a program
    assert ops.count("MUFU.RCP") == 2
    assert ops.count("FFMA") == 2 * 19


# ---------------------------------------------------------------- numbers of the host

#: Whose bias corrections, or schedules, eager takes in Python.
ON_HOST = {
    "AdamW": partial(torch.optim.AdamW, foreach=True),
    "AdamW, for-loop": partial(torch.optim.AdamW, foreach=False),
    "amsgrad": partial(torch.optim.Adam, amsgrad=True, foreach=True),
    "NAdam": partial(torch.optim.NAdam, foreach=True),
    "RAdam": partial(torch.optim.RAdam, foreach=True),
    "Adamax": partial(torch.optim.Adamax, foreach=True),
}


@pytest.fixture
def texts(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Triton of all steps that a test compiles for the device "sim"."""
    made: list[str] = []
    plain = TritonTarget.render

    def render(self, kernel):
        source = plain(self, kernel)
        made.append(source.text)
        return source

    monkeypatch.setattr(TritonTarget, "render", render)
    return made


@pytest.mark.family(6)
@pytest.mark.parametrize("name", ON_HOST)
def test_what_eager_takes_on_the_host_takes_no_power_on_the_device(texts, name):
    """No `powf`, and no other function of the library: they come as numbers."""
    twins = SimTwins(ON_HOST[name], [(5,), (7, 3)])
    twins.step()
    assert not twins.report.fallback
    assert texts
    for text in texts:
        assert "pow" not in text
        assert "libdevice" not in text


def test_a_capturable_step_takes_its_powers_on_the_device(texts):
    twins = SimTwins(partial(torch.optim.AdamW, capturable=True, foreach=True), [(5,)])
    twins.step()
    assert any("power(" in text for text in texts)
