"""What the analysis of a step's code says, asked without a compiler."""

from __future__ import annotations

import importlib
import inspect
import linecache
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from fuseopt.isolate.decorators import peel
from fuseopt.uniformity import Proof, prove
from fuseopt.uniformity.source import NoSource, Sources
from tests import papers
from tests.steps import make_params
from tests.uniformity.divergence import harmless, identity, numbers, subtle
from tests.uniformity.traps import choices

SHAPES = [(4, 3)] * 4 + [(5,)] * 4
#: Classes of packages of which a few lanes led where a dry run alone was asked; of each
#: package, so many of them lead now.
LED = {"lion_pytorch": (1, 1), "schedulefree": (5, 5), "torch_optimizer": (13, 11)}
LED["pytorch_optimizer"] = (54, 43)

#: These take another optimizer, not parameters.
WRAPPERS = ("Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "SAM", "WSAM", "TRAC")


def proof(opt: Optimizer) -> Proof:
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    _, inner = peel(type(opt).step)
    return prove(inner, opt)


def of(kind: Any, **options: Any) -> Proof:
    found = proof(kind(make_params(SHAPES), **options))
    assert "its analysis fails" not in found.refusal
    return found


#: Their code is harmless until they are sprung: see test_divergence.py.
LATER = {
    identity.OwnGradient,
    identity.SharedState,
    identity.IsKept,
    identity.Method,
    identity.ClassMethod,
}
TRAPS = [*subtle.TRAPS, *numbers.TRAPS, *identity.TRAPS]


@pytest.mark.parametrize(
    "kind", [k for k in TRAPS if k not in LATER], ids=lambda k: k.__name__
)
def test_what_tells_lanes_apart_is_refused(kind: Any) -> None:
    assert of(kind).refusal


@pytest.mark.parametrize("kind", harmless.HARMLESS, ids=lambda k: k.__name__)
def test_what_treats_lanes_alike_is_not(kind: Any) -> None:
    found = of(kind)
    assert found.refusal == ""
    assert found.codes


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize(
    "name",
    "Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop "
    "SGD".split(),
)
def test_a_step_of_torch_treats_lanes_alike(name: str, foreach: bool | None) -> None:
    assert of(getattr(torch.optim, name), foreach=foreach).refusal == ""


def test_options_of_torch() -> None:
    sgd, adam = torch.optim.SGD, torch.optim.AdamW
    for kind, options in (
        (sgd, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (sgd, {"momentum": 0.9, "foreach": True, "maximize": True}),
        (adam, {"amsgrad": True, "foreach": True}),
        (adam, {"amsgrad": True, "foreach": False, "maximize": True}),
        (adam, {"lr": torch.tensor(0.1), "capturable": True}),
    ):
        assert of(kind, **options).refusal == ""


@pytest.mark.parametrize(
    "kind",
    [c[0] for t in (papers.ELEMENTWISE, papers.INEXACT, papers.REDUCING) for c in t],
    ids=lambda k: k.__name__,
)
def test_papers_treat_lanes_alike(kind: Any) -> None:
    assert of(kind).refusal == "" or kind.__name__ == "AggMo"


@pytest.mark.family(4)
@pytest.mark.parametrize("package", LED)
def test_packages_are_led(package: str) -> None:
    """Of the classes of each that a dry run let lead, four of five lead still."""
    module = importlib.import_module(package)
    led = []
    for name, kind in sorted(vars(module).items()):
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            continue
        if inspect.isabstract(kind) or name in ("Optimizer", *WRAPPERS):
            continue
        known = inspect.signature(kind).parameters
        given = {}
        if "lr" in known and known["lr"].default is inspect.Parameter.empty:
            given["lr"] = 0.01
        try:
            opt = kind(make_params(SHAPES), **given)
        except (TypeError, ValueError, RuntimeError, AttributeError, ImportError):
            continue
        train = getattr(opt, "train", None)
        if callable(train):
            train()
        if not isinstance(opt.param_groups, list):
            continue
        found = proof(opt)
        assert "its analysis fails" not in found.refusal, name
        if not found.refusal:
            led.append(name)
    assert len(led) >= LED[package][1], led


def test_four_of_five_of_the_packages_classes() -> None:
    were, are = (sum(x[k] for x in LED.values()) for k in (0, 1))
    assert are >= 0.8 * were


# ---------------------------------------------------------------- what is said


def test_the_line_that_stands_against_it_is_named() -> None:
    why = of(numbers.Place).refusal
    lines, first = inspect.getsourcelines(numbers.Place.rate)
    line = first + next(i for i, x in enumerate(lines) if "i + 1" in x)
    path = inspect.getsourcefile(numbers.Place)
    assert why == f"it computes with the position of a lane: i + 1 ({path}:{line})"


def test_sizes_are_told() -> None:
    assert of(harmless.ByShape).sizes
    assert not of(harmless.Plain).sizes
    # so many dimensions lanes of several sizes have in common
    assert not of(harmless.ByDims).sizes


# ---------------------------------------------------------------- source and code


def test_a_function_without_source_is_refused() -> None:
    assert "its source is missing" in of(identity.Executed).refusal


def test_source_that_is_not_the_code_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "changed.py"
    text = "def f(x):\n    return x + 1\n"
    path.write_text(text)
    space: dict[str, Any] = {}
    exec(compile(text, str(path), "exec", dont_inherit=True), space)
    assert Sources().of(space["f"]).node.name == "f"
    for other in (
        text.replace("+ 1", "+ 2"),
        text.replace("+ 1", "+ 1.0"),
        text.replace("+ 1", "+ True"),
        text.replace("return x + 1", "return -x + 1"),
        "\n" + text,
        "def f(x, y=0):\n    return x + 1\n",
    ):
        path.write_text(other)
        linecache.clearcache()
        with pytest.raises(NoSource):
            Sources().of(space["f"])


def test_a_patched_method_is_what_is_read() -> None:
    opt = harmless.Plain(make_params(SHAPES))
    assert proof(opt).refusal == ""
    known = harmless.Plain.rate
    harmless.Plain.rate = numbers.Place.rate  # type: ignore[method-assign]
    try:
        assert "the position of a lane" in proof(opt).refusal
    finally:
        harmless.Plain.rate = known  # type: ignore[method-assign]


def test_an_error_of_the_analysis_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fuseopt.uniformity import iteration

    monkeypatch.setattr(iteration, "spread", lambda *_: 1 / 0)
    opt = harmless.Plain(make_params(SHAPES))
    assert "its analysis fails: ZeroDivisionError" in proof(opt).refusal


@pytest.mark.parametrize(
    "name", [x for x in vars(choices) if x.startswith(("AfterTheLoop", "Asked"))]
)
def test_a_choice_between_equals_is_a_choice(name: str) -> None:
    """Of two rates as much is known, and they are two: no second net is asked."""
    kind = getattr(choices, name)
    found = proof(kind(kind.params()))
    assert found.refusal
    assert "its analysis fails" not in found.refusal
