"""Random optimizers: the bits of eager both ways in, or a refusal that wrote nothing.

Each is a class in a file of its own, stepped four to six times beside a plain eager
twin, while a user changes numbers, tables, attributes and state. After every step all
that either holds must be the same. A few here, always the same ones; 2,000 in
`make fuzz`, other ones each time. A failure prints the smallest class that still fails;
`python -m tests.test_fuzz_optimizers SEED ...` runs those of given seeds.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.optim import Optimizer

import fuseopt
from fuseopt.errors import FuseoptError
from fuseopt.session import session
from tests.frozen import frozen, unlike
from tests.fuzz_optimizers import Drawn, load, random_optimizer

#: `make fuzz` runs 2,000, in so many tests that several processes share them.
FUZZ = settings.get_current_profile_name() == "fuzz"
TESTS = 40 if FUZZ else 2
EXAMPLES = 50 if FUZZ else 6
#: What a failure may cost to be made small.
TRIALS = 40


class Silent(AssertionError):
    """A step gave something else than eager's, and said nothing."""


def plain(opt: Optimizer) -> Callable[[], Any]:
    return opt.step


def backend(opt: Optimizer) -> Callable[[], Any]:
    return torch.compile(opt.step, backend="fuseopt")


def apart(opt: Optimizer) -> Callable[[], Any]:
    fuseopt.compile(opt)
    return lambda: opt.step()


def dynamo(opt: Optimizer) -> Callable[[], Any]:
    """Dynamo alone: is a difference of its making?"""
    return torch.compile(opt.step, backend="eager")


WAYS = {"backend": backend, "compile": apart}


class Run:
    """One optimizer, its parameters and the function that steps it."""

    def __init__(self, path: Path, way: Callable[[Optimizer], Any]) -> None:
        self.module = load(path)
        self.ps, self.opt = self.module.build()
        self.step = way(self.opt)

    def prepare(self, turn: int) -> str:
        """Fresh gradients, and what the user does; the name of what that raised."""
        for n, p in enumerate(self.ps):
            drawn = torch.Generator().manual_seed(1000 * turn + n)
            grad = torch.randn(p.shape, generator=drawn).to(p.dtype)
            p.grad = grad if n % 7 else grad.clone().zero_() if turn == 1 else grad
        try:
            self.module.before(turn, self.opt, self.ps)
        except Exception as error:
            return type(error).__name__
        return ""

    def take(self) -> Exception | None:
        """One step; what it raised."""
        try:
            self.step()
        except Exception as error:
            return error
        return None

    def frozen(self) -> dict[str, Any]:
        return frozen(self.module, self.opt, self.ps)


def refusal(error: BaseException | None) -> bool:
    """Is it fuseopt's own, whatever Dynamo wrapped it in?"""
    while error is not None:
        if isinstance(error, FuseoptError):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False


def outcome() -> str:
    """What became of the step of a run: led, whole, eager."""
    told = fuseopt.reports()
    if any("do as these" in r.traced for r in told):
        return "led"
    if any(not r.fallback for r in told):
        return "whole"
    return "eager"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A fresh Dynamo, its warnings and logs unseen: a fallback is no failure here."""
    torch._dynamo.reset()
    session.reset()
    kept = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(kept)
        torch.set_grad_enabled(True)
        torch._dynamo.reset()


def check(drawn: Drawn, way: str | Callable[[Optimizer], Any], folder: Path) -> str:
    """Both runs, side by side; raises Silent. What became of the step."""
    path = folder / f"optimizer_{drawn.seed}.py"
    path.write_text(drawn.text(), encoding="utf-8")
    with quiet(), contextlib.ExitStack() as after:
        runs = []
        for how in (plain, WAYS[way] if isinstance(way, str) else way):
            runs.append(Run(path, how))
            after.callback(sys.modules.pop, runs[-1].module.__name__)
        twin, mine = runs
        for turn in range(drawn.turns):
            raised = mine.prepare(turn), twin.prepare(turn)
            if raised[0] != raised[1]:
                raise Silent(f"before step {turn}: {raised[0]}, in eager {raised[1]}")
            before = mine.frozen()
            want, got = twin.take(), mine.take()
            if got is not None and refusal(got):
                for what in unlike(mine.frozen(), before):
                    raise Silent(f"step {turn} was refused ({got}); yet {what}")
                return "refused"
            if type(want) is not type(got):
                raise Silent(f"step {turn} raised {got!r}, in eager {want!r}") from got
            if want is not None:
                return "raised"
            for what in unlike(mine.frozen(), twin.frozen()):
                raise Silent(f"after step {turn} ({outcome()}): {what}")
        return outcome()


def failure(drawn: Drawn, way: Any, folder: Path) -> Exception | None:
    try:
        check(drawn, way, folder)
    except Exception as error:
        return error
    return None


def smaller(drawn: Drawn) -> Iterator[Drawn]:
    """The same with one thing less, what matters most first."""
    if drawn.turns > 2:
        yield replace(drawn, turns=drawn.turns - 1)
    for n in range(len(drawn.pieces)):
        yield replace(drawn, pieces=drawn.pieces[:n] + drawn.pieces[n + 1 :])
    for n in range(len(drawn.events)):
        yield replace(drawn, events=drawn.events[:n] + drawn.events[n + 1 :])
    if drawn.ends:
        yield replace(drawn, ends=(), rates=drawn.rates[:1])
    if len(drawn.kinds) > 1:
        for n in range(len(drawn.kinds)):
            yield replace(drawn, kinds=drawn.kinds[:n] + drawn.kinds[n + 1 :])
    ordinary = {
        "form": "loop",
        "order": "plain",
        "write": "p.add_(upd, alpha=-rate)",
        "grad_mode": "decorator",
        "kinds": ("((5,), torch.float32)",),
    }
    for name, value in ordinary.items():
        if getattr(drawn, name) != value:
            yield replace(drawn, **{name: value})  # type: ignore[arg-type]


def smallest(drawn: Drawn, way: Any, folder: Path, error: Exception) -> Any:
    """The smallest that still fails in the same way, and how it does."""
    trials = 0
    again = True
    while again:
        again = False
        for other in smaller(drawn):
            trials += 1
            if trials > TRIALS:
                return drawn, error
            found = failure(other, way, folder)
            if type(found) is type(error):
                drawn, error, again = other, found, True
                break
    return drawn, error


def judge(seed: int, folder: Path) -> list[str]:
    """What became of the optimizer of a seed, each way; raises with the smallest."""
    drawn, told = random_optimizer(seed), []
    for way in WAYS:
        try:
            told.append(check(drawn, way, folder))
        except Exception as error:
            small, last = smallest(drawn, way, folder, error)
            also = failure(small, dynamo, folder)
            whose = "Dynamo alone is right" if also is None else f"Dynamo alone: {also}"
            pieces = ", ".join(name for name, _ in drawn.pieces)
            raise AssertionError(
                f"seed {seed}, {way}: {last}\n({whose}; drawn: {pieces})\n{small}"
            ) from last
    return told


TOLD: dict[str, Counter[str]] = {way: Counter() for way in WAYS}


def told() -> str:
    """How often each way was led, whole, eager, refused, or raised as eager did."""
    return "; ".join(
        f"{way}: " + ", ".join(f"{n} {what}" for what, n in sorted(count.items()))
        for way, count in TOLD.items()
    )


@pytest.mark.timeout(3600 if FUZZ else 300)
@pytest.mark.parametrize("number", range(TESTS))
def test_random_optimizers(number: int, tmp_path: Path) -> None:
    def one(seed: int) -> None:
        for way, what in zip(WAYS, judge(seed * TESTS + number, tmp_path), strict=True):
            TOLD[way][what] += 1

    settings(
        max_examples=EXAMPLES,
        derandomize=not FUZZ,
        deadline=None,
        database=None,
        print_blob=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(given(seed=st.integers(0, 2**32 - 1))(one))()


def test_most_of_them_are_compiled() -> None:
    """Nothing here passes by refusing all: after the tests above, in one process."""
    print(told())
    for count in TOLD.values():
        if count:
            assert count["led"] + count["whole"] > count.total() / 2
            assert count["refused"] + count["raised"] < count.total() / 4


def main(seeds: Sequence[str]) -> int:
    """Run seeds, or ranges such as 0-99; print each that fails, small, and all told."""
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        for text in seeds:
            first, _, last = text.partition("-")
            for seed in range(int(first), int(last or first) + 1):
                try:
                    found = judge(seed, Path(name))
                except AssertionError as error:
                    wrong += 1
                    print(f"{'=' * 80}\n{error}", flush=True)
                    continue
                for way, what in zip(WAYS, found, strict=True):
                    TOLD[way][what] += 1
    print(f"{wrong} wrong; {told()}")
    return min(wrong, 99)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
