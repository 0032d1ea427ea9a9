"""What the tests of the kernel cache share: small sources, other processes, users."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import resource
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import filelock  # noqa: F401 - before a child without rights needs it

from fuseopt.codegen import Source
from fuseopt.errors import FuseoptError
from fuseopt.runtime.cpp.build import Builder

TEXT = 'extern "C" int answer() { return %d; }\n'
#: The user and group that own nothing.
NOBODY = 65534


def source(number: int) -> Source:
    return Source("cpp", TEXT % number, "answer", ())


def run(
    folder: Path | str,
    *numbers: int,
    user: int | None = None,
    umask: int | None = None,
    limit: int | None = None,
    before: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], str]:
    """What another process makes of sources: its counts, and what it says.

    It is forked, so that it needs no rights to read Python. `user` has no group but the
    one of that number; `limit`: bytes in a file that it writes. `before` runs in it.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir("/")
            if umask is not None:
                os.umask(umask)
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            if user is not None:
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            before()
            with os.fdopen(write, "w") as pipe:
                json.dump(_loaded(folder, numbers), pipe)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    found, said = json.loads(told)
    return found, said


def _loaded(folder: Path | str, numbers: Sequence[int]) -> tuple[dict[str, Any], str]:
    said = io.StringIO()
    log = logging.getLogger("fuseopt")
    log.handlers[:] = [logging.StreamHandler(said)]
    b = Builder()
    found: dict[str, Any] = {}
    try:
        answers = [b.load(source(n), str(folder), False).answer() for n in numbers]
        found["answers"] = answers
    except FuseoptError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found.update(builds=b.builds, disk_hits=b.disk_hits)
    return found, said.getvalue()


def warnings_of(text: str) -> list[str]:
    """The lines by which a process says that its cache will not do."""
    words = ("cannot be used", "is not used", "is damaged", "does not load")
    return [line for line in text.splitlines() if any(w in line for w in words)]


def plant(folder: Path, number: int, other: int) -> Path:
    """Put a library that answers with `other` where that of `number` belongs.

    Its checksum is right. Returns the library's path.
    """
    Builder().load(source(number), str(folder), False)
    (library,) = folder.glob("*/*.so")
    elsewhere = folder.parent / f"{folder.name}-elsewhere"
    Builder().load(source(other), str(elsewhere), False)
    (made,) = elsewhere.glob("*/*.so")
    for path, content in (
        (library, made.read_bytes()),
        (
            library.with_suffix(".sha256"),
            hashlib.sha256(made.read_bytes()).hexdigest().encode(),
        ),
    ):
        path.unlink()
        path.write_bytes(content)
        path.chmod(0o600)
    return library


def modes(folder: Path) -> dict[str, int]:
    """The modes of a folder and of all in it, by path."""
    found = [folder, *folder.rglob("*")]
    return {str(path): path.lstat().st_mode & 0o777 for path in found}


def left(folder: Path) -> list[Path]:
    """The folders of builds that did not end."""
    return list(folder.rglob(".build-*"))
