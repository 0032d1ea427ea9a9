"""What all benchmarks share: options, the results file, a progress bar, a deadline.

A case that the results file has, measured with the code as it is, is not measured
again; so a run that was interrupted, or that reached its deadline, goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import plan
from bench.optimizers import RECIPES
from bench.results import FOLDER, Figures, Results, results

CASES: dict[str, Any] = {
    "test_step": plan.steps,
    "test_first_step": lambda suite, device: list(plan.first_steps(suite)),
    "test_host": lambda suite, device: plan.hosts(suite),
    "test_training": lambda suite, device: plan.trainings(suite),
    "test_tail": lambda suite, device: plan.tails(device),
    "test_shards": lambda suite, device: plan.shards(device),
}
#: seconds that one compiled contender may take until its first step
CAPS = {"short": 120.0, "full": 180.0}
#: minutes after which the short suite begins no more cases
MINUTES = 14.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say what to measure, where, and for how long."""
    group = parser.getgroup("bench")
    group.addoption("--device", default="cpu", help="cpu or cuda")
    group.addoption("--suite", default="short", choices=plan.SUITES)
    group.addoption("--models", help="step cases of these models, by comma, instead")
    group.addoption("--optimizers", help="and of these optimizers only, by comma")
    group.addoption("--again", action="store_true", help="measure what is there, too")
    group.addoption(
        "--minutes", type=float, help="begin no case after so many; 0: no limit"
    )
    group.addoption("--cap", type=float, help="seconds a compiled one may take")
    group.addoption(
        "--caches", type=Path, help="keep what Inductor compiled for steps here"
    )
    group.addoption("--into", type=Path, default=FOLDER, help="folder for results")


class Bench:
    """Where cases put their figures, and how far the run is."""

    def __init__(self, config: pytest.Config) -> None:
        self.device: str = config.getoption("--device")
        self.suite: str = config.getoption("--suite")
        self.cap: float = config.getoption("--cap") or CAPS[self.suite]
        self.caches: Path | None = config.getoption("--caches")
        self.first_rounds = 1 if self.suite == "short" else 3
        self.again: bool = config.getoption("--again")
        minutes = config.getoption("--minutes")
        if minutes is None and (self.device, self.suite) == ("cpu", "short"):
            minutes = MINUTES
        self.deadline = time.monotonic() + 60 * minutes if minutes else None
        self.results: Results = results(self.device, config.getoption("--into"))
        self.kept = self.left = 0
        self.capture = config.pluginmanager.getplugin("capturemanager")
        self.bar: Any = None

    def put(self, case: plan.Case, figures: Figures) -> None:
        """Write a case's figures into the results file."""
        self.results.put(case.name, figures)

    def begin(self, cases: int) -> None:
        """Show the progress bar."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self.bar = Progress(
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            auto_refresh=False,
        )
        self.task = self.bar.add_task("", total=cases)
        self.bar.start()

    def show(self, doing: str, done: int = 0) -> None:
        """Move the progress bar."""
        with self.capture.global_and_fixture_disabled():
            self.bar.update(self.task, description=doing, advance=done)
            self.bar.refresh()


KEY = pytest.StashKey[Bench]()


def pytest_configure(config: pytest.Config) -> None:
    """Open the results file."""
    config.stash[KEY] = Bench(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each benchmark its cases."""
    if "case" in metafunc.fixturenames:
        bench = metafunc.config.stash[KEY]
        cases = CASES[metafunc.function.__name__](bench.suite, bench.device)
        if metafunc.config.getoption("--models"):
            cases = chosen(metafunc.config, metafunc.function.__name__)
        metafunc.parametrize("case", cases, ids=lambda case: case.name)


def chosen(config: pytest.Config, function: str) -> list[plan.StepCase]:
    """Return the step cases that the options name."""
    if function != "test_step":
        return []
    named = config.getoption("--optimizers")
    return [
        plan.step(model, optimizer, dtype, config.getoption("--suite"))
        for model in config.getoption("--models").split(",")
        for optimizer in (named.split(",") if named else RECIPES)
        for dtype in ("float32", "bfloat16")
    ]


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what was measured already."""
    bench = config.stash[KEY]
    if bench.again:
        return
    known = [i for i in items if bench.results.done(_case(i).name)]
    bench.kept = len(known)
    items[:] = [item for item in items if item not in known]
    config.hook.pytest_deselected(items=known)


def _case(item: pytest.Item) -> plan.Case:
    return item.callspec.params["case"]  # type: ignore[attr-defined]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the progress bar."""
    if session.items and not session.config.option.collectonly:
        session.config.stash[KEY].begin(len(session.items))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no case after the deadline."""
    bench = item.config.stash[KEY]
    bench.show(_case(item).name)
    if bench.deadline and time.monotonic() > bench.deadline:
        bench.left += 1
        pytest.skip("the time is up; run again to go on")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Move the progress bar on."""
    item.config.stash[KEY].show("", 1)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Print no dots: there is a progress bar."""
    if report.failed:
        return None
    return (report.outcome if report.when == "call" or report.skipped else "", "", "")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was not measured, and where the figures are."""
    bench = config.stash[KEY]
    if bench.bar is not None:
        bench.bar.stop()
    if bench.kept:
        terminalreporter.line(f"{bench.kept} cases were there; --again measures them")
    if bench.left:
        terminalreporter.line(f"{bench.left} cases are left: run again to go on")
    terminalreporter.line(f"figures: {bench.results.path}")


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Bench:
    """Return where figures go."""
    return request.config.stash[KEY]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Start without anything compiled: all of one class's steps share one code object,
    and Dynamo compiles it only so many times before it leaves it to eager, silently.
    """
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
