"""A torch of tomorrow: one private name is gone, or has another signature.

    python -m tests.compat.tomorrow torch._dynamo.guards:install_guard takes:3 ...

torch is imported once. For each thing a process of its own is forked, which takes that
thing away, imports fuseopt and runs the README's example, steps of an optimizer from a
paper and a function that steps, each beside eager, and doctor. One line is printed for
each: "ok", or what went wrong. `takes:3`: the third signature that is compared is
another one. `raises:NAME`: each hook of a capability raises an AttributeError.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any


def _take_away(thing: str) -> None:
    kind, _, rest = thing.partition(":")
    if kind == "takes":
        from fuseopt.compat import names

        names.parameters_of = _Signatures(names.parameters_of, int(rest))
    elif kind == "raises":
        _spoil_hooks(importlib.import_module("fuseopt.compat.patches"), rest)
    else:
        _hide(thing)


def _hide(path: str) -> None:
    """Take a name away before any module of the package has looked it up."""
    spec = importlib.util.find_spec("fuseopt")
    assert spec is not None
    assert spec.origin is not None
    home = os.path.join(os.path.dirname(spec.origin), "compat", "names.py")
    found = importlib.util.spec_from_file_location("fuseopt.compat.names", home)
    assert found is not None
    assert found.loader is not None
    names = importlib.util.module_from_spec(found)
    sys.modules["fuseopt.compat.names"] = names
    found.loader.exec_module(names)
    names.HIDDEN.add(path)


class _Signatures:
    """Says what parameters functions have; one function has others."""

    def __init__(self, said: Any, number: int = -1) -> None:
        self.said = said
        self.number = number
        #: functions, each once
        self.seen: list[str] = []

    def __call__(self, function: Any) -> list[str]:
        name = f"{function.__module__}.{function.__qualname__}"
        if name not in self.seen:
            self.seen.append(name)
        if self.seen.index(name) == self.number:
            return ["something", "other"]
        known: list[str] = self.said(function)
        return known


#: A hook that raises.
GONE = """
def gone(original, *args, **kwargs):
    raise AttributeError("a private attribute is gone")
"""


def _spoil_hooks(patches: Any, name: str) -> None:
    guarded = patches.Patcher.guarded
    # by its file, the error is one of the package's own code
    names: dict[str, Any] = {}
    exec(compile(GONE, patches.__file__, "exec"), names)

    def spoilt(self: Any, original: Any, hook: Any, **more: Any) -> Any:
        if self.capability.name != name:
            return guarded(self, original, hook, **more)

        return guarded(self, original, names["gone"], **more)

    patches.Patcher.guarded = spoilt


def signatures() -> int:
    """How many signatures are compared in a process."""
    from fuseopt.compat import names

    names.parameters_of = counting = _Signatures(names.parameters_of)
    _steps()
    return len(counting.seen)


def _steps() -> None:
    """The README's example, other steps, and doctor. Raises what is wrong."""
    import torch

    import fuseopt
    from fuseopt.cli.main import main
    from tests.compat import kinds

    model = torch.nn.Linear(64, 10)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = torch.compile(opt.step, backend="fuseopt")
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        step()
    for name in ("function AdamW", "Counts", "Looks"):
        kinds.run(name)
        torch._dynamo.reset()
    kinds.run("tail SGD, many")
    with contextlib.redirect_stdout(io.StringIO()) as told:
        status = main(["doctor"])
    assert "a step on cpu" in told.getvalue()
    assert status == 0 or "torch" in told.getvalue()
    fuseopt.reports()


def _forked(thing: str) -> str:
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        text = "ok"
        try:
            _take_away(thing)
            with contextlib.redirect_stderr(io.StringIO()):
                _steps()
        except BaseException:
            text = traceback.format_exc()
        os.write(write, text[-3000:].encode())
        os._exit(0)
    os.close(write)
    parts = [*iter(lambda: os.read(read, 4096), b"")]
    os.close(read)
    os.waitpid(process, 0)
    return b"".join(parts).decode() or "the process died"


def tried(things: list[str]) -> Iterator[tuple[str, str]]:
    """What each thing came to: "ok", or a traceback."""
    for thing in things:
        yield thing, _forked(thing)


def main(things: list[str]) -> int:
    import torch
    import torch._dynamo  # noqa: F401

    os.environ["FUSEOPT_EAGER_IF_FASTER"] = "0"
    warnings.simplefilter("ignore")
    if things == ["signatures"]:
        with contextlib.redirect_stderr(io.StringIO()):
            print(signatures())
        return 0
    wrong = 0
    for thing, came_to in tried(things):
        wrong += came_to != "ok"
        print(thing, came_to, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
