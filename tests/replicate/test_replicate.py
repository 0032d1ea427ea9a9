"""A few lanes lead: the bits of the whole step, or a report of why it is traced whole.

Every trap is an optimizer whose lanes look alike and are not, at once or later.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

import fuseopt
from fuseopt.errors import EagerOnly
from fuseopt.replicate import rehearsal, worth
from fuseopt.replicate.dry_run import rehearse
from fuseopt.replicate.step import PATIENCE
from fuseopt.runtime import step as runtime_step
from tests.steps import differences, eager_step, make, make_params, set_grads

SHAPES = [(3, 4), (5,)] * 4
ALL = len(SHAPES)
LEADS = 2


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo takes its time over each lane that is traced whole, for comparison."""
    monkeypatch.setattr(worth, "FEW", 6)


class Pair:
    """An optimizer in eager and one of fuseopt.compile, over equal parameters."""

    def __init__(
        self,
        build: str | Callable[[Any], Optimizer],
        shapes: Any = SHAPES,
        compiled: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.theirs, self.mine = make_params(shapes), make_params(shapes)
        if isinstance(build, str):
            self.plain = make(build, self.theirs, reference=True, **options)
            self.opt = make(build, self.mine, **options)
        else:
            self.plain, self.opt = build(self.theirs), build(self.mine)
        fuseopt.compile(self.opt, **(compiled or {}))
        self.seed = 0

    def grads(self) -> None:
        self.seed += 1
        set_grads(self.theirs, self.mine, self.seed)

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.grads()
            eager_step(self.plain)
            self.opt.step()
            self.check()

    def check(self) -> None:
        assert differences(self.theirs, self.plain, self.mine, self.opt) == []
        numbers = [
            [
                {k: v for k, v in o.state.get(p, {}).items() if type(v) is not Tensor}
                for p in params
            ]
            for o, params in ((self.plain, self.theirs), (self.opt, self.mine))
        ]
        assert numbers[0] == numbers[1]

    @property
    def both(self) -> tuple[Optimizer, Optimizer]:
        return self.plain, self.opt


def led(count: int = LEADS, lanes: int = ALL) -> None:
    """All graphs so far were traced by so many leading lanes."""
    told = [r.traced for r in fuseopt.reports()]
    assert told
    assert set(told) == {f"{count} of {lanes} lanes; they stand for the others"}


def whole(why: str) -> None:
    """The last graph was traced whole, for a reason with these words."""
    told = fuseopt.reports()[-1].traced
    assert told.startswith("all lanes, since ")
    assert why in told


class Loop(Optimizer):
    """A for-loop optimizer; `change` is called for each lane before its update."""

    def __init__(self, params: Any, lr: float = 0.1, **own: Any) -> None:
        super().__init__(params, {"lr": lr})
        for name, value in own.items():
            setattr(self, name, value)

    def scale(self, i: int, p: Tensor, group: dict[str, Any]) -> float:
        return 1.0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["t"] = 0
                    state["m"] = torch.zeros_like(p)
                state["t"] += 1
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                rate = group["lr"] * self.scale(i, p, group) / state["t"] ** 0.5
                p.sub_(state["m"], alpha=rate)


# ---------------------------------------------------------------- lanes that are alike


@pytest.mark.parametrize("foreach", [True, False])
def test_a_step_of_torch_is_led(foreach: bool) -> None:
    pair = Pair("AdamW", foreach=foreach)
    pair.step(3)
    led()
    assert [r.launches for r in fuseopt.reports()] == [1]


def test_the_kernel_is_that_of_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for few in (6, 1000):
        monkeypatch.setattr(worth, "FEW", few)
        for build in ("AdamW", Loop):
            Pair(build).step(2)
    reports = fuseopt.reports()
    half = len(reports) // 2
    assert all(r.traced for r in reports[:half])
    assert not any(r.traced for r in reports[half:])
    for mine, theirs in zip(reports[:half], reports[half:], strict=True):
        assert [k.source for k in mine.kernels] == [k.source for k in theirs.kernels]
        assert (mine.lanes, mine.bytes) == (theirs.lanes, theirs.bytes)
        assert mine.launches == theirs.launches


def test_a_for_loop_with_a_counter_is_led() -> None:
    pair = Pair(Loop)
    pair.step(5)
    led()
    assert list(pair.opt.state) == pair.mine


def test_a_rate_for_each_layer_leaves_the_step_led() -> None:
    """Two kinds of lanes in each of 30 groups, without momentum and then with it."""

    def build(params: Any) -> Optimizer:
        layers = [params[4 * i : 4 * i + 4] for i in range(30)]
        groups = [{"params": p, "lr": 0.1 * 0.9**i} for i, p in enumerate(layers)]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    pair = Pair(build, [(3, 4), (5,), (4, 3), (2,)] * 30)
    pair.step(3)
    led(60, 120)
    assert len(fuseopt.reports()) == 2


def test_few_lanes_are_traced_whole_and_nothing_is_said() -> None:
    pair = Pair("SGD", [(3,)] * 5)
    pair.step()
    assert [r.traced for r in fuseopt.reports()] == [""]


def test_lanes_of_many_shapes_are_traced_whole() -> None:
    Pair("SGD", [(2,) * n for n in range(1, 7)]).step()
    whole("6 of its 6 lanes are unlike")


def test_verify_is_traced_whole() -> None:
    Pair("SGD", compiled={"verify": True}).step(2)
    whole("the option verify is on")


def test_a_closure_is_traced_whole() -> None:
    pair = Pair("SGD")
    pair.step()
    pair.grads()
    for opt in pair.both:
        opt.step(lambda: 1.0)
    pair.check()
    pair.step()


def exponential(opt: Optimizer) -> Any:
    return lr_scheduler.ExponentialLR(opt, 0.9)


def one_cycle(opt: Optimizer) -> Any:
    """Moves a rate and, beside it, a momentum or the first of two betas."""
    return lr_scheduler.OneCycleLR(opt, 0.1, total_steps=100)


@pytest.mark.family(8)
@pytest.mark.parametrize("schedule", [exponential, one_cycle], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["SGD", "Adam", "tensor", "groups"])
def test_a_schedule_compiles_nothing_anew(
    kind: str, schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"lr": torch.tensor(0.1) if kind == "tensor" else 0.1}
    if kind == "SGD":
        options["momentum"] = 0.9
    pair = Pair("SGD" if kind == "SGD" else "Adam", **options)
    if kind == "groups":
        for opt, fresh in zip(pair.both, (pair.theirs, pair.mine), strict=True):
            more = make_params(SHAPES)
            opt.add_param_group({"params": more, "lr": 0.03})
            fresh += more
    schedules = [schedule(opt) for opt in pair.both]
    rehearsed: list[int] = []
    monkeypatch.setattr(
        rehearsal, "rehearse", lambda *a: rehearsed.append(1) or rehearse(*a)
    )
    for n in range(PATIENCE + 5):
        pair.step()
        for s in schedules:
            s.step()
        if n == 3:
            known = len(fuseopt.reports())
            rehearsed.clear()
    assert all("they stand for" in r.traced for r in fuseopt.reports())
    assert len(fuseopt.reports()) == known
    # each new rate was rehearsed, and after six of them all lanes were traced
    assert not rehearsed


def test_gradients_come_and_go() -> None:
    pair = Pair("Adam")
    for missing in ((), range(4), (0,), (), range(ALL)):
        pair.grads()
        for i in missing:
            pair.theirs[i].grad = pair.mine[i].grad = None
        eager_step(pair.plain)
        pair.opt.step()
        pair.check()
    assert "lanes" in fuseopt.reports()[-1].traced


def test_gradients_of_one_call_move() -> None:
    pair = Pair("SGD", momentum=0.9)
    for _ in range(3):
        pair.step()
        pair.opt.zero_grad()
        torch.empty(1000)
    led()
    assert len(fuseopt.reports()) <= 2


def test_a_led_gradient_changes_its_layout() -> None:
    pair = Pair("SGD", momentum=0.9)
    pair.step(2)
    pair.grads()
    for params in (pair.theirs, pair.mine):
        params[4].grad = params[4].grad.t().contiguous().t()
    eager_step(pair.plain)
    pair.opt.step()
    pair.check()
    pair.step()


def test_parameters_are_frozen_and_thawed() -> None:
    pair = Pair("SGD", momentum=0.9)
    for flag in (True, False, True):
        for params in (pair.theirs, pair.mine):
            params[6].requires_grad_(flag)
        pair.step()


def test_a_state_dict_is_loaded() -> None:
    pair = Pair("AdamW")
    pair.step()
    saved = [copy.deepcopy(opt.state_dict()) for opt in pair.both]
    pair.step()
    for opt, state in zip(pair.both, saved, strict=True):
        opt.load_state_dict(state)
    pair.step(2)
    led()


def test_a_parameter_group_is_added() -> None:
    pair = Pair("AdamW")
    pair.step()
    for opt, params in zip(pair.both, (pair.theirs, pair.mine), strict=True):
        new = make_params([(3, 4)] * 4)
        params.extend(new)
        opt.add_param_group({"params": new, "lr": 0.3})
    pair.step(2)
    assert fuseopt.reports()[-1].traced.startswith("3 of 12 lanes")


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_a_copy_is_a_plain_optimizer(way: str) -> None:
    pair = Pair("AdamW")
    pair.step()
    twin = (
        pickle.loads(pickle.dumps(pair.opt))
        if way == "pickle"
        else copy.deepcopy(pair.opt)
    )
    assert "step" not in vars(twin)
    assert [len(g["params"]) for g in twin.param_groups] == [ALL]
    pair.mine, pair.opt = twin.param_groups[0]["params"], fuseopt.compile(twin)
    pair.step()


@pytest.mark.family(10)
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("way", ["led", "whole", "unlike"])
def test_an_optimizer_dies_with_its_last_reference(
    way: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so do parameters and state, which Dynamo's list of backends kept."""
    if way == "whole":
        monkeypatch.setattr(worth, "FEW", 99)
    pair = Pair(ByPlace if way == "unlike" else "AdamW")
    for _ in range(steps):
        pair.grads()
        pair.opt.step()
    state = [t for s in pair.opt.state.values() for t in s.values()]
    held = [pair.opt, *pair.mine, *(p.grad for p in pair.mine), *state]
    dead = [weakref.ref(t) for t in held if isinstance(t, (Tensor, Optimizer))]
    del pair, state, held
    gc.collect()
    assert [x() is None for x in dead] == [True] * len(dead)


def test_a_changed_state_of_one_lane() -> None:
    pair = Pair(Loop)
    pair.step(4)
    for opt, params in zip(pair.both, (pair.theirs, pair.mine), strict=True):
        opt.state[params[7]]["t"] = 50
        opt.state[params[4]]["m"] = torch.ones_like(params[4].detach())
        opt.state.pop(params[6])
    pair.step(2)


# ---------------------------------------------------------------- traps


class ByCount(Loop):
    def scale(self, i: int, p: Tensor, group: dict[str, Any]) -> float:
        return 1.0 / len(group["params"])


class ByPlace(Loop):
    def scale(self, i: int, p: Tensor, group: dict[str, Any]) -> float:
        return 1.0 + i


class OneOdd(Loop):
    """The fifth lane: alike until `after` steps were done."""

    after = 0

    def scale(self, i: int, p: Tensor, group: dict[str, Any]) -> float:
        if i == 5 and self.state[p]["t"] > self.after:
            return 2.0
        return 1.0


class OneOddLater(OneOdd):
    after = 2


class OneOddFlag(Loop):
    """The fifth lane, from when on a flag is set."""

    flag = False

    def scale(self, i: int, p: Tensor, group: dict[str, Any]) -> float:
        return 2.0 if i == 5 and self.flag else 1.0


class ByTable(Loop):
    """A number of each lane, in a list of the optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, table=[1.0] * ALL)

    def scale(self, i: int, p: Tensor, group: dict[str, Any]) -> float:
        return float(self.table[i])


TABLE = [1.0] * ALL


class ByGlobalTable(Loop):
    def scale(self, i: int, p: Tensor, group: dict[str, Any]) -> float:
        return TABLE[i]


class ByName(Loop):
    """Attributes whose names are made of the lane's number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, **{f"scale_{i}": 1.0 for i in range(ALL)})

    def scale(self, i: int, p: Tensor, group: dict[str, Any]) -> float:
        return float(getattr(self, f"scale_{i}"))


class ByTheWay(Loop):
    """Lanes are alike where the learning rate is zero, as a warmup begins."""

    def scale(self, i: int, p: Tensor, group: dict[str, Any]) -> float:
        return 3.0 if i in (5, 7) else 1.0


@pytest.mark.family(3)
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ByCount, "the number of lanes: 1.0 / len(group['params'])"),
        (ByPlace, "the position of a lane: 1.0 + i"),
        (OneOdd, "the position of a lane: i == 5"),
        (OneOddLater, "the position of a lane: i == 5"),
        (OneOddFlag, "the position of a lane: i == 5"),
        (ByGlobalTable, "the position of a lane: TABLE[i]"),
    ],
)
def test_lanes_that_only_look_alike(kind: Any, why: str) -> None:
    pair = Pair(kind)
    pair.step(4)
    whole(why)
    for opt in pair.both:
        opt.flag = True  # type: ignore[attr-defined]
    pair.step(2)


@pytest.mark.slow
def test_a_global_table_changes_later() -> None:
    pair = Pair(ByGlobalTable)
    pair.step(3)
    TABLE[5] = 2.0
    try:
        pair.step(2)
    finally:
        TABLE[5] = 1.0


def test_a_table_changes_later() -> None:
    pair = Pair(ByTable)
    pair.step(3)
    for opt in pair.both:
        opt.table[5] = 2.0  # type: ignore[attr-defined]
    pair.step(2)
    whole("the position of a lane: self.table[i]")


def test_an_attribute_that_no_lead_reads_changes_later() -> None:
    pair = Pair(ByName)
    pair.step(3)
    for opt in pair.both:
        opt.scale_5 = 2.0  # type: ignore[attr-defined]
    pair.step(2)
    whole("the position of a lane: f'scale_{i}'")


def test_a_learning_rate_of_zero_hides_nothing() -> None:
    pair = Pair(ByTheWay)
    for lr in (0.0, 0.0, 0.0, 0.1, 0.2):
        for opt in pair.both:
            opt.param_groups[0]["lr"] = lr
        pair.step()


class Clips(Loop):
    """The total norm of all lanes."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        total = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / (1 + total))


class Accumulates(Loop):
    """A running sum that goes from lane to lane."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        total = torch.zeros(())
        for p in self.param_groups[0]["params"]:
            total.add_(1)
            p.sub_(p.grad / total)


class Draws(Loop):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * torch.rand_like(p))


class Neighbours(Loop):
    """A lane reads its neighbour."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for i in range(0, len(params), 2):
            params[i].sub_(params[i - 2].grad)


@pytest.mark.parametrize("kind", [Clips, Accumulates, Draws, Neighbours])
def test_lanes_that_see_each_other(kind: Any) -> None:
    pair = Pair(kind)
    for _ in range(3):
        pair.grads()
        for opt in pair.both:
            torch.manual_seed(pair.seed)
            opt.step()
        pair.check()
    whole("")


class Replaces(Loop):
    """State that a step makes anew, and two that change places."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                    state["a"] = p.clone()
                    state["b"] = p * 2
                    state["t"] = torch.zeros(())
                state["t"] = state["t"] + 1
                state["m"] = 0.9 * state["m"] + p.grad
                state["a"], state["b"] = state["b"], state["a"]
                p.sub_(state["a"] * state["m"] / state["t"], alpha=group["lr"])


def test_state_that_a_step_replaces() -> None:
    pair = Pair(Replaces)
    pair.step(5)
    led()


class KeepsShared(Loop):
    """One tensor in the state of all lanes."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        one = torch.ones(())
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("t", one)
            p.sub_(p.grad * self.state[p]["t"])


class Counts(Loop):
    """Counts the lanes it has seen, in its group."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for p in group["params"]:
            group["seen"] = group.get("seen", 0) + 1
            p.sub_(p.grad)


@pytest.mark.parametrize("kind", [KeepsShared, Counts])
def test_what_lanes_leave_behind(kind: Any) -> None:
    pair = Pair(kind)
    pair.step(3)
    whole("")
    seen = [opt.param_groups[0].get("seen", 0) for opt in pair.both]
    assert seen[0] == seen[1]


def test_lanes_that_share_memory() -> None:
    pair = Pair("SGD")
    for params in (pair.theirs, pair.mine):
        flat = params[4].detach()
        params[6].data = flat
    pair.step(3)


def test_a_rehearsal_leaves_no_trace() -> None:
    pair = Pair(Loop)
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    pair.grads()
    values = [p.detach().clone() for p in pair.mine]
    kept = [p.grad for p in pair.mine]
    pair.opt.param_groups[0]["lr"] = 0.0
    pair.opt.step()
    assert all(map(torch.equal, values, pair.mine))
    assert all(a.grad is b for a, b in zip(pair.mine, kept, strict=True))
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), want)
    assert pair.opt.param_groups[0]["params"] is not None
    assert [len(g["params"]) for g in pair.opt.param_groups] == [ALL]


# ---------------------------------------------------------------- Dynamo out of the way


@contextlib.contextmanager
def dynamo_off() -> Iterator[None]:
    with torch._dynamo.config.patch(disable=True):
        yield


@contextlib.contextmanager
def traced_for_fx() -> Iterator[None]:
    """As in a function that torch.fx traces: what is compiled runs as it is."""
    allowed = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    flag = mock.patch("torch.fx._symbolic_trace._is_fx_tracing_flag", True)
    with allowed, flag:
        yield


class Passes(TorchDispatchMode):
    """Sees all that ATen is asked to do, and does it."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.family(5)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize(
    "away",
    [
        lambda: torch.compiler.set_stance("force_eager"),
        lambda: torch.compiler.set_stance("eager_on_recompile"),
        lambda: torch.compiler.set_stance("default", force_backend="eager"),
        lambda: torch.compiler.set_stance("eager_then_compile"),
        dynamo_off,
        Passes,
        traced_for_fx,
    ],
    ids=["stance", "run", "backend", "later", "config", "dispatch", "fx"],
)
def test_a_step_that_dynamo_lets_run_is_that_of_all_lanes(
    away: Callable[[], Any], first: bool
) -> None:
    """Only the leading lanes were stepped, and nothing was said."""
    pair = Pair("SGD", momentum=0.9)
    if not first:
        pair.step(2)
    with away():
        pair.grads()
        pair.opt.step()
    eager_step(pair.plain)
    pair.check()
    pair.step(2)


def test_a_stance_that_forbids_to_trace_anew() -> None:
    """What was traced is run, what was not is said; later all is as it was."""
    pair = Pair("SGD", momentum=0.9)
    pair.step(3)
    with torch.compiler.set_stance("fail_on_recompile"):
        pair.step(2)
        before = [p.detach().clone() for p in pair.mine]
        for opt in pair.both:
            opt.param_groups[0]["weight_decay"] = 0.1
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            pair.opt.step()
        assert all(map(torch.equal, before, pair.mine))
    pair.step(2)
    led()


def test_a_led_step_that_is_refused_is_not_done_for_its_leads_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that cannot be planned for runs in eager, with all lanes."""

    def refused(name: str, t: Tensor) -> None:
        raise EagerOnly("the test says so")

    pair = Pair("SGD", lr=0.1, momentum=0.9)
    monkeypatch.setattr(runtime_step, "check_memory", refused)
    with pytest.warns(RuntimeWarning, match="the test says so"):
        pair.step()
    monkeypatch.undo()
    pair.step(2)


def test_a_call_that_is_refused_has_the_bits_of_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo decomposes what eager computes in one: `lerp` of a tensor."""

    def refused(name: str, t: Tensor) -> None:
        raise EagerOnly("the test says so")

    def step(p: Tensor, g: Tensor, w: Tensor) -> None:
        p.lerp_(g, w)

    generator = torch.Generator().manual_seed(0)
    p, g = (torch.randn(1000, generator=generator) for _ in range(2))
    w = torch.rand((), generator=generator)
    mine, theirs = p.clone(), p.clone()
    call = torch.compile(step, backend=fuseopt.fuseopt)
    monkeypatch.setattr(runtime_step, "check_memory", refused)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            call(mine, g, w)
        step(theirs, g, w)
        assert torch.equal(mine, theirs)
    assert "A call runs in eager" in fuseopt.reports()[-1].fallback
