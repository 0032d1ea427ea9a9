"""Import Triton source as a module, through a folder of files.

`TritonBuilder.load` turns generated text into a `TritonModule`. `compile_offline`
compiles text for a GPU that need not be there.
"""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ...codegen.target import Source
from ...errors import BuildError, CannotBuild
from ...locks import new_lock
from ..folders import Folder, Private, chosen

log = logging.getLogger("fuseopt")

#: Parameters of the kernel: tables by type, then sizes that are compiled in.
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
    """Imported generated text. `interpreted` is true in Triton's interpreter."""

    entry: Any
    sizes: Mapping[str, int]
    options: Mapping[str, Any]
    path: Path
    interpreted: bool
    #: kept alive: it may own the folder in which `path` lies
    builder: TritonBuilder


class TritonBuilder:
    """Importer of generated modules from files, with counts of what it did.

    The files are for readers of messages and profiles. Python and Triton take the text
    itself. `builds` counts files written, `disk_hits` files that existed, `memory_hits`
    modules that this process had imported.
    """

    def __init__(self) -> None:
        self.builds = 0
        self.disk_hits = 0
        self.memory_hits = 0
        self._loaded: dict[tuple[str, bool], TritonModule] = {}
        self._private = Private()
        self._shunned: set[str] = set()
        self._lock = new_lock()

    def load(
        self, source: Source, cache_dir: str | None, interpret: bool | None = None
    ) -> TritonModule:
        """Return the module of a Triton source.

        `interpret` chooses jit for the interpreter or for a GPU; None follows
        TRITON_INTERPRET. Raises BuildError if triton is missing or refuses the text,
        CannotBuild where nothing can be written.
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
            # jit reads the flag when it decorates a function
            with triton.knobs.runtime.scope():
                triton.knobs.runtime.interpret = wanted
                module = _import(f"fuseopt_{key}", path, source.text)
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
        folder = chosen(cache_dir)
        if folder not in self._shunned:
            try:
                return self._write(folder, key, text)
            except OSError as error:
                self._shunned.add(folder)
                log.warning(
                    "kernel cache %s cannot be used (%s); writing to a temporary "
                    "folder",
                    folder,
                    error,
                )
        try:
            return self._write(self._private.path, key, text)
        except OSError as error:
            raise CannotBuild(
                f"no kernel can be written: neither {folder} nor a temporary folder "
                f"can be used ({error})."
            ) from error

    def _write(self, folder: str, key: str, text: str) -> Path:
        """Write the file of a text under a temporary name, and move it: it is whole."""
        name, content = f"fuseopt_{key}.py", text.encode()
        with contextlib.ExitStack() as stack:
            root = stack.enter_context(Folder.open(folder, make=True))
            place = stack.enter_context(root.enter(key[:2], make=True))
            path = Path(place.path, name)
            with contextlib.suppress(OSError):
                if place.read(name) == content:
                    self.disk_hits += 1
                    return path
            new = f".build-{secrets.token_hex(4)}"
            try:
                place.write(new, content)
                place.move(new, place, name)
            except OSError:
                place.remove(new)
                raise
        self.builds += 1
        return path


def _import(name: str, path: Path, text: str) -> ModuleType:
    """Return the module of a text, without reading the file."""
    module = ModuleType(name)
    module.__file__ = str(path)
    # Python, and with it Triton, looks up the source of a function here
    lines = text.splitlines(keepends=True)
    linecache.cache[str(path)] = len(text), None, lines, str(path)
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise BuildError(f"triton refused generated source {path}: {error}") from error
    return module


def ast_source(module: TritonModule) -> Any:
    """Return the argument of triton.compile: the entry, with facts on its arguments.

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
    """Return Triton's output of a source for `target` ("sm_90", "gfx942"), without a
    GPU.

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
