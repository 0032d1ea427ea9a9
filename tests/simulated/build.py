"""Builds libraries of the tests, once for each version of their text: the simulated
accelerator's is one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock

from fuseopt.runtime.folders import Folder, chosen

HERE = Path(__file__).parent
SOURCES = ("engine.cpp", "ops.cpp", "bind.cpp")
FLAGS = ("-O1", "-g0", "-std=c++20")
Make = Callable[[str, Path, Path], None]


def compiler() -> str | None:
    """The C++ compiler, or None."""
    wanted = os.environ.get("CXX", "c++")
    return shutil.which(wanted) or shutil.which("g++") or shutil.which("clang++")


def built(group: str, name: str, parts: tuple[str, ...], make: Make) -> Path:
    """A library in the user's cache folder, under a name made of a hash of its parts.

    `make(name, folder, library)` is called where it is not there yet. Processes that
    want it at once wait for the one that builds.
    """
    key = hashlib.sha256("\0".join((*parts, str(compiler()))).encode()).hexdigest()[:16]
    name = f"{name}_{key}"
    # what lies there is run: it is the user's alone, as kernels are
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(Folder.open(chosen(None), make=True))
        for part in (group, key):
            kept = stack.enter_context(kept.enter(part, make=True))
        folder = Path(kept.path)
    library = folder / f"{name}.so"
    with FileLock(folder / "lock"):
        if not library.exists():
            make(name, folder, library)
    return library


def load() -> ModuleType:
    """The library, built where it is not there yet. Raises what the compiler says."""
    text = "\0".join((HERE / name).read_text() for name in ("sim.h", *SOURCES))
    parts = (text, *FLAGS, torch.__version__, sys.version)
    library = built("simulated", "fuseopt_sim", parts, _build)
    name = library.stem
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(name: str, folder: Path, library: Path) -> None:
    """Compile in a folder of its own, and move the library to its place whole."""
    from torch.utils import cpp_extension

    cxx = compiler()
    assert cxx is not None
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    abi = int(torch.compiled_with_cxx11_abi())
    flags = [
        *FLAGS,
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-DTORCH_EXTENSION_NAME={name}",
        *(f"-isystem{path}" for path in includes),
    ]
    work = folder / "work"
    work.mkdir(exist_ok=True)
    objects = [str(work / f"{source}.o") for source in SOURCES]
    running = [
        subprocess.Popen(
            [cxx, *flags, "-c", str(HERE / source), "-o", made],
            stderr=subprocess.PIPE,
            text=True,
        )
        for source, made in zip(SOURCES, objects, strict=True)
    ]
    said = [process.communicate()[1] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError("the simulated accelerator: " + "\n".join(said))
    libraries = ("c10", "torch_cpu", "torch", "torch_python")
    paths = cpp_extension.library_paths()
    made = work / "library.so"
    subprocess.run(
        [
            *(cxx, "-shared", *objects, "-o", str(made)),
            *(f"-L{path}" for path in paths),
            *(f"-l{library}" for library in libraries),
        ],
        check=True,
    )
    os.replace(made, library)
