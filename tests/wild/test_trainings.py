"""Public packages train with a compiled step, in one changed line, to the same bits."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.compiler.session import session
from tests.steps import same_bits
from tests.wild.launched import launched
from tests.wild.trained import STEPS, Trained, state_of
from tests.wild.trainings import TRAININGS, Training

#: Warnings of the packages are their own; those of fuseopt are looked for in each run.
pytestmark = pytest.mark.filterwarnings("default")


def each(trainings: list[Training]) -> pytest.MarkDecorator:
    """For each of some trainings."""
    return pytest.mark.parametrize("training", trainings, ids=lambda t: t.name)


def in_eager(given: Any) -> Any:
    return given


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums of a forward have the same order in both runs, however busy the machine."""
    known = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(known)


@contextmanager
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What fuseopt and Dynamo warn of; the packages' own warnings are their own."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    told += [str(w.message) for w in caught if _ours(f"{w.filename} {w.message}")]
    told += [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and _ours(record.name)
    ]


def _ours(text: str) -> bool:
    return "fuseopt" in text or "dynamo" in text


def run(training: Training, train: Callable[[], Trained], caplog: Any) -> Trained:
    """A training in which nothing is to be heard of fuseopt."""
    with heard(caplog) as told:
        trained = train()
    assert told == []
    return trained


def differences(want: Trained, got: Trained) -> list[str]:
    """Names of what differs between two trainings."""
    pairs = (
        (want.tensors, got.tensors),
        (state_of(want.optimizers), state_of(got.optimizers)),
    )
    found = []
    for wanted, gotten in pairs:
        assert wanted
        found += sorted(wanted.keys() ^ gotten.keys())
        for name in wanted.keys() & gotten.keys():
            if not same(wanted[name], gotten[name]):
                found.append(name)
    return found


def same(want: object, got: object) -> bool:
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        return same_bits(got.detach(), want.detach())
    return type(want) is type(got) and (want == got or want is got)


def assert_compiled(training: Training) -> None:
    """Nothing ran in eager, or as a call of ATen where products of matrices do."""
    assert not session.eager
    reports = fuseopt.reports()
    assert reports
    assert [r.fallback for r in reports if r.fallback] == []
    assert any(r.externs for r in reports) == training.externs


def skip_without(training: Training) -> None:
    if training.missing:
        pytest.skip(training.missing)


@each(TRAININGS)
def test_the_bits_are_eagers(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    skip_without(training)
    eager = run(training, lambda: training.train(in_eager), caplog)
    assert fuseopt.reports() == []
    with launched() as launches:
        compiled = run(training, lambda: training.train(training.line()), caplog)
    assert differences(eager, compiled) == []
    assert_compiled(training)
    assert launches.count == training.launches


@each([t for t in TRAININGS if t.resumed == "whole"])
def test_a_training_that_is_resumed_ends_as_one_that_is_not(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    skip_without(training)
    eager = run(training, lambda: training.train(in_eager), caplog)
    line = training.line()
    compiled = run(training, lambda: training.resume(line, tmp_path), caplog)
    assert differences(eager, compiled) == []
    assert_compiled(training)


@each([t for t in TRAININGS if t.resumed == "halves"])
def test_a_training_is_resumed_as_eager_resumes_it(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not end as one that is not interrupted, for what `why` says."""
    skip_without(training)
    folders = [tmp_path / name for name in ("eager", "compiled")]
    for folder in folders:
        folder.mkdir()
    resume, line = training.resume, training.line()
    eager = run(training, lambda: resume(in_eager, folders[0]), caplog)
    compiled = run(training, lambda: resume(line, folders[1]), caplog)
    assert differences(eager, compiled) == []
    assert_compiled(training)
    assert training.why
    assert differences(training.train(in_eager), eager) != []


@pytest.mark.family(4)
@pytest.mark.parametrize("first", ["eager", "compiled"])
def test_a_checkpoint_goes_either_way(first: str, tmp_path: Path) -> None:
    """From eager to a compiled step, and back."""
    from tests.wild import nanogpt

    turns = iter([in_eager, fuseopt.compile][:: 1 if first == "eager" else -1])
    resumed = nanogpt.resume(lambda optimizer: next(turns)(optimizer), tmp_path)
    assert differences(nanogpt.train(in_eager), resumed) == []
    assert len(fuseopt.reports()) == 1


@each(TRAININGS)
def test_so_many_lines_change(training: Training) -> None:
    assert training.changed_lines() == training.lines


def test_the_trainers_fused_optimizer_has_the_bits_of_its_plain_one() -> None:
    """Not those of torch's fused kernel, for which `Trainer` asks unless it is told."""
    (training,) = [t for t in TRAININGS if t.file == "transformers_trainer"]
    skip_without(training)
    plain = training.train(in_eager)
    fused = replace(training, more={"optim": "adamw_torch_fused"})
    compiled = fused.train(training.line())
    assert compiled.optimizers[0].param_groups[0]["fused"]
    options = {"fused", "foreach"}
    found = differences(plain, compiled)
    assert {name.split()[1] for name in found} <= options
    assert_compiled(training)


def test_a_difference_is_seen() -> None:
    """A training whose rate is a little another one."""
    from tests.wild import nanogpt

    def slower(optimizer: Any) -> Any:
        optimizer.defaults["eps"] = optimizer.param_groups[1]["eps"] = 1.1e-8
        return optimizer

    found = differences(nanogpt.train(in_eager), nanogpt.train(slower))
    assert "0: eps of group 1" in found
    assert "0.norm.weight" in found


def test_launches_are_counted() -> None:
    """Those of one optimizer, and not those that eager does in its place."""
    from tests.wild import nanogpt

    def stops(optimizer: Any) -> Any:
        steps = iter(range(STEPS))
        plain = optimizer.step
        step = torch.compile(optimizer.step, backend="fuseopt")
        optimizer.step = lambda: step() if next(steps) < 5 else plain()
        return optimizer

    with launched() as launches:
        nanogpt.train(stops)
    assert launches.count == 5
