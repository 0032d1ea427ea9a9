"""Patches of Dynamo that are in force only while fuseopt traces.

A capability that changes how Dynamo traces is a function that puts hooks into a
`Patcher`. `Patches` records what each hook replaced. `enter` puts all hooks in force
and `settle` restores torch as it was imported. A capability that cannot be installed
leaves nothing behind. One that raises while Dynamo traces is switched off, and the
trace begins anew.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..locks import new_rlock
from .capability import Capability, switches
from .names import Missing, find, takes

Hook = Callable[..., Any]
_ABSENT: Any = object()
HERE = os.path.dirname(__file__) + os.sep
#: Method tables of Dynamo's classes, from torch 2.14 on.
TABLES = ("tp_methods", "tp_getset", "tp_members")
#: Errors that show that torch differs from the one for which the hook was written.
MISFITS = (AttributeError, TypeError, ImportError, NameError, Missing)


class Change(NamedTuple):
    """One attribute of an object, or one item of a table, before and after."""

    owner: Any
    key: Any
    item: bool
    before: Any
    after: Any

    def put(self, value: Any) -> None:
        if self.item and value is _ABSENT:
            self.owner.pop(self.key, None)
        elif self.item:
            self.owner[self.key] = value
        elif value is _ABSENT:
            if self.key in vars(self.owner):
                delattr(self.owner, self.key)
        else:
            setattr(self.owner, self.key, value)


class Patcher:
    """Installs the hooks of one capability, and records what each replaces.

    backend: the backend for which Dynamo traces.
    """

    def __init__(self, capability: Capability, backend: Callable[..., Any]) -> None:
        self.capability = capability
        self.backend = backend
        self.changes: list[Change] = []

    def around(self, owner: Any, name: str, hook: Hook, *parameters: str) -> None:
        """Replace a function or a method by `hook(original, ...)`.

        Its first parameters must have the given names. Raises Missing.
        """
        original = _looked_up(owner, name, parameters)
        self.attribute(owner, name, self.guarded(original, hook))

    def outside(self, owner: Any, name: str, hook: Hook, *parameters: str) -> None:
        """Wrap a function that Dynamo does not repeat when it begins a trace anew.

        Like `around`, but after an error of the hook itself, the result of `original`
        counts.
        """
        original = _looked_up(owner, name, parameters)
        self.attribute(owner, name, self.guarded(original, hook, outside=True))

    def guarded(self, original: Any, hook: Hook, outside: bool = False) -> Any:
        """Return a function that calls `hook(original, ...)`.

        An error of the hook itself switches the capability off.
        """
        capability = self.capability

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            outcome = _Outcome(original) if outside else original
            try:
                return hook(outcome, *args, **kwargs)
            except MISFITS as error:
                if not _is_own(error):
                    raise
                capability.broke(error)
                if outside:
                    return outcome.again(*args, **kwargs)
                raise _anew(capability.name) from error

        return method

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a class, a module or an object."""
        before, original = vars(owner).get(name, _ABSENT), getattr(owner, name, None)
        self._change(Change(owner, name, False, before, value))
        for table in TABLES:
            entries = vars(owner).get(table)
            for key, entry in [*entries.items()] if isinstance(entries, dict) else ():
                for part in ("handler", "getter"):
                    if getattr(entry, part, None) is original:
                        new = dataclasses.replace(entry, **{part: value})
                        self.item(entries, key, new)

    def item(self, table: Any, key: Any, value: Any) -> None:
        """Set an item of a dict or a list."""
        has = not isinstance(table, dict) or key in table
        self._change(Change(table, key, True, table[key] if has else _ABSENT, value))

    def _change(self, change: Change) -> None:
        """Record a change, then make it: an interrupt in between does no harm."""
        self.changes.append(change)
        change.put(change.after)

    def handler(self, table: dict[Any, Any], function: Any, hook: Hook) -> None:
        """Replace the handler of a function in a table of Dynamo by `hook(original,
        ...)`.

        If there is no handler, `original` declines.
        """
        original = table.get(function) or _declines
        self.item(table, function, self.guarded(original, hook))

    def undo(self) -> None:
        """Revert all changes; can be repeated after an interrupt."""
        for change in reversed(self.changes):
            change.put(change.before)


def _looked_up(owner: Any, name: str, parameters: tuple[str, ...]) -> Any:
    """Return the function that a hook replaces. Raises Missing."""
    original = getattr(owner, name, None)
    if original is None:
        where = getattr(owner, "__qualname__", getattr(owner, "__name__", owner))
        raise Missing(f"{where} has no {name}")
    if parameters:
        takes(original, *parameters)
    return original


class _Outcome:
    """Calls a function, and keeps the outcome of the last call."""

    def __init__(self, function: Hook) -> None:
        self.function = function
        self.called = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called, self.error = True, None
        try:
            self.result = self.function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        return self.result

    def again(self, *args: Any, **kwargs: Any) -> Any:
        """Return or raise the outcome of the last call; call the function if there was
        none.
        """
        if not self.called:
            return self.function(*args, **kwargs)
        if self.error is not None:
            raise self.error
        return self.result


def _declines(*_: Any, **__: Any) -> None:
    """Return None, so that Dynamo goes on as it does without a handler."""


def _is_own(error: BaseException) -> bool:
    """Did a line of this package raise an error, and not torch?"""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_code.co_filename.startswith(HERE)


#: How the reason of a trace that begins anew after a failed hook starts.
GOES_ON = "fuseopt goes on without"


def _anew(name: str) -> Exception:
    """Return Dynamo's exception that begins a trace anew."""
    restart: Any = find("torch._dynamo.exc:SpeculationRestartAnalysis")
    error: Exception = restart(restart_reason=f"{GOES_ON} {name}")
    return error


def goes_on(error: BaseException | None) -> bool:
    """Is it the exception that begins a trace anew after a hook has failed?"""
    return str(getattr(error, "restart_reason", "")).startswith(GOES_ON)


class Patch(Capability):
    """A capability that is in force while fuseopt traces.

    attach: a function that puts its hooks into a Patcher.
    """

    def __init__(
        self, name: str, gives: str, without: str, attach: Hook, **more: Any
    ) -> None:
        super().__init__(name, gives, without, **more)
        self.attach = attach

    def missing(self) -> str:
        if self.off:
            return super().missing()
        patches.build()
        every = (*patches.needs, *self.needs)
        others = [x for x in every if not x.available()]
        if others:
            return f"it needs {others[0].name}"
        return self._missing or ""  # no result before the first trace

    def attached(self) -> None:
        """Record that its hooks could be installed."""
        self._missing = ""


class Patches:
    """Hooks of all capabilities in `all`, as one list of changes.

    They are in force between `enter` and `settle`; `token` identifies the trace.
    """

    def __init__(self) -> None:
        self.all: tuple[Patch, ...] = ()
        self.backend: Callable[..., Any] | None = None
        #: without these no hook is ever in force
        self.needs: tuple[Capability, ...] = ()
        self.token: object = None
        self._lock = new_rlock(self._begin_anew)
        self._changes: list[Change] = []
        self._epoch = -1
        self._entered = False
        self._builds = False
        #: the patchers that `build` has installed; some of them, if an interrupt ended
        #: it
        self._put_now: list[Patcher] = []

    @property
    def in_force(self) -> bool:
        return self._entered

    def serve(self, backend: Callable[..., Any], hooks: tuple[Patch, ...]) -> None:
        """Put these hooks in force from now on when Dynamo traces for a backend."""
        self.backend, self.all = backend, hooks
        switches.changed()

    def build(self) -> None:
        """Find out which hooks can be installed, and what each changes."""
        with self._lock:
            if self._epoch == switches.epoch or self._entered or self._builds:
                return
            if self.backend is None:
                return
            self._builds = True
            try:
                self._take_back()
                for patch in self.all:
                    if _may_be_put(patch):
                        self._put(patch, self.backend)
                every = (x for patcher in self._put_now for x in patcher.changes)
                self._changes = [*_merged(every)]
            finally:
                self._builds = False
                self._take_back()
            self._epoch = switches.epoch

    def _begin_anew(self) -> None:
        """Reset the flag in a process that was forked while another thread built."""
        self._builds = False

    def _take_back(self) -> None:
        """Undo the changes of `build`, or of an earlier call that was interrupted."""
        while self._put_now:
            self._put_now[-1].undo()
            self._put_now.pop()

    def _put(self, patch: Patch, backend: Callable[..., Any]) -> None:
        patcher = Patcher(patch, backend)
        self._put_now.append(patcher)
        try:
            patch.attach(patcher)
            patch.attached()
        except Exception as error:
            patcher.undo()
            patcher.changes.clear()
            known = isinstance(error, (Missing, ImportError, AttributeError))
            patch.lack(str(error) if known else f"{type(error).__name__}: {error}")

    def enter(self, token: object) -> None:
        """Put all hooks in force, for one trace."""
        with self._lock:
            self.settle(self.token)
            self.build()
            self._entered, self.token = True, token
            try:
                for change in self._changes:
                    change.put(change.after)
            except BaseException:
                self.settle(token)
                raise

    def settle(self, token: object) -> None:
        """Restore what `enter` changed, if hooks are in force for this trace."""
        with self._lock:
            if self._entered and self.token is token:
                for change in reversed(self._changes):
                    change.put(change.before)
                self._entered, self.token = False, None


def _may_be_put(patch: Patch) -> bool:
    broken = patch._missing not in (None, "")
    return not broken and not patch.off and all(x.available() for x in patch.needs)


def _merged(changes: Iterator[Change]) -> Iterator[Change]:
    """Yield one change for each attribute: from torch's value to the last hook."""
    merged: dict[tuple[int, Any], Change] = {}
    for change in changes:
        place = id(change.owner), change.key
        first = merged.get(place)
        merged[place] = change if first is None else first._replace(after=change.after)
    yield from merged.values()


patches = Patches()


def patch(name: str, gives: str, without: str, **more: Any) -> Callable[[Hook], Patch]:
    """Make a capability of the function that puts its hooks into a Patcher."""

    def made(attach: Hook) -> Patch:
        return Patch(name, gives, without, attach, **more)

    return made
