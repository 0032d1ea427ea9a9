"""What `explain` says of a function that does a tail: where it is cut, what to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fuseopt
from fuseopt.tails.advice import tail_of


class Training:
    """A model, its optimizers and what stands around their steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
        first, second = (list(x.parameters()) for x in self.model)
        self.opt = torch.optim.AdamW(first, lr=0.1)
        self.other = torch.optim.SGD(second, lr=0.1, momentum=0.9)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.limit = 0.01
        for k, p in enumerate(self.model.parameters()):
            p.grad = torch.full_like(p, 0.1 * (k + 1))

    def clipped(self) -> None:
        clip_grad_norm_(self.model.parameters(), self.limit)
        self.opt.step()
        self.other.step()
        self.average.update_parameters(self.model)

    def by_value(self) -> None:
        clip_grad_value_([*self.model.parameters()], clip_value=0.25)
        self.opt.step()
        self.opt.zero_grad(set_to_none=False)

    def measured(self) -> None:
        torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), max_norm=0.5, norm_type=1.0
        )
        self.other.step()
        self.model.zero_grad()

    def alone(self) -> None:
        self.opt.step()

    def contents(self) -> list[torch.Tensor]:
        held = [*self.model.parameters(), *self.average.parameters()]
        states = [*self.opt.state.values(), *self.other.state.values()]
        held += [x for own in states for x in own.values() if x is not None]
        return held + [p.grad for p in self.model.parameters() if p.grad is not None]


WANTED = {
    "clipped": "fuseopt.tail([self.opt, self.other], clip_grad_norm=self.limit, "
    "ema=[(self.average, self.model)])",
    "by_value": "fuseopt.tail(self.opt, clip_grad_value=0.25, zero_grad='zeros')",
    "measured": "fuseopt.tail(self.other, clip_grad_norm=0.5, norm_type=1.0, "
    "zero_grad=True)",
    "alone": "",
}


@pytest.mark.parametrize("name", WANTED)
def test_the_call_is_told(name: str) -> None:
    assert str(tail_of(getattr(Training(), name))) == WANTED[name]


@pytest.mark.parametrize("name", ["clipped", "by_value"])
def test_the_call_does_the_same(name: str) -> None:
    mine, eager = Training(), Training()
    told = str(tail_of(getattr(mine, name)))
    tail = eval(told, {"fuseopt": fuseopt, "self": mine})
    if name == "by_value":
        # of parameters that are no optimizer's gradients stay as they were
        for training in (mine, eager):
            for p in training.model[1].parameters():
                p.grad = None
    for _ in range(3):
        tail()
        getattr(eager, name)()
        ours, theirs = mine.contents(), eager.contents()
        assert len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs))


def test_explain_says_where_a_function_is_cut() -> None:
    training = Training()
    before = [t.clone() for t in training.contents()]
    report = fuseopt.explain(training.clipped)
    assert [line.rpartition(": ")[2] for line in report.cuts] == ["self.opt.step()"]
    assert __file__ in report.cuts[0]
    assert report.instead == WANTED["clipped"]
    assert "in one graph: fuseopt.tail(" in " ".join(str(report).split())
    assert all(map(torch.equal, before, training.contents()))


def test_the_page_says_it_too(tmp_path: Any) -> None:
    report = fuseopt.explain(Training().clipped)
    report.save_html(tmp_path / "report.html")
    assert "In one graph: <code>fuseopt.tail(" in (tmp_path / "report.html").read_text()


def test_a_step_has_no_advice() -> None:
    report = fuseopt.explain(Training().opt)
    assert (report.cuts, report.instead) == ([], "")


def test_a_scaler_is_part_of_it() -> None:
    training, scaler = Training(), torch.amp.GradScaler("cpu", init_scale=4.0)
    opt = training.opt

    def function() -> None:
        scaler.unscale_(opt)
        clip_grad_norm_(training.model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()

    wanted = "fuseopt.tail(opt, scaler=scaler, clip_grad_norm=1.0)"
    assert str(tail_of(function)) == wanted


class Asked:
    """Its attribute must not be asked."""

    @property
    def step(self) -> Callable[[], None]:
        raise AssertionError


thing = Asked()


def of_others() -> None:
    thing.step()
    unknown.step()  # type: ignore[name-defined]  # noqa: F821
    print(*[x.step() for x in ()])


@pytest.mark.parametrize("function", [of_others, print, lambda: None, Asked.step.fget])
def test_nothing_is_run_or_asked(function: Any) -> None:
    assert str(tail_of(function)) == ""
