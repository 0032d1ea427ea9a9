"""What Dynamo asks no guard about, a step that was compiled asks all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.source import AttrSource, LocalSource
from torch.optim import Optimizer

import fuseopt
from fuseopt.compat import guards
from fuseopt.replicate import worth
from tests.steps import same_bits
from tests.versions import loops_over_no_attributes


@pytest.fixture(autouse=True)
def nothing_is_put_elsewhere() -> Iterator[None]:
    yield
    vars(which).clear()
    if hasattr(Asks, "scale_of_class"):
        del Asks.scale_of_class


WAYS = ("led", "whole", "backend")


class Counts(Optimizer):
    """A counter in the state of each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["t"] = torch.zeros_like(p)
                state["t"] += 1
                p.sub_(p.grad / state["t"], alpha=group["lr"])


class Asks(Counts):
    """Reads of each parameter what may not be there."""

    ask: Callable[[Any, int, Any], float]

    def __init__(self, params: Any, ask: Callable[[Any, int, Any], float]) -> None:
        super().__init__(params)
        self.table: dict[int, float] = {}
        self.by_parameter: dict[Any, float] = {}
        self.one = self.param_groups[0]["params"][0]
        self.ask = ask

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                p.sub_(p.grad, alpha=group["lr"] * self.ask(self, i, p))


def caught_key(opt: Any, i: int, p: Any) -> float:
    try:
        return opt.table[i]  # type: ignore[no-any-return]
    except KeyError:
        return 1.0


def caught_parameter(opt: Any, i: int, p: Any) -> float:
    try:
        return opt.by_parameter[p]  # type: ignore[no-any-return]
    except KeyError:
        return 1.0


def caught_attribute(opt: Any, i: int, p: Any) -> float:
    try:
        return p.scale  # type: ignore[no-any-return]
    except AttributeError:
        return 1.0


def caught_attribute_of_self(opt: Any, i: int, p: Any) -> float:
    try:
        return opt.scale  # type: ignore[no-any-return]
    except AttributeError:
        return 1.0


def caught_attribute_of_class(opt: Any, i: int, p: Any) -> float:
    try:
        return Asks.scale_of_class  # type: ignore[attr-defined, no-any-return]
    except AttributeError:
        return 1.0


def caught_attribute_of_function(opt: Any, i: int, p: Any) -> float:
    try:
        return which.scale  # type: ignore[attr-defined, no-any-return]
    except AttributeError:
        return 1.0


def own_dict(opt: Any, i: int, p: Any) -> float:
    return opt.__dict__.get(f"scale_{i}", 1.0)  # type: ignore[no-any-return]


def own_vars(opt: Any, i: int, p: Any) -> float:
    return 0.25 if f"scale_{i}" in vars(opt) else 1.0


def all_of_own_dict(opt: Any, i: int, p: Any) -> float:
    rate = 1.0
    for name in opt.__dict__:
        if name.startswith("scale"):
            rate *= 0.5
    return rate


def flag(opt: Any, i: int, p: Any) -> float:
    return 1.0 if p.requires_grad else 0.25


def which(opt: Any, i: int, p: Any) -> float:
    return 0.25 if p is opt.one else 1.0


def put_key(opt: Any, p: Any) -> None:
    opt.table[2] = 0.25
    opt.by_parameter[p] = 0.25


def put_attributes(opt: Any, p: Any) -> None:
    p.scale = opt.scale = opt.scale_2 = 0.25


def put_elsewhere(opt: Any, p: Any) -> None:
    Asks.scale_of_class = which.scale = 0.25  # type: ignore[attr-defined]


def put_flag(opt: Any, p: Any) -> None:
    p.requires_grad_(False)


def put_one(opt: Any, p: Any) -> None:
    opt.one = p


def compiled(opt: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    if way == "backend":
        options = {"fallback": "error"}
        return torch.compile(opt.step, backend="fuseopt", options=options)  # type: ignore[no-any-return]
    monkeypatch.setattr(worth, "FEW", 2 if way == "led" else 999)
    return fuseopt.compile(opt, fallback="error").step  # type: ignore[no-any-return]


def beside(
    build: Callable[[list[Any]], Any],
    change: Callable[[Any, Any], None],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three steps, the change, and three more, beside eager."""
    torch.manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(3)) for _ in range(6)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    opt, plain = build(mine), build(theirs)
    step = compiled(opt, way, monkeypatch)
    for turn in range(6):
        if turn == 3:
            change(opt, mine[2])
            change(plain, theirs[2])  # what both share is the same already
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.randn(3)
            q.grad = p.grad.clone()
        step()
        plain.step()
        assert all(map(same_bits, mine, theirs)), turn
    assert any(r.launches for r in fuseopt.reports())


@pytest.mark.family(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_is_made_anew_is_its_own_parameters(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands last among the keys: each was taken for its neighbour's."""
    beside(Counts, lambda opt, p: opt.state.pop(p), way, monkeypatch)


@pytest.mark.family(3)
@pytest.mark.parametrize("way", WAYS)
def test_states_in_another_order_are_their_own_parameters(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn_round(opt: Any, p: Any) -> None:
        known = [*opt.state.items()]
        opt.state.clear()
        known[2][1]["t"].add_(3)
        opt.state.update(reversed(known))

    beside(Counts, turn_round, way, monkeypatch)


ASKED = [
    (caught_key, put_key),
    (caught_parameter, put_key),
    (caught_attribute, put_attributes),
    (caught_attribute_of_self, put_attributes),
    (caught_attribute_of_class, put_elsewhere),
    (caught_attribute_of_function, put_elsewhere),
    (own_dict, put_attributes),
    (own_vars, put_attributes),
    pytest.param(all_of_own_dict, put_attributes, marks=loops_over_no_attributes),
    (flag, put_flag),
    (which, put_one),
]


@pytest.mark.family(15)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("ask", "put"), ASKED, ids=lambda f: f.__name__)
def test_what_was_not_there_is_seen(
    ask: Any, put: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside(lambda params: Asks(params, ask), put, way, monkeypatch)


def test_an_attribute_is_guarded_as_each_torch_has_it() -> None:
    """torch 2.11 takes no name of an attribute: such steps ran in eager there."""

    class Older:
        def HASATTR(self, guard: Any) -> None: ...

    class Newer:
        def HASATTR(self, guard: Any, attr: str | None = None) -> None: ...

    of = LocalSource("x")
    assert guards.attribute_guard(Older, of, "y") == (
        AttrSource(of, "y"),
        Older.HASATTR,
    )
    source, kind = guards.attribute_guard(Newer, of, "y")
    assert (source, kind.func, kind.keywords) == (of, Newer.HASATTR, {"attr": "y"})


def test_guards_that_a_step_asks_are_dynamos_own_elsewhere() -> None:
    """Of another backend Dynamo traces an optimizer as it ever did."""
    from torch._dynamo import guards, source

    fuseopt.compile(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))
    of = source.OptimizerSource(base=source.LocalSource("x"))
    assert guards.is_from_optimizer_source(of)
    assert not guards.is_from_optimizer_source(source.LocalSource("x"))
