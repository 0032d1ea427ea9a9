"""Handle an error of fuseopt's own: warn once, dump a bug report, run in eager.

An error during the preparation of a step costs only time: nothing was written yet, and
eager can run the step.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ..config import Config
from ..errors import BuildError, FuseoptError, GraphError, InternalError
from .dump import new_folder, write_text
from .session import session

#: Errors of a full memory; the next call may have more.
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
#: Errors that reach the user, and those of a full memory.
PASSED = (FuseoptError, *OUT_OF_MEMORY)
#: Those among them that are a defect of fuseopt.
DEFECTS = (GraphError, BuildError)


def is_mishap(error: BaseException) -> bool:
    """Is an error that planning raised a defect of fuseopt, not meant for the user?"""
    if isinstance(error, DEFECTS):
        return True
    return isinstance(error, Exception) and not isinstance(error, PASSED)


def report(
    error: Exception, gm: GraphModule, args: Sequence[Any], config: Config, then: str
) -> str:
    """Dump a folder for an error and warn once; return the message.

    `then`: a sentence on how the step goes on. Raises InternalError with
    fallback="error".
    """
    line = str(error).strip().partition("\n")[0]
    what = f"{type(error).__name__}: {line}" if line else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    about = f"mishap {what} {place}"
    message = f"an internal error ({what})"
    if about not in session.warned or config.fallback == "error":
        folder = _written(error, gm, args, config)
        message = f"{message}; {folder}"
    if config.fallback == "error":
        raise InternalError(
            f"{message} (options={{'fallback': 'error'}} was given)"
        ) from error
    session.mishaps.append(what)
    session.warn_once(
        f"fuseopt: {message}. {then} Please report this to fuseopt, with that folder.",
        about,
    )
    return message


def _written(
    error: Exception, gm: GraphModule, args: Sequence[Any], config: Config
) -> str:
    """Dump a folder for an error; return a text that names the folder."""
    try:
        folder = _folder(config)
    except OSError as why:
        return f"the details could not be written ({why})"
    texts: dict[str, Callable[[], str]] = {
        "traceback.txt": lambda: "".join(traceback.format_exception(error)),
        "graph.txt": lambda: f"{gm.graph}\n",
        "code.py": lambda: str(gm.code),
        "inputs.txt": lambda: "\n".join(_inputs(gm, args)) + "\n",
        "versions.txt": lambda: _versions(config),
    }
    for name, text in texts.items():
        # a text that cannot be made must not prevent the others
        with contextlib.suppress(Exception):
            write_text(folder / name, text())
    return f"details in {folder}"


def _folder(config: Config) -> Path:
    """Return a folder of the user's choice, or a private temporary one."""
    if config.dump_dir:
        with contextlib.suppress(OSError):
            return new_folder(config.dump_dir)
    return Path(tempfile.mkdtemp(prefix="fuseopt_error_"))


def _inputs(gm: GraphModule, args: Sequence[Any]) -> Iterator[str]:
    """Yield a line for each tensor or number of a call, without contents of tensors."""
    named = [*gm._buffers.items(), *gm._parameters.items()]
    named += [(f"argument {i}", x) for i, x in enumerate(args)]
    for name, x in named:
        if isinstance(x, torch.Tensor):
            layout = (x.dtype, x.device, tuple(x.shape), x.layout)
            yield f"{name}: {type(x).__name__} {layout}"
        else:
            yield f"{name}: {x!r}"


def _versions(config: Config) -> str:
    from .. import __version__

    return (
        f"fuseopt {__version__}\ntorch {torch.__version__}\n"
        f"python {sys.version}\n{platform.platform()}\n{config}\n"
    )
