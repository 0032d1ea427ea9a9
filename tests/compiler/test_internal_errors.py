"""Errors of fuseopt's own, put into each phase: one warning, a folder, eager's bits."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

import fuseopt
from fuseopt.backend import fuseopt as backend
from fuseopt.capture import trace
from fuseopt.capture.aten.recorder import Recorder
from fuseopt.codegen import CppTarget
from fuseopt.compiler import partition, pipeline
from fuseopt.errors import BuildError, GraphError, InternalError
from fuseopt.replicate import step as led_step
from fuseopt.runtime.binding import Binding
from fuseopt.runtime.step import CompiledStep

pytestmark = pytest.mark.mishaps

#: Where an error strikes: what is replaced, by name.
PHASES: dict[str, tuple[Any, str]] = {
    "decide": (partition, "_sides"),
    "capture": (trace, "Interpreter"),
    "record": (Recorder, "emit"),
    "schedule": (pipeline, "schedule"),
    "render": (CppTarget, "render"),
    "plan": (pipeline, "Plan"),
    "build": (pipeline, "_load"),
    "bind": (Binding, "_table"),
    "move": (Binding, "move"),
    "look": (CompiledStep, "_adapt"),
}
ERRORS = {
    "KeyError": KeyError(26),
    "AssertionError": AssertionError(),
    "RecursionError": RecursionError("maximum recursion depth exceeded"),
    "GraphError": GraphError("v0 is read before it is written"),
    "BuildError": BuildError("the compiler refused it"),
}
WAYS = [("torch.compile", 3), ("fuseopt.compile", 3), ("fuseopt.compile", 16)]


class Pair:
    """An optimizer that is compiled, and its eager twin."""

    def __init__(self, way: str, lanes: int, **options: Any) -> None:
        torch.manual_seed(0)
        values = [torch.randn(5, 3) for _ in range(lanes)]
        self.mine = [torch.nn.Parameter(v.clone()) for v in values]
        self.theirs = [torch.nn.Parameter(v.clone()) for v in values]
        self.optimizer = SGD(self.mine, lr=0.1, momentum=0.9)
        self.plain = SGD(self.theirs, lr=0.1, momentum=0.9)
        if way == "torch.compile":
            self.call: Any = torch.compile(
                self.optimizer.step, backend=backend, options=options or None
            )
        else:
            self.call = fuseopt.compile(self.optimizer, **options).step

    def set_grads(self) -> None:
        for p, q in zip(self.mine, self.theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.set_grads()
            self.call()
            self.plain.step()
            self.check()

    def check(self) -> None:
        for p, q in zip(self.mine, self.theirs, strict=True):
            assert torch.equal(p, q)
            one, other = self.optimizer.state[p], self.plain.state[q]
            assert one.keys() == other.keys()
            assert all(torch.equal(one[k], other[k]) for k in one)


def raising(error: BaseException) -> Callable[..., Any]:
    def strike(*_: Any, **__: Any) -> Any:
        raise error

    return strike


def folders(messages: list[str]) -> list[Path]:
    """The folders that messages name."""
    found = [re.search(r"details in (\S+?)[.]? ", m) for m in messages]
    return [Path(m.group(1)) for m in found if m]


def of_fuseopt(caught: list[warnings.WarningMessage]) -> list[str]:
    texts = [str(w.message) for w in caught]
    return [t for t in texts if "internal error" in t]


@pytest.mark.family(32)
@pytest.mark.parametrize(("way", "lanes"), WAYS)
@pytest.mark.parametrize("phase", PHASES)
def test_an_error_costs_one_warning(
    phase: str, way: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, name = PHASES[phase]
    monkeypatch.setattr(home, name, raising(KeyError(26)))
    pair = Pair(way, lanes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair.step(4)
    texts = of_fuseopt(caught)
    # a led step is traced whole first; the same error is told once
    assert len(texts) == 1, texts
    assert "KeyError: 26" in texts[0]
    (folder,) = folders(texts)
    assert "KeyError: 26" in (folder / "traceback.txt").read_text()
    assert "placeholder" in (folder / "graph.txt").read_text()
    assert torch.__version__ in (folder / "versions.txt").read_text()
    assert (folder.stat().st_mode & 0o777) == 0o700
    assert any("internal error" in r.fallback for r in fuseopt.reports())


@pytest.mark.family(5)
@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("phase", ["schedule", "bind"])
def test_whatever_it_is(name: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home, function = PHASES[phase]
    monkeypatch.setattr(home, function, raising(ERRORS[name]))
    pair = Pair("torch.compile", 3)
    with pytest.warns(RuntimeWarning, match=f"internal error .{name}"):
        pair.step(3)


@pytest.mark.family(32)
@pytest.mark.parametrize(("way", "lanes"), WAYS)
@pytest.mark.parametrize("phase", PHASES)
def test_fallback_error_raises_and_nothing_is_written(
    phase: str, way: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, name = PHASES[phase]
    monkeypatch.setattr(home, name, raising(KeyError(26)))
    pair = Pair(way, lanes, fallback="error")
    pair.set_grads()
    before = [p.detach().clone() for p in pair.mine]
    for _ in range(2):
        with pytest.raises(Exception, match="KeyError: 26") as raised:
            pair.call()
        assert InternalError.__name__ in f"{raised.type.__name__}: {raised.value}"
    assert all(map(torch.equal, pair.mine, before))


@pytest.mark.family(16)
@pytest.mark.parametrize("way", ["torch.compile", "fuseopt.compile"])
@pytest.mark.parametrize("phase", [p for p in PHASES if p != "decide"])
def test_an_error_at_a_later_call(
    phase: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tensors come, for which the step is to be planned anew."""
    pair = Pair(way, 3)
    pair.step(3)
    home, name = PHASES[phase]
    monkeypatch.setattr(home, name, raising(KeyError(26)))
    for own, optimizer in ((pair.mine, pair.optimizer), (pair.theirs, pair.plain)):
        for p in own:
            p.data, p.grad = p.data.double(), None
            for state in [optimizer.state[p]]:
                state["momentum_buffer"] = state["momentum_buffer"].double()
    with pytest.warns(RuntimeWarning, match="KeyError: 26"):
        pair.step()
    monkeypatch.undo()
    pair.step(2)


@pytest.mark.slow
def test_an_error_of_the_led_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is traced whole, and compiled."""
    monkeypatch.setattr(led_step, "extend", raising(KeyError(26)))
    pair = Pair("fuseopt.compile", 16)
    with pytest.warns(RuntimeWarning, match=r"KeyError: 26.*traced whole"):
        pair.step(3)
    assert fuseopt.reports()[-1].launches == 1
    assert "internal error" in fuseopt.reports()[-1].traced


@pytest.mark.family(4)
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("phase", ["capture", "schedule", "bind", "move"])
def test_what_is_not_ours_passes(
    error: type[BaseException], phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, name = PHASES[phase]
    monkeypatch.setattr(home, name, raising(error("stop")))
    pair = Pair("torch.compile", 3)
    pair.set_grads()
    before = [p.detach().clone() for p in pair.mine]
    with pytest.raises(BaseException, match="stop") as raised:
        pair.call()
    assert error.__name__ in f"{raised.type.__name__}: {raised.value}"
    assert all(map(torch.equal, pair.mine, before))
    monkeypatch.undo()
    pair.plain.step()
    if error is not MemoryError:
        torch._dynamo.reset()
    pair.call()
    pair.check()


def test_a_folder_of_the_users_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "schedule", raising(KeyError(26)))
    pair = Pair("torch.compile", 3, dump_dir=str(tmp_path / "dumps"))
    with pytest.warns(RuntimeWarning, match=re.escape(str(tmp_path / "dumps"))):
        pair.step()
    assert (tmp_path / "dumps" / "step0" / "traceback.txt").exists()


def test_where_no_folder_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step goes on all the same."""
    from fuseopt.compiler import internal_errors

    monkeypatch.setattr(
        internal_errors.tempfile, "mkdtemp", raising(OSError("disk full"))
    )
    monkeypatch.setattr(pipeline, "schedule", raising(KeyError(26)))
    (tmp_path / "file").write_text("")
    pair = Pair("torch.compile", 3, dump_dir=str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match=r"KeyError: 26.*disk full"):
        pair.step(2)
