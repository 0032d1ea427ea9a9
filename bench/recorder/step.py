"""A recorded step: recorded where nothing fits, and run where a recording does.

The optimizer changes only after the launch, as what the run left in the copy says: new
numbers by their formulas, tensors that the graph returns.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim import Optimizer

from fuseopt import compat
from fuseopt.compat.gc_pause import collector_paused
from fuseopt.compiler import dispatch
from fuseopt.compiler.code_paths import PLAIN
from fuseopt.config import resolve
from fuseopt.shadow.optimizer import Shadow

from . import seen
from .facts import Facts
from .held import CONSTANTS, DICTS, TENSORS, Held
from .numbers import Expr, Refused, SymbolicMath, evaluate, is_number
from .record import Recording

#: Recordings that a step keeps, and attempts before it is left to Dynamo.
KEPT = 12


class Module(GraphModule):
    """A graph module whose code is made when somebody asks for it."""

    def recompile(self) -> Any:
        """Make no code."""
        return None


class Effect:
    """What a run left in a container: the keys that go, and the values that come."""

    def __init__(self, theirs: Any, gone: list[Any], news: Any) -> None:
        self.theirs = theirs
        self.gone = gone
        self.news = news


class Program:
    """A recording, compiled.

    `facts`: what it depends on outside of the optimizer. `seconds`: of its parts.
    """

    def __init__(self, recording: Recording, held: Held, facts: Facts) -> None:
        self.key = held.key
        self.facts = facts
        self.alive = [pair.theirs for pair in held.pairs]  # the key has their ids
        self.outcomes = recording.outcomes
        self.log = recording.log
        self.inputs = recording.inputs
        self.outputs: list[Any] = []
        self._output: dict[int, int] = {}
        self.recording: Recording | None = recording
        self.effects = [e for pair in held.pairs if (e := self._effect(pair, held))]
        recording.close(self.outputs)
        self.graph = recording.graph
        self.calls, self.nodes = recording.calls, recording.made
        self.module = Module(torch.nn.Module(), self.graph)
        self.run: Callable[..., Any] | None = None
        self.seconds: dict[str, float] = {}

    # ---------------------------------------------------------------- what it leaves

    def _effect(self, pair: Any, held: Held) -> Effect | None:
        ours, before = pair.ours, pair.before
        if isinstance(ours, list):
            if len(ours) == len(before) and all(map(_is, ours, before)):
                return None
            return Effect(pair.theirs, [], [self._value(x, held) for x in ours])
        gone = [k for k in before if k not in ours]
        news = {
            k: self._value(x, held)
            for k, x in ours.items()
            if k not in before or before[k] is not x
        }
        kept = [k for k in before if k in ours]
        if [*ours][: len(kept)] != kept:
            raise Refused("it changes the order of a dict")
        news = {_key(k, held): x for k, x in news.items()}
        return Effect(pair.theirs, gone, news) if gone or news else None

    def _value(self, x: Any, held: Held) -> Any:
        """A value that stays, as a function of (leaves, outputs, numbers)."""
        if is_number(x):
            expr = x.expr
            self.needs_known(x)
            return lambda numbers, outputs: numbers(expr)
        if id(x) in held.theirs and isinstance(x, (*DICTS, list)):
            theirs = held.theirs[id(x)]
            return lambda numbers, outputs: theirs
        if x is held.itself:
            raise Refused("it keeps the optimizer in itself")
        kind = type(x)
        if kind in TENSORS:
            if id(x) in held.place:
                at = held.place[id(x)]
                return lambda numbers, outputs: outputs[-1 - at]
            assert self.recording is not None
            self.recording.node_of(x)
            place = self._output.setdefault(id(x), len(self.outputs))
            if place == len(self.outputs):
                self.outputs.append(x)
            return lambda numbers, outputs: outputs[place]
        if isinstance(x, CONSTANTS):
            return lambda numbers, outputs: x
        if id(x) in self.facts.containers:
            raise Refused("it keeps a table that is not the optimizer's")
        if kind is tuple and _is_constant(x):
            return lambda numbers, outputs: x
        if kind in (list, tuple):
            items = [self._value(y, held) for y in x]
            return lambda numbers, outputs: kind([f(numbers, outputs) for f in items])
        if kind in DICTS:
            named = {_key(k, held): self._value(y, held) for k, y in x.items()}
            factory = [x.default_factory] if hasattr(x, "default_factory") else []

            def make(numbers: Any, outputs: Any) -> Any:
                made = kind(*factory)
                made.update({k: f(numbers, outputs) for k, f in named.items()})
                return made

            return make
        raise Refused(f"it keeps a {kind.__name__}, of which nothing is known")

    def needs_known(self, number: Any) -> None:
        """Raise Refused for a number that only a kernel computes."""
        try:
            _ = number.value
        except Refused as error:
            raise Refused("it keeps a number that was read from a tensor") from error

    # ---------------------------------------------------------------- later calls

    def fits(self, held: Held) -> bool:
        """Does the recording hold for what the optimizer holds now?"""
        if held.key != self.key or not self.facts.hold():
            return False
        if not self.log.holds(held.leaves):
            return False
        numbers = self._numbers(held.leaves)
        try:
            return all(_same(numbers(expr), want) for expr, want in self.outcomes)
        except Exception:
            return False

    def _numbers(self, leaves: Sequence[Any]) -> Callable[[Expr], Any]:
        known: dict[Any, Any] = {}
        log = self.log
        return lambda expr: evaluate(
            expr, leaves, lambda s: log.item(s, leaves, known), known
        )

    def arguments(self, leaves: Any, numbers: Any = None) -> list[Any]:
        """The arguments of the graph, in a call with these leaves."""
        numbers = numbers or self._numbers(leaves)
        return [numbers(x) if isinstance(x, Expr) else leaves[x] for x in self.inputs]

    def step(self, held: Held) -> None:
        """Do the step: the launch, then what it leaves in dicts and lists."""
        assert self.run is not None
        numbers = self._numbers(held.leaves)
        news = [numbers(e) for e in self._wanted()]
        del news
        known = {id(e): numbers(e) for e in self._wanted()}
        made = self.run(*self.arguments(held.leaves, numbers))
        outputs = [*made, *reversed(held.leaves)]
        for effect in self.effects:
            theirs = effect.theirs
            if isinstance(theirs, list):
                theirs[:] = [f(lambda e: known[id(e)], outputs) for f in effect.news]
                continue
            for k in effect.gone:
                del theirs[k]
            for k, f in effect.news.items():
                theirs[k] = f(lambda e: known[id(e)], outputs)

    def _wanted(self) -> list[Expr]:
        """The numbers that effects need, which are computed before the launch."""
        if not hasattr(self, "_exprs"):
            found: list[Expr] = []

            class Nothing:
                def __getitem__(self, k: Any) -> None:
                    return None

            for effect in self.effects:
                values = effect.news
                for f in values.values() if isinstance(values, dict) else values:
                    f(found.append, Nothing())
            self._exprs = found
        return self._exprs


def _is_constant(x: Any) -> bool:
    """Is it a plain value, or a tuple of such?"""
    if type(x) is tuple:
        return all(map(_is_constant, x))
    return isinstance(x, PLAIN) and not is_number(x)


def _key(k: Any, held: Held) -> Any:
    """A key that stays; a number was fixed when it became one."""
    if is_number(k):
        return k.fix()
    if isinstance(k, torch.Tensor) and id(k) not in held.place:
        raise Refused("it keeps something under a tensor of its own making")
    if not isinstance(k, (torch.Tensor, *PLAIN)):
        raise Refused(f"it keeps something under a {type(k).__name__}")
    return k


def _is(a: Any, b: Any) -> bool:
    return a is b


def _same(x: Any, y: Any) -> bool:
    return type(x) is type(y) and repr(x) == repr(y)


def record(optimizer: Optimizer, function: Any) -> tuple[Program, Held]:
    """Record the step of an optimizer as it is now. Raises Refused; nothing changes."""
    begin = time.thread_time()
    recording = Recording()
    held = Held(optimizer, recording.number)
    recording.take(held)
    copied = time.thread_time()
    watch = seen.Watch(held, recording)
    Refused.last = None
    before = torch.get_rng_state()
    mode = torch.is_grad_enabled()
    try:
        with SymbolicMath(recording), recording, watch:
            result = function(held.itself)
    except Refused:
        raise
    except Exception as error:
        if isinstance(error.__cause__, Refused):
            raise error.__cause__ from None
        raise Refused(f"it raises {type(error).__name__}: {error}") from error
    finally:
        torch.set_grad_enabled(mode)
        watch.restore()
    if Refused.last is not None:
        raise Refused.last
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise Refused("it draws random numbers")
    if result is not None:
        raise Refused("it returns something")
    program = Program(recording, held, watch.facts)
    end = time.thread_time()
    program.seconds = {"copy": copied - begin, "record": end - copied}
    return program, held


def compiled(
    program: Program, held: Held, options: Mapping[str, Any] | None = None
) -> None:
    """Compile a recording by the backend. Raises what the backend does."""
    begin = time.thread_time()
    args = program.arguments(held.leaves)
    config = resolve(None, {**(options or {}), "fallback": "error"})
    program.run = dispatch._update(program.module, args, config, ())
    assert program.recording is not None
    program.recording.release()
    program.recording = None
    program.seconds["compile"] = time.thread_time() - begin


@contextmanager
def collected_late() -> Iterator[None]:
    """Pause the collector, and let it take what was made here for old: a graph of all
    lanes stays, and to search it at once takes as long as to record it.
    """
    with collector_paused():
        try:
            yield
        finally:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put generators back as they were: what is imported first may draw from them."""
    numpy = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate()
    kept = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy is not None:
            numpy.random.set_state(kept)


def begin(optimizer: Optimizer) -> list[Any]:
    """Begin the state of lanes without one as torch.optim does, so that one recording
    is enough; returns the parameters that got one.
    """
    state = optimizer.state
    if all(p in state for g in optimizer.param_groups for p in g["params"]):
        return []
    try:
        shadow = Shadow(optimizer)
        shadow.refresh(optimizer)
        known = dict(state)
        if not compat.initialize(shadow.itself):
            return []
    except Exception:
        return []
    fresh = {
        p: entries
        for p, entries in shadow.itself.state.items()
        if p not in known and entries
    }
    state.update(fresh)
    return [*fresh]


class RecordedStep:
    """The step of one optimizer, recorded. `why`: why it is left to Dynamo, or ""."""

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function
        self.why = ""
        self.programs: list[Program] = []
        self.recorded = 0

    def step(self, optimizer: Optimizer) -> bool:
        """Do one step; False, with `why`, if nothing was done."""
        if self.why:
            return False
        try:
            held = Held(optimizer)
            program = next((x for x in self.programs if x.fits(held)), None)
            if program is None:
                if self.recorded >= KEPT:
                    raise Refused("it is recorded anew at each call")
                self.recorded += 1
                with collected_late(), generators_kept():
                    begun = begin(optimizer)
                    try:
                        program, held = record(optimizer, self.function)
                        compiled(program, held)
                    except BaseException:
                        for p in begun:
                            del optimizer.state[p]
                        raise
                self.programs.append(program)
        except Exception as error:
            self.why = str(error).strip().partition("\n")[0] or type(error).__name__
            self.programs.clear()
            Refused.last = None  # its traceback holds what the user holds
            return False
        program.step(held)
        return True
