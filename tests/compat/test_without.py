"""Each capability is switched off: a step has eager's bits, or says that it is eager.

The steps are those of kinds.py. With all of them off, steps whose plain trace has
eager's bits are still one launch: that is the floor for any torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import fuseopt
from fuseopt import compat
from fuseopt.compiler.entry import attach
from tests.compat import kinds
from tests.versions import knows_lerp, sets_no_attribute

attach()
CAPABILITIES = sorted(compat.switches.table)

#: All kinds; one of them has no trace in torch 2.11.
COMPILED = [
    pytest.param(x, marks=sets_no_attribute if x == "Counts" else ())
    for x in kinds.NAMES
]


@pytest.mark.family(40)
@pytest.mark.parametrize("kind", COMPILED)
def test_with_all_there(kind: str) -> None:
    reports = kinds.run(kind)
    assert any(report.launches for report in reports)
    assert not any(report.lacks for report in reports)


@pytest.mark.family(36)
@pytest.mark.parametrize("kind", kinds.NAMES)
def test_with_all_off(kind: str) -> None:
    with compat.switches.without("all"):
        reports = kinds.run(kind)
    for report in reports:
        assert report.launches or report.fallback or report.kernels == []


@pytest.mark.family(3120)
@pytest.mark.parametrize("kind", kinds.NAMES)
@pytest.mark.parametrize("name", CAPABILITIES)
def test_with_one_off(name: str, kind: str) -> None:
    with compat.switches.without(name):
        reports = kinds.run(kind)
    assert all(f"without {name} " in "\n".join(r.lacks) for r in reports)


def test_a_trace_that_reports_no_begin_finds_memory() -> None:
    """Dynamo prints the keys of a dict that it guards: here, parameters of models."""
    torch._dynamo.reset()  # drops the callbacks
    with compat.switches.without("trace-callbacks"):
        reports = kinds.run("Lion, many, missing gradients")
    assert [r.launches for r in reports] == [1, 1]


#: Steps whose trace has eager's bits without any help.
FLOOR = (
    *("SGD, plain", "foreach SGD", "for-loop SGD", "foreach RMSprop"),
    *("for-loop RMSprop", "foreach Adagrad", "for-loop Adagrad", "foreach Adadelta"),
    *("foreach Rprop", "Lion", "function Lion", "a package's Lion", "Adam, capturable"),
)


@pytest.mark.family(12)
@knows_lerp
@pytest.mark.parametrize("kind", FLOOR)
def test_the_floor_is_one_launch(kind: str) -> None:
    with compat.switches.without("all"):
        reports = kinds.run(kind)
    assert reports
    assert all((r.launches, r.fallback) == (1, "") for r in reports), reports


def test_a_fallback_is_told_once(recwarn: pytest.WarningsRecorder) -> None:
    """A step that must run in eager is reported, by the name of what is missing."""
    params, optimizer = kinds.made(kinds.Looks, 3)
    with compat.switches.without("guard-misses"):
        fuseopt.compile(optimizer)
        for step in range(3):
            kinds.give(params, params, step, False)
            optimizer.step()
        (report,) = fuseopt.reports()
    assert "guard-misses" in report.fallback
    told = [str(w.message) for w in recwarn if "runs in eager" in str(w.message)]
    assert len(told) == 1
    assert torch.__version__ in told[0]


def test_fallback_error_is_an_error() -> None:
    params, optimizer = kinds.made(kinds.Looks, 3)
    before = [p.detach().clone() for p in params]
    with compat.switches.without("guard-misses"):
        fuseopt.compile(optimizer, fallback="error")
        kinds.give(params, params, 0, False)
        with pytest.raises(fuseopt.errors.CaptureError, match="guard-misses"):
            optimizer.step()
    assert all(map(torch.equal, params, before))


class Fed(Optimizer):
    """Adds what it is fed to each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})
        self.fed = torch.ones(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)
                p.add_(self.fed, alpha=group["lr"])


@pytest.mark.filterwarnings("ignore:fuseopt. Fed")
def test_what_raises_in_a_trace_is_eagers_error_and_is_traced_again() -> None:
    """A call that raises while it is traced raises eager's error, as eager leaves all;
    once it no longer does, the step is compiled.
    """
    params, twin = ([Parameter(torch.ones(3)) for _ in range(2)] for _ in range(2))
    compiled, plain = Fed(params), Fed(twin)
    fuseopt.compile(compiled)
    for fed in (torch.ones(4), torch.ones(3), torch.ones(2), torch.ones(3)):
        compiled.fed, plain.fed = fed.clone(), fed.clone()
        raised = []
        for optimizer in (compiled, plain):
            try:
                optimizer.step()
            except RuntimeError as error:
                raised.append((type(error), str(error)))
        assert len(raised) == (0 if len(fed) == 3 else 2)
        assert raised[:1] == raised[1:]
        assert all(map(torch.equal, params, twin))
    assert fuseopt.reports()[-1].launches == 1
