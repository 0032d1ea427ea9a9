"""Checks of `doctor`: one function for each question, one Finding for each answer."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .cache import megabytes, usage

#: Group and name of the entry point by which Dynamo finds the backend.
ENTRY_POINT = ("torch_dynamo_backends", "fuseopt")


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`.

    `state`: "ok", "warn" (works, but slower or in part) or "fail" (steps run in eager).
    `text`: the text of the line. `remedy`: the command or the setting that fixes it;
    empty if nothing is wrong.
    """

    name: str
    state: str
    text: str
    remedy: str = ""


def python() -> Finding:
    """Report the interpreter and the machine."""
    version = platform.python_version()
    return Finding("python", "ok", f"{version} on {platform.platform(terse=True)}")


def torch_version() -> Finding:
    """Check that torch is installed, in a version that passes all tests."""
    try:
        import torch
    except ImportError as error:
        return Finding("torch", "fail", str(error), "pip install 'torch>=2.11'")
    from .. import compat
    from ..config import CHECKED

    version, unchecked = torch.__version__, compat.unchecked()
    if unchecked:
        first, end = (".".join(map(str, x)) for x in CHECKED)
        state = "fail" if "older" in unchecked else "warn"
        remedy = f"pip install 'torch>={first},<{end}'"
        return Finding("torch", state, unchecked, remedy)
    return Finding("torch", "ok", version)


def capabilities() -> Finding:
    """Check for the private parts of torch that fuseopt needs."""
    from .. import compat
    from ..compiler.entry import attach

    attach()
    compat.patches.build()
    for x in compat.switches.table.values():
        x.available()
    every, lacking = len(compat.switches.table), compat.lacking()
    unknown = sorted(
        compat.switches.requested() - compat.switches.table.keys() - {"all"}
    )
    detail = [f"{every - len(lacking)} of {every} are there"]
    detail += [f"{x.name}: {x.missing()}. Without: {x.without}" for x in lacking]
    detail += [f"FUSEOPT_WITHOUT names {x!r}, which there is not" for x in unknown]
    state = "warn" if lacking or unknown else "ok"
    remedy = "" if state == "ok" else "python -m fuseopt doctor --verbose"
    if any(not x.off for x in lacking):
        remedy = "pip install a torch that was checked; report this line"
    elif lacking or unknown:
        remedy = "unset FUSEOPT_WITHOUT"
    return Finding("parts of torch", state, "\n".join(detail), remedy)


def entry_point() -> Finding:
    """Check that `torch.compile(..., backend="fuseopt")` finds the backend by name."""
    group, name = ENTRY_POINT
    if any(x.name == name for x in importlib.metadata.entry_points(group=group)):
        return Finding("entry point", "ok", f"torch finds the backend {name!r}")
    return Finding(
        "entry point",
        "warn",
        f"torch does not find the backend {name!r} by its name",
        "pip install fuseopt (or `import fuseopt.backend` and pass "
        "`backend=fuseopt.fuseopt`)",
    )


def compiler() -> Finding:
    """Check for a C++ compiler for tensors on the CPU, or for prebuilt kernels."""
    from ..errors import CompilerMissing
    from ..runtime.cpp import prebuilt
    from ..runtime.cpp.toolchain import find_compiler

    try:
        return Finding("C++ compiler", "ok", find_compiler().name)
    except CompilerMissing as error:
        kernels = prebuilt.count()
        detail = (
            f"{error}\n{kernels} kernels of common steps came with the package: they "
        )
        detail += f"run without one, for {(*prebuilt.levels(), '')[0]}; others in eager"
        state, text = ("warn", detail) if kernels else ("fail", str(error))
        return Finding("C++ compiler", state, text, "apt install g++")


def triton() -> Finding:
    """Check for Triton, which compiles kernels for a GPU."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        detail = "not installed: steps of tensors on a GPU run in eager"
        return Finding("triton", "warn", detail, "pip install triton")
    return Finding("triton", "ok", version)


def cache() -> Finding:
    """Check that fuseopt may use the folder of built kernels, and report its size."""
    from ..config import resolve
    from ..runtime.folders import chosen

    folder = chosen(resolve(None, None).cache_dir)
    try:
        kernels, size = usage(folder)
    except FileNotFoundError:
        return Finding("kernel cache", "ok", f"{folder}, not made yet")
    except OSError as error:
        return Finding("kernel cache", "warn", str(error), f"chmod -R go-w {folder}")
    detail = f"{folder}: {kernels:,} kernels, {megabytes(size)}"
    return Finding("kernel cache", "ok", detail)


def gpu() -> Finding:
    """Report the GPU and the version of CUDA."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        detail = "none that torch can use" if built else "none: torch is a CPU build"
        return Finding("GPU", "ok", detail)
    where = torch.cuda.get_device_properties(0)
    more = torch.cuda.device_count() - 1
    detail = f"{where.name}, {where.total_memory / 2**30:.0f} GiB"
    detail += f", compute capability {where.major}.{where.minor}"
    detail += f", and {more} more" if more else ""
    return Finding("GPU", "ok", f"{detail}; CUDA {torch.version.cuda}")


def step_on(device: str) -> Finding:
    """Compile a small step on a device, run it, compare it with eager's bits."""
    import torch

    import fuseopt

    from .trial import Trial

    name = f"a step on {device}"
    drawn = torch.Generator().manual_seed(0)
    start = [torch.randn(7, generator=drawn).to(device) for _ in range(4)]
    grads = [torch.randn(7, generator=drawn).to(device) for _ in range(4)]
    mine, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    try:
        optimizer = fuseopt.compile(Trial(mine), fallback="error")
        plain = Trial(theirs)
        for _ in range(2):
            for p, q, g in zip(mine, theirs, grads, strict=True):
                p.grad, q.grad = g.clone(), g.clone()
            optimizer.step()
            plain.step()
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Finding(
            name, "fail", first, "TORCH_LOGS=dynamo python -m fuseopt doctor"
        )
    if not all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True)):
        return Finding(name, "fail", "its bits are not eager's", "please report it")
    launches = fuseopt.reports()[-1].launches
    return Finding(name, "ok", f"{launches} launch, the bits of eager")


def all_checks() -> Iterator[Callable[[], Finding]]:
    """Yield the checks for this machine, in order; a later check may need an earlier
    one.
    """
    yield from (python, torch_version, entry_point, compiler, triton, cache)
    try:
        import torch
    except ImportError:
        return
    yield capabilities
    yield gpu
    yield lambda: step_on("cpu")
    if torch.cuda.is_available():
        yield lambda: step_on("cuda")
