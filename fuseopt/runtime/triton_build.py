"""Triton source -> an imported module, through a folder of files.

`TritonBuilder.load` turns generated text into a `TritonModule`; `compile_offline`
compiles text for a GPU that need not be there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..codegen.target import Source
from ..errors import BuildError
from .build import default_cache_dir

log = logging.getLogger("fuseopt")

#: The kernel's parameters: tables by type, then sizes that are compiled in.
TABLES = {
    "chunks": "*i32",
    "lanes": "*i64",
    "rows": "*fp64",
    "geometry": "*i64",
    "tickets": "*i32",
    "partials": "*i64",
}
SIZES = ("BLOCK", "REST")


@dataclass(frozen=True)
class TritonModule:
    """Generated text, imported. `interpreted`: it runs in Triton's interpreter."""

    entry: Any
    sizes: Mapping[str, int]
    options: Mapping[str, Any]
    path: Path
    interpreted: bool
    #: kept alive: it may own the folder in which `path` lies
    builder: TritonBuilder


class TritonBuilder:
    """Imports generated modules from files and counts what it did.

    A jitted function must live in a file. `builds`: files written; `disk_hits`: files
    that were there; `memory_hits`: modules this process had imported.
    """

    def __init__(self) -> None:
        self.builds = 0
        self.disk_hits = 0
        self.memory_hits = 0
        self._loaded: dict[tuple[str, bool], TritonModule] = {}
        self._scratch: str | None = None
        self._lock = threading.Lock()

    def load(
        self, source: Source, cache_dir: str | None, interpret: bool | None = None
    ) -> TritonModule:
        """The module of a Triton source.

        `interpret`: jit for the interpreter or for a GPU; None does as TRITON_INTERPRET
        says. Raises BuildError if triton is missing or refuses the text.
        """
        try:
            import triton
        except ImportError as error:
            raise BuildError(
                "the triton target needs the triton package: pip install triton"
            ) from error
        flag = bool(triton.knobs.runtime.interpret)
        wanted = flag if interpret is None else interpret
        key = hashlib.sha256(source.text.encode()).hexdigest()[:32]
        with self._lock:
            if (key, wanted) in self._loaded:
                self.memory_hits += 1
                return self._loaded[key, wanted]
            path = self._file(cache_dir, key, source.text)
            # the flag is read when a function is decorated
            with triton.knobs.runtime.scope():
                triton.knobs.runtime.interpret = wanted
                module = _import(f"fuseopt_{key}", path)
            loaded = TritonModule(
                getattr(module, source.entry),
                {name: getattr(module, name) for name in SIZES},
                module.OPTIONS,
                path,
                wanted,
                self,
            )
            self._loaded[key, wanted] = loaded
            return loaded

    def _file(self, cache_dir: str | None, key: str, text: str) -> Path:
        folder = Path(cache_dir) if cache_dir else default_cache_dir()
        try:
            return self._write(folder, key, text)
        except OSError as error:
            log.warning(
                "kernel cache %s cannot be used (%s); writing to a temporary folder",
                folder,
                error,
            )
        if self._scratch is None:
            self._scratch = tempfile.mkdtemp(prefix="fuseopt-")
            weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        return self._write(Path(self._scratch), key, text)

    def _write(self, folder: Path, key: str, text: str) -> Path:
        """The file of a text, written beside its place and moved there, so whole."""
        path = folder / key[:2] / f"fuseopt_{key}.py"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.read_text() == text:
                self.disk_hits += 1
                return path
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".build-")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        self.builds += 1
        return path


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BuildError(f"triton refused generated source {path}: {error}") from error
    return module


def ast_source(module: TritonModule) -> Any:
    """What triton.compile takes: the entry, and what is known of its arguments.

    Every table begins at a multiple of 16 bytes.
    """
    from triton.compiler import ASTSource

    return ASTSource(
        fn=module.entry,
        signature={**TABLES, **dict.fromkeys(SIZES, "constexpr")},
        constexprs=dict(module.sizes),
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(TABLES))},
    )


def compile_offline(
    source: Source, target: str, cache_dir: str | None = None
) -> dict[str, Any]:
    """What Triton makes of a source for `target` ("sm_90", "gfx942"), with no GPU here.

    The result maps stages to their text ("ttir", "ptx", "amdgcn") or bytes ("cubin",
    "hsaco"). Raises BuildError.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    if target.startswith("sm_"):
        gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    elif target.startswith("gfx"):
        gpu = GPUTarget("hip", target, 64 if target.startswith("gfx9") else 32)
    else:
        raise BuildError(f"unknown GPU {target!r}: expected sm_<number> or gfx<number>")
    module = TritonBuilder().load(source, cache_dir, interpret=False)
    try:
        compiled = triton.compile(
            ast_source(module), target=gpu, options=dict(module.options)
        )
    except Exception as error:
        message = f"triton refused {module.path} for {target}: {error}"
        raise BuildError(message) from error
    return dict(compiled.asm)
