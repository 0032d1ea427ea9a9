"""Make one call of C of what a steady call compares.

It compares facts (`compat/facts.py`), then lanes and tensors, in the order of the
driver. The only facts that run Python are Dynamo's guards, which come first. So no
signal handler runs between the comparison of the first lane and that of the last
tensor.

Dynamo's code is not called. It only reads the stand-in, whose contents are those of the
call before. So its graph would get the same arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from .. import compat
from ..compat.facts import ENTRY, Fact, attributes, entry, first_untrue, items, result
from ..handlers import reraise
from ..inputs.contents import comparison_in_c
from ..inputs.lane_guard import DICTS
from ..inputs.pending_gradients import GradientsInC, PendingGradients
from ..runtime.commit import write
from ..runtime.guards.facts import in_c
from ..runtime.undo import CALL

P = ParamSpec("P")
T = TypeVar("T")


class Comparison:
    """Calls of C, of which each returns 0 while nothing differs.

    `grads`: the list that gets the gradients of a call. `given`: what reads them where
    they are parts of tensors. `forget()` releases them.
    """

    def __init__(
        self, calls: list[Any], grads: list[Any], given: GradientsInC | None
    ) -> None:
        self.calls, self.grads, self.given = calls, grads, given
        empty = functools.partial(grads.__setitem__, slice(None), grads.copy())
        self.forget: Callable[[], object] = empty
        if given is not None:
            nothing = slice(None), [None] * len(given.grads)
            both = empty, functools.partial(given.grads.__setitem__, *nothing)
            self.forget = functools.partial(write, both)

    def differs(self) -> object:
        """Compare; return a true value if something differs. One call of C."""
        return next(filter(None, map(CALL, self.calls)), 0)


class CannotRepeat(Exception):
    """C cannot compare a call, or not yet."""


def need(*conditions: object) -> None:
    """Raise CannotRepeat unless all conditions are true."""
    if not all(conditions):
        raise CannotRepeat


def there(x: T | None) -> T:
    """Return an object; raise CannotRepeat for None."""
    need(x is not None)
    return cast(T, x)


def if_repeatable(make: Callable[P, T]) -> Callable[P, T | None]:
    """Let a function return None where C cannot compare a call."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return make(*args, **kwargs)
        except (AttributeError, KeyError, TypeError, CannotRepeat) as error:
            reraise(error)
            return None

    return made


@if_repeatable
def comparison(
    steady: Any, optimizer: Any, given: PendingGradients | None = None
) -> Comparison:
    """Return the comparison for a SteadyCall that has just been done.

    `given`: the gradients that it was given. None where C cannot compare all of it.
    """
    source = None if given is None else there(given.in_c)
    leader, launcher, lane_guard = steady.leader, steady.launcher, steady.lane_guard
    step, bound, guard = launcher.step, launcher.bound, launcher.guard
    shadow, state_guard, trace = steady.shadow, leader.state_guard, steady.trace
    helper, compiled = bound.helper, steady.compiled
    groups, state = optimizer.param_groups, optimizer.state
    lists = [group["params"] for group in groups]
    need(type(groups) is list, type(state) in DICTS, {*map(type, lists)} == {list})
    need(helper, state_guard.struct.n, launcher.repeats(shadow))
    records = shadow.lanes.theirs, shadow.lanes.ours, shadow.plain.ours
    contents = [record.in_c for record in records]
    need(*contents, isinstance(compiled, compat.DirectDynamoCall))
    guards = compiled.facts(trace.stand_in)
    need(guards, bound.taking is step.taking, shadow.given[0] is state_guard.epoch)
    facts = [
        *guards,
        # no Python runs from here on
        *attributes(optimizer, "state", "param_groups"),
        *items(groups),
        *(entry(group, "params") for group in groups),
        *attributes(leader, "last_call", "trace", "pending", "state_guard"),
        *steady.facts,
        Fact(ENTRY, vars(shadow), "clean", True),
        *attributes(state_guard, "epoch"),
        *attributes(trace, "compiled", "shadow"),
        *attributes(shadow, "given", "lanes", "plain"),
        *attributes(step, "taking", "pending", "instead"),
        *attributes(bound, "numbers", "taking"),
        *attributes(guard, "count"),
        *attributes(lane_guard, "_given"),
        *(result(1, same) for same in contents),
        result(1, comparison_in_c(helper, state_guard.struct)),
    ]
    compared = in_c(helper, facts)
    need(first_untrue(facts) == 0, compared() == 0)
    read, of_parts = ([], None) if source is None else ([source.read], source.grads)
    lanes, grads = lane_guard.as_calls(vars(optimizer), lists, state, of_parts)
    calls = [compared, *read, *lanes, launcher.compare_others()]
    return Comparison(calls, grads, source)
