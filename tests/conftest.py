"""What all tests share: golden files, rewritten by `pytest --update-golden`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.counts import Counts
from tests.tools.share import quick_of

#: `make fuzz`: see tests/numerics/test_fuzz_programs.py
settings.register_profile("fuzz", print_blob=True)

#: every graph that a test compiles is checked after each pass
os.environ["FUSEOPT_CHECK"] = "1"
# which step runs is not to depend on the time that one takes
os.environ["FUSEOPT_EAGER_IF_FASTER"] = "0"

GOLDEN = Path(__file__).parent / "golden"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "mishaps: puts errors of fuseopt's own into the test on purpose"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked as a family, most are slow."""
    families: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        family = item.get_closest_marker("family")
        if family is not None and item.get_closest_marker("slow") is None:
            test, _, _ = item.nodeid.partition("[")
            families.setdefault((test, family.args[0]), []).append(item)
    for (_, many), cases in families.items():
        quick = quick_of([x.nodeid for x in cases], many)
        for item in cases:
            if item.nodeid not in quick:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call() -> Iterator[None]:
    """Let pytest not catch torch's structured trace, for which torch would put every
    graph and every guard into words.
    """
    trace = logging.getLogger("torch.__trace")
    for handler in [*trace.handlers]:
        if type(handler).__module__.startswith("_pytest."):
            trace.removeHandler(handler)
    return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/golden with what the code gives now",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: the text must be that of the file tests/golden/name."""
    update = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} is missing; make it with --update-golden"
        assert text == path.read_text(encoding="utf-8"), (
            f"{path} differs; if that is right, rewrite it with --update-golden"
        )

    return check


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Counts from here on."""
    from torch._dynamo.callback import callback_handler

    from fuseopt.compiler import pipeline

    made = Counts()
    load = pipeline._load

    def loaded(source: Any, *args: Any) -> Any:
        made.texts.add(source.text)
        return load(source, *args)

    monkeypatch.setattr(pipeline, "_load", loaded)
    callback_handler.register_start_callback(made.began)
    yield made
    callback_handler.remove_start_callback(made.began)


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The simulated accelerator: see tests/simulated. Without work, counting from 0.
    Fuseopt's kernels run there.
    """
    from fuseopt.runtime.triton.registry import DEVICES

    from . import simulated
    from .simulated.kernels import SIM

    if simulated.compiler() is None:
        pytest.skip("the simulated accelerator needs a C++ compiler")
    module = simulated.load()
    module.reset()
    module.set_available(True)
    module.reset_counters()
    monkeypatch.setitem(DEVICES, "sim", SIM)
    yield module
    module.reset()
    module.set_available(False)


@pytest.fixture(autouse=True)
def _fresh_dynamo(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget what earlier tests compiled: Dynamo gives up on `step` after eight.

    It resets the backends it was given, so not one that a test has wrapped. An error of
    fuseopt's own, after which eager ran, fails a test that is not marked `mishaps`. A
    test whose use of a capability has switched it off fails, and no later one lacks it.
    So does a test that leaves the grad mode off, and later ones have it on.
    """
    yield
    grad_enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
    session = sys.modules.get("fuseopt.compiler.session")
    if session is not None:
        mishaps = list(session.session.mishaps)
        session.session.reset()
        session.session.deferred = None
        expected = request.node.get_closest_marker("mishaps") is not None
        assert not _switched_off()
        assert expected or not mishaps
    assert grad_enabled, "the test leaves the grad mode off"


def _switched_off() -> dict[str, str]:
    """The capabilities that use has switched off, and why. They are there again."""
    from fuseopt import compat

    lacking = {x.name: (x, x.known()) for x in compat.lacking() if not x.off}
    return {name: why for name, (x, why) in lacking.items() if x.probe_again() != why}
