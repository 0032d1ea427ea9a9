"""Kernels of each kind under AddressSanitizer, UBSan and ThreadSanitizer.

What is recorded is launches of real steps over odd shapes; see the folder `sanitized`.
Each of them also leaves the same bits there as without a sanitizer.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuseopt.backend import fuseopt as backend
from tests.codegen import sanitized
from tests.codegen.sanitized import THREADS, Launch

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
#: More elements than one thread takes alone, and lanes that are multiples of nothing.
ODD = (
    (),
    (1,),
    (3,),
    (17, 5),
    (129, 33),
    (0, 3),
    (7, 1, 9),
    (181, 193),
    (40,),
    (1031,),
)

Step = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


def elements(ps: Sequence[Tensor], gs: Sequence[Tensor]) -> None:
    """A lane's numbers, then its elements; functions of a library; choices."""
    for p, g in zip(ps, gs, strict=True):
        p.mul_(0.99).addcdiv_(g, (g * g).sqrt().add_(1e-3), value=-0.1)
        p.add_(torch.where(g > 0, g.exp(), g.tanh()) * 1e-3).add_(g.pow(3), alpha=1e-3)


def wholes(ps: Sequence[Tensor], gs: Sequence[Tensor]) -> None:
    """Lanes that are folded to a number, which their elements then read."""
    for p, g in zip(ps, gs, strict=True):
        ratio = p.norm() / (g.norm() + 1e-6)
        p.sub_(
            g * ratio.clamp(max=10)
            + g.sum() * 1e-3
            + (
                g.abs().mean() - g.std(0).sum()
                if g.dim() == 1 and g.numel() > 1
                else g.abs().mean()
            )
        )


def total(ps: Sequence[Tensor], gs: Sequence[Tensor]) -> None:
    """Lanes folded to numbers, and these to one for all."""
    norm = torch.stack([g.norm() for g in gs]).norm()
    for p, g in zip(ps, gs, strict=True):
        p.sub_(g * (1 / (norm + 1)).clamp(max=1))


def lines(ps: Sequence[Tensor], gs: Sequence[Tensor]) -> None:
    """Rows and columns of lanes that have any, and what lies between."""
    for p, g in zip(ps, gs, strict=True):
        for d in range(g.dim()):
            p.sub_(g / (1 + (g * g).mean(d, keepdim=True)))
            p.sub_(g.amax(d, keepdim=True) * 1e-3)


#: A step; the dtypes of its tensors; how gradients lie in memory.
KINDS: dict[str, tuple[Step, tuple[torch.dtype, ...], str]] = {
    "elements": (elements, (F32,), "flat"),
    "elements, strided": (elements, (F32, F64), "strided"),
    "halves": (elements, (BF16, F16), "flat"),
    "halves, strided": (elements, (BF16, F16), "strided"),
    "full folds": (wholes, (F32, F64), "flat"),
    "full folds, strided": (wholes, (F32,), "strided"),
    "full folds of halves": (wholes, (BF16, F16), "flat"),
    "one number for all": (total, (F32,), "flat"),
    "rows and columns": (lines, (F32,), "flat"),
    "rows and columns, strided": (lines, (F64,), "strided"),
    "rows and columns of halves": (lines, (BF16, F16), "flat"),
}


def laid(t: Tensor, how: str, k: int) -> Tensor:
    """A copy of a tensor that begins anywhere, has gaps, or is transposed."""
    if how == "strided" and k % 3 == 1 and t.dim() == 2:
        return t.t().contiguous().t()
    if how == "strided" and k % 3 == 2:
        return torch.stack([t, t], -1)[..., 0]
    return torch.cat([t.new_zeros(k % 3), t.flatten()])[k % 3 :].view(t.shape)


def recorded(kind: str) -> list[Launch]:
    """The launches of two steps of a kind."""
    step, dtypes, how = KINDS[kind]
    generator = torch.Generator().manual_seed(3)

    def numbers() -> list[Tensor]:
        shapes = ODD[2:] if step is lines else ODD
        made = [
            torch.randn(shape, generator=generator).to(dtype)
            for dtype in dtypes
            for shape in shapes
            if step is elements or 0 not in shape
        ]
        return [laid(t, how, k) for k, t in enumerate(made)]

    ps, gs = numbers(), numbers()
    torch._dynamo.reset()
    run = torch.compile(step, backend=backend, options={"fallback": "error"})
    with sanitized.record() as launches:
        run(ps, gs)
    assert launches
    return launches


def reports(
    launches: Sequence[Launch], sanitizer: str, folder: Path
) -> tuple[int, str]:
    """How many runs left the right bits, and what the sanitizer says of all."""
    done, said = 0, []
    for text in dict.fromkeys(x.text for x in launches):
        program = sanitized.build(text, sanitizer, folder)
        own = [x for x in launches if x.text == text]
        right, told = sanitized.replay(program, own)
        done += right
        said += [told] if told else []
    return done, "\n".join(said)


def works(sanitizer: str, tmp_path_factory: pytest.TempPathFactory) -> bool:
    """Does a program that is built with a sanitizer run here?"""
    folder = tmp_path_factory.mktemp("trial")
    (folder / "trial.cpp").write_text("int main() { return 0; }\n")
    flags = sanitized.SANITIZERS[sanitizer]
    made = ["g++", *flags, "-o", "trial", "trial.cpp"]
    if shutil.which("g++") is None or shutil.which("setarch") is None:
        return False
    if subprocess.run(made, cwd=folder, capture_output=True).returncode:
        return False
    started = ["setarch", "-R", str(folder / "trial")]
    return not subprocess.run(started, capture_output=True).returncode


@pytest.fixture(scope="module", params=sanitized.SANITIZERS)
def sanitizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> str:
    if not works(request.param, tmp_path_factory):
        pytest.skip(f"no sanitizer of {request.param} here")
    return request.param


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind == "elements" else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_no_reports(
    kind: str, sanitizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = recorded(kind)
    done, said = reports(launches, sanitizer, tmp_path)
    with capsys.disabled():
        print(
            f"\n{kind}, {sanitizer}: {len(launches)} launches with {THREADS} threads: "
            f"{said.count('SUMMARY:') if said else 0} reports"
        )
    assert not said
    assert done == len(launches) * len(THREADS)


#: A text of a kernel's, what takes its place, in which kind, and what is reported.
BROKEN = {
    "an element too many": (
        "memory",
        "elements",
        "run(t, lane, begin - first, stop - first);",
        "run(t, lane, begin - first, stop - first + (stop == last));",
        "heap-buffer-overflow",
    ),
    "a shift too far": (
        "memory",
        "elements",
        "int64_t low = 0, high = t.lanes;",
        "int64_t low = 0, high = t.lanes; volatile int s = 40; s = 1 << s;",
        "shift exponent",
    ),
    "no barrier": (
        "threads",
        "one number for all",
        "#pragma omp barrier",
        "",
        "data race",
    ),
    "a chunk that two threads have": (
        "threads",
        "elements",
        "int64_t begin = chunk * CHUNK, total",
        "int64_t begin = chunk / 2 * 2 * CHUNK, total",
        "data race",
    ),
}


QUICK = ("an element too many", "no barrier")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in BROKEN],
)
def test_a_broken_kernel_is_reported(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sanitizer, kind, old, new, words = BROKEN[name]
    if not works(sanitizer, tmp_path_factory):
        pytest.skip(f"no sanitizer of {sanitizer} here")
    launches = recorded(kind)
    assert any(old in x.text for x in launches)
    for launch in launches:
        launch.text = launch.text.replace(old, new)
    _, said = reports(launches, sanitizer, tmp_path)
    assert words in said
