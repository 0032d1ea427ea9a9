"""torch.compile(opt.step, backend="fuseopt") is fuseopt.compile on an optimizer that
stays as it is: whatever torch.compile is asked for, and whatever stands around `step`.
"""

from __future__ import annotations

import copy
import gc
import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import fuseopt
from fuseopt import errors
from fuseopt.backend import fuseopt as backend
from fuseopt.compat import bound_steps
from tests.steps import make, make_params, same_bits, set_grads

SHAPES = [(3, 4), (5,)] * 9


class Pair:
    """A plain optimizer, and one whose bound step torch.compile was given."""

    def __init__(self, name: str = "AdamW", **asked: Any) -> None:
        self.theirs, self.mine = make_params(SHAPES), make_params(SHAPES)
        self.eager, self.optimizer = make(name, self.theirs), make(name, self.mine)
        self.asked = {"backend": "fuseopt", **asked}
        self.step: Callable[..., Any] = torch.compile(self.optimizer.step, **self.asked)
        self.seed = 0

    def both(self, *args: Any) -> None:
        """Step both with the same gradients; all that they hold has the same bits."""
        self.seed += 1
        set_grads(self.theirs, self.mine, self.seed)
        self.eager.step(*args)
        self.step(*args)
        for a, b in zip(self.theirs, self.mine, strict=True):
            assert same_bits(a, b)
        states = self.eager.state_dict(), self.optimizer.state_dict()
        assert states[0]["param_groups"] == states[1]["param_groups"]
        for key, state in states[0]["state"].items():
            for name, value in state.items():
                assert same_bits(value, states[1]["state"][key][name]), name


def test_few_lanes_are_traced_and_the_optimizer_stays_as_it_is() -> None:
    pair = Pair()
    for _ in range(3):
        pair.both()
    (report,) = fuseopt.reports()
    assert (report.launches, report.lanes) == (1, len(SHAPES))
    assert "of 18 lanes" in report.traced
    assert "step" not in vars(pair.optimizer)
    assert pair.optimizer.step.__func__ is type(pair.optimizer).step


@pytest.mark.parametrize("n", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_as_many_optimizers_of_a_class_as_there_are(n: int) -> None:
    """Dynamo alone gives up after eight."""
    pairs = [Pair("SGD") for _ in range(n)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for pair in pairs:
            pair.both()
    assert [r.launches for r in fuseopt.reports()] == [1] * n


def test_a_step_is_bound_as_a_method_is() -> None:
    pair = Pair()
    assert pair.step.__self__ is pair.optimizer  # type: ignore[attr-defined]
    assert callable(pair.step.__func__)  # type: ignore[attr-defined]
    assert pair.step.__name__ == "step"
    pair.both()


def test_a_step_keeps_its_optimizer_and_no_longer() -> None:
    params = make_params([(3,)] * 20)
    set_grads(params, params, 0)
    step = torch.compile(torch.optim.AdamW(params).step, backend="fuseopt")
    for _ in range(3):
        step()
    known = weakref.ref(step.__self__)  # type: ignore[attr-defined]
    del step
    gc.collect()
    assert known() is None


@pytest.mark.family(3)
@pytest.mark.parametrize("when", ["before", "after", "in its place"])
def test_schedulers(when: str) -> None:
    """No warning about an order of steps that is right."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = Pair()
        eager = LambdaLR(pair.eager, lambda k: min(1.0, k / 3))
        if when == "in its place":
            pair.optimizer.step = pair.step  # type: ignore[method-assign]
        mine = LambdaLR(pair.optimizer, lambda k: min(1.0, k / 3))
        if when == "before":
            pair.step = torch.compile(pair.optimizer.step, backend="fuseopt")
        if when == "in its place":
            pair.step = pair.optimizer.step
        for _ in range(5):
            pair.both()
            eager.step()
            mine.step()
    reports = fuseopt.reports()
    assert len(reports) <= 2  # the rate of the first call was a constant
    assert {r.launches for r in reports} == {1}
    assert all("of 18 lanes" in r.traced for r in reports)


@pytest.mark.family(4)
@pytest.mark.parametrize(
    "asked",
    [
        {"fullgraph": True},
        {"dynamic": False},
        {"dynamic": True},
        {"mode": "max-autotune-no-cudagraphs"},
        {"mode": "reduce-overhead"},
        {"options": {"fallback": "error"}},
        {"backend": backend},
    ],
    ids=str,
)
def test_what_torch_compile_is_asked_for(asked: dict[str, Any]) -> None:
    pair = Pair(**asked)
    for _ in range(3):
        pair.both()
    assert [r.launches for r in fuseopt.reports()] == [1]


def test_options_are_followed(tmp_path: Any) -> None:
    Pair(options={"dump_dir": str(tmp_path)}).both()
    assert list(tmp_path.glob("step0/*"))


def test_disabled() -> None:
    pair = Pair(disable=True)
    pair.both()
    assert fuseopt.reports() == []


def test_a_wrong_mode_is_refused_at_once() -> None:
    with pytest.raises(errors.ConfigError, match="unknown mode 'fastest'"):
        Pair(mode="fastest")


def test_stances_and_reset() -> None:
    pair = Pair()
    pair.both()
    with torch.compiler.set_stance("force_eager"):
        pair.both()
    pair.both()
    torch._dynamo.reset()
    pair.both()
    assert len(fuseopt.reports()) <= 1


def test_hooks_and_closures() -> None:
    pair = Pair()
    seen: list[str] = []
    for k, opt in enumerate((pair.eager, pair.optimizer)):
        opt.register_step_pre_hook(lambda *_, k=k: seen.append(f"pre{k}"))
        opt.register_step_post_hook(lambda *_, k=k: seen.append(f"post{k}"))
    pair.both()
    assert seen == ["pre0", "post0", "pre1", "post1"]
    pair.both(lambda: torch.tensor(1.0))
    assert len(seen) == 8


def test_a_closure_that_is_none_is_no_argument() -> None:
    """Trainers that pass a closure on, should there be one, call all steps so."""
    pair = Pair()
    for given in ((), (None,), ()):
        pair.both(*given)
    pair.step(closure=None)
    (report,) = fuseopt.reports()
    assert "of 18 lanes" in report.traced


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((None, None), {}), ((None,), {"closure": None}), ((), {"other": None})],
    ids=["too many", "twice", "unknown"],
)
def test_arguments_that_a_step_does_not_take(
    args: tuple[None, ...], kwargs: dict[str, None]
) -> None:
    pair = Pair()
    pair.both()
    for step in (pair.eager.step, pair.step):
        with pytest.raises(TypeError):
            step(*args, **kwargs)


def test_nothing_is_printed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    Pair().both()
    assert [r.getMessage() for r in caplog.records if "record" in r.getMessage()] == []


def test_profilers_see_the_step() -> None:
    pair = Pair()
    pair.both()
    with torch.profiler.profile() as profile:
        pair.both()
    names = [event.key for event in profile.key_averages()]
    assert "Optimizer.step#AdamW.step" in names


def test_torchs_fused_kernels_are_done_by_fuseopts() -> None:
    params, mine = make_params(SHAPES), make_params(SHAPES)
    eager = torch.optim.AdamW(params, foreach=True)
    optimizer = torch.optim.AdamW(mine, fused=True)
    step = torch.compile(optimizer.step, backend="fuseopt")
    for seed in range(3):
        set_grads(params, mine, seed)
        eager.step()
        step()
    assert all(same_bits(a, b) for a, b in zip(params, mine, strict=True))
    assert optimizer.param_groups[0]["fused"] is True
    assert [r.launches for r in fuseopt.reports()] == [1]


def test_inside_another_function_that_is_compiled() -> None:
    pair = Pair()

    def train() -> None:
        pair.optimizer.step()

    pair.step = torch.compile(train, backend="fuseopt")
    for _ in range(3):
        pair.both()
    assert {r.fallback for r in fuseopt.reports()} == {""}


def test_a_compiled_step_inside_another_function() -> None:
    pair = Pair()
    inner = pair.step

    def train() -> None:
        inner()

    pair.step = torch.compile(train, backend="fuseopt")
    for _ in range(3):
        pair.both()
    assert [r.launches for r in fuseopt.reports()] == [1]


def test_compiled_again() -> None:
    """What is given a step that is compiled already takes the options."""
    pair = Pair()
    pair.both()
    again = torch.compile(pair.step, backend="fuseopt", options={"check": True})
    assert again is pair.step
    pair.both()
    fuseopt.compile(pair.optimizer)
    pair.step = torch.compile(pair.optimizer.step, backend="fuseopt")
    pair.both()


def test_for_another_backend_it_is_the_plain_step() -> None:
    pair = Pair()
    pair.both()
    graphs: list[Any] = []

    def other(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    torch.compile(pair.step, backend=other)()  # Dynamo gives it other bits
    assert graphs


def test_a_backend_around_ours_is_asked() -> None:
    pair = Pair()
    set_grads(pair.mine, pair.mine, 0)
    graphs: list[Any] = []

    def around(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return backend(gm, inputs)

    torch.compile(pair.optimizer.step, backend=around)()
    assert graphs


def test_copies_are_plain() -> None:
    pair = Pair()
    pair.optimizer.step = pair.step  # type: ignore[method-assign]
    pair.both()
    twin = copy.deepcopy(pair.optimizer)
    assert not hasattr(twin.step, "_fuseopt")
    twin.step()


@pytest.mark.slow
def test_where_torch_has_no_such_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo then compiles the step as any other function."""
    monkeypatch.setattr(bound_steps, "owner_of", lambda function: None)
    pair = Pair()
    for _ in range(3):
        pair.both()
    assert {(r.launches, r.traced) for r in fuseopt.reports()} == {(1, "")}


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_steps_that_torch_keeps_from_dynamo(name: str) -> None:
    """Also after torch has marked them, when Dynamo passes over them in silence."""
    optimizer = getattr(torch.optim, name)(make_params([(3,)]))
    for _ in range(2):
        with pytest.raises(errors.UnsupportedInput, match="disabled under Dynamo"):
            torch.compile(optimizer.step, backend="fuseopt")


def test_a_step_that_its_user_keeps_from_dynamo() -> None:
    class Kept(torch.optim.SGD):
        step = torch.compiler.disable(torch.optim.SGD.step)

    optimizer = Kept(make_params([(3,)]), lr=0.1)
    with pytest.raises(errors.UnsupportedInput, match=r"Kept\.step is disabled"):
        torch.compile(optimizer.step, backend="fuseopt")
