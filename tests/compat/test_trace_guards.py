"""What Dynamo is made to guard, what it is kept from, and what is left to it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.compat import hooks
from fuseopt.compiler.session import session
from tests.beside import WAYS
from tests.steps import same_bits
from tests.uniformity.traps.base import Trap

way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch._dynamo.reset()
    session.reset()


def steps(
    cls: type[Any], way: str, before: Callable[[Any, int], None], n: int = 6
) -> list[str]:
    """Step an optimizer beside a plain one; the warnings that were given."""
    a, b = cls.params(), cls.params()
    plain, mine = cls(a), cls(b)
    step = WAYS[way](mine)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for turn in range(n):
            for ps, opt in ((a, plain), (b, mine)):
                for number, p in enumerate(ps):
                    p.grad = torch.full_like(p, 0.1 * turn + number)
                before(opt, turn)
            plain.step()
            step()
            assert all(map(same_bits, a, b)), turn
    return [str(x.message) for x in told if "fuseopt" in str(x.message)]


def nothing(opt: Any, turn: int) -> None:
    """What a user does between steps."""


class Few(Trap):
    """So few lanes that none leads."""

    lanes = 3


class Odd(str):
    """A text that equals nothing."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return False


class Refused(Few):
    def ready(self, ps: list[Any]) -> None:
        self.kind = Odd("a")

    def scale(self, i: int, p: Any, group: dict[str, Any]) -> float:
        return 2.0 if self.kind == "a" else 1.0  # the line


@way
def test_a_step_that_must_run_in_eager_says_so_once_and_where(way: str) -> None:
    told = steps(Refused, way, nothing)
    assert len(told) == 1
    assert "Odd, which defines its own operators" in told[0]
    (report,) = fuseopt.reports()
    name, _, line = report.fallback.rpartition("(")[2].rstrip(")").rpartition(":")
    with open(name, encoding="utf-8") as file:
        assert "# the line" in file.readlines()[int(line) - 1]


class Fails(Few):
    """On which Dynamo fails: the dict of a parameter, beside a number that is read."""

    def lane(self, i: int, p: Any, group: dict[str, Any]) -> None:
        norm = p.grad.norm().item()
        scale = 2.0 if "odd" in vars(p) else 1.0
        p.sub_(p.grad, alpha=group["lr"] * scale / (1.0 + norm))


@way
def test_where_dynamo_fails_eager_runs_with_a_warning(way: str) -> None:
    told = steps(Fails, way, nothing)
    assert told
    assert all("runs in eager" in text or "breaks the graph" in text for text in told)
    # from torch 2.15 on Dynamo does not fail on it, and compiles it in pieces
    pieces = all("breaks the graph" in text for text in told)
    assert pieces or any(report.fallback for report in fuseopt.reports())


@way
@pytest.mark.parametrize("lanes", [3, 20])
def test_a_gradient_of_another_dtype_runs_in_eager(way: str, lanes: int) -> None:
    a, b = (
        [torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16)) for _ in range(lanes)]
        for _ in range(2)
    )
    for p in (*a, *b):
        p.grad_dtype = None  # type: ignore[attr-defined]
    plain, mine = (torch.optim.SGD(ps, lr=0.1) for ps in (a, b))
    step = WAYS[way](mine)
    for turn in range(3):
        for p in (*a, *b):
            p.grad = torch.full((5,), 0.1 + turn)
        plain.step()
        if turn == 0:
            with pytest.warns(RuntimeWarning, match="has a gradient of torch.float32"):
                step()
        else:
            step()
        assert all(map(same_bits, a, b))
    assert [bool(report.fallback) for report in fuseopt.reports()] == [True]


class Reads(Few):
    """Looks at tables, exceptions, metadata: all that is guarded."""

    seen = 0

    def ready(self, ps: list[Any]) -> None:
        self.table = {"all": 1.0}
        self.order = list(ps)

    def scale(self, i: int, p: Any, group: dict[str, Any]) -> float:
        try:
            scale = self.table["none"]
        except KeyError:
            scale = self.table["all"]
        same = p is self.order[i] and isinstance(p, torch.nn.Parameter)
        return float(scale * p.numel() if same else getattr(p, "none", 1.0))


@way
def test_what_a_step_does_not_read_compiles_nothing_anew(way: str) -> None:
    def before(opt: Any, turn: int) -> None:
        opt.note = {"turn": turn}
        opt.param_groups[0]["lr"] = 0.1 / (1 + turn)
        type(opt).seen += 1
        if turn == 3:
            counted.append(len(fuseopt.reports()))

    counted: list[int] = []
    assert steps(Reads, way, before) == []
    assert len(fuseopt.reports()) == counted[-1] <= 2


def tx_of_trace() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx()


@pytest.mark.parametrize("way", ["backend", "compile"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_no_hook_acts_on_torchs_own_steps(
    way: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[Any] = []
    kept = hooks.guard_here

    def note(source: Any, made: Any) -> None:
        # but for numbers, which are symbols: of what type, and what is asked of them
        if type(hooks.found_at(tx_of_trace(), source)) not in (int, float):
            installed.append((source, made))
        kept(source, made)

    monkeypatch.setattr(hooks, "guard_here", note)
    ps = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    opt = kind(ps, lr=0.1)
    for p in ps:
        p.grad = torch.ones(3)
    WAYS[way](opt)()
    assert fuseopt.reports()
    assert installed == []


def test_lerp_of_lists_keeps_a_wide_weight() -> None:
    """The weight of the foreach form is a number; of the other it has their type."""

    def lists(x: Tensor, y: Tensor, weight: Tensor) -> None:
        torch._foreach_lerp_([x], [y], weight)

    def one(x: Tensor, y: Tensor, weight: Tensor) -> None:
        x.lerp_(y, weight)

    drawn = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1001, generator=drawn).bfloat16() for _ in range(2))
    results = []
    for function in (lists, one):
        for weight in (0.1, 0.7777777):
            want, got = x.clone(), x.clone()
            function(want, y, torch.tensor(weight))
            compiled = torch.compile(function, backend="fuseopt")
            compiled(got, y, torch.tensor(weight))
            assert same_bits(got, want)
            results.append(want)
    assert not same_bits(results[0], results[2])
