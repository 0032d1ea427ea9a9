"""Capabilities: private parts of torch that fuseopt needs; probed, switched, reported.

A capability is one use of private parts of torch. It is available if its probe
succeeds. A probe checks names and signatures. Where a changed meaning would be silent,
it also checks behaviour. A capability that raises while it is used is switched off for
the rest of the process. FUSEOPT_WITHOUT=name,name (or all) switches some off.

Each capability describes what a step loses without it. Some are needed for a step's
bits: without them fuseopt compiles only steps that provably do not need them, see
sound.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ..config import CHECKED, switched_off
from .names import Missing

log = logging.getLogger("fuseopt")


class Capability:
    """One use of private parts of torch.

    name: as in FUSEOPT_WITHOUT.
    gives: what fuseopt does with it.
    without: what a step loses.
    bits: a step may need it for eager's bits.
    probe: returns normally, or raises Missing.
    needs: other capabilities on which it depends.
    expected: some versions of Python lack it, and fuseopt does not warn.
    """

    def __init__(
        self,
        name: str,
        gives: str,
        without: str,
        *,
        bits: bool = False,
        probe: Callable[[], Any] | None = None,
        needs: tuple[Capability, ...] = (),
        expected: bool = False,
    ) -> None:
        self.name = name
        self.gives = gives
        self.without = without
        self.bits = bits
        self.probe = probe
        self.needs = needs
        self.expected = expected
        self._missing: str | None = None
        #: True once it was found available; a call tests this before `available`
        self.there = False
        switches.table[name] = self

    @property
    def off(self) -> bool:
        """Is it switched off, by the environment or a test?"""
        return switches.off(self.name)

    def missing(self) -> str:
        """Return why it is not available; "" if it is."""
        if self.off:
            return "switched off by FUSEOPT_WITHOUT"
        for other in self.needs:
            if not other.available():
                return f"it needs {other.name}"
        if self._missing is None:
            self._missing = self._probed()
        return self._missing

    def known(self) -> str:
        """Return why it is not available, without a probe; "" if no probe ran yet."""
        if self.there:
            return ""
        return self.missing() if self.off or self._missing is not None else ""

    def available(self) -> bool:
        """Is it available, and not switched off?"""
        if not self.there:
            self.there = not self.missing()
        return self.there

    def broke(self, error: BaseException) -> None:
        """Switch it off for good, after it raised an error in use."""
        first = (str(error).strip() or "?").partition("\n")[0]
        self._missing = f"it failed: {type(error).__name__}: {first}"
        switches.changed()
        log.info("%s is switched off: %s", self.name, self._missing)

    def lack(self, why: str) -> None:
        """Record that torch lacks it, as an attempt to use it has shown."""
        self._missing = why
        switches.changed()

    def probe_again(self) -> str:
        """Forget what use has shown; return why it is not available, or ""."""
        self._missing = None
        switches.changed()
        return self.missing()

    def _probed(self) -> str:
        if self.probe is None:
            return ""
        try:
            self.probe()
        except Missing as error:
            return str(error)
        except Exception as error:  # a future torch may raise anything
            return f"its probe failed: {type(error).__name__}: {error}"
        return ""


class Switches:
    """Capabilities that are switched off, by the environment and by tests.

    `table`: all capabilities, by name. `epoch` counts the changes, so that decisions
    from them are made again.
    """

    def __init__(self) -> None:
        self.table: dict[str, Capability] = {}
        self.epoch = 0
        self.caches: list[Callable[[], None]] = []
        self._off: frozenset[str] | None = None
        self._without: list[frozenset[str]] = []

    def off(self, name: str) -> bool:
        if self._off is None:
            self._off = switched_off()
        every = (self._off, *self._without)
        return any(name in names or "all" in names for names in every)

    def changed(self) -> None:
        """Make each capability test again whether it is available."""
        self.epoch += 1
        for capability in self.table.values():
            capability.there = False
        for clear in self.caches:
            clear()

    def requested(self) -> frozenset[str]:
        """Return the names that are switched off, valid or not."""
        self.off("")
        return frozenset().union(self._off or (), *self._without)

    @contextlib.contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """Switch some capabilities off within this context."""
        self._without.append(frozenset(names))
        self.changed()
        try:
            yield
        finally:
            self._without.pop()
            self.changed()

    def forget(self) -> None:
        """Read the environment again."""
        self._off = None
        self.changed()


switches = Switches()
Function = TypeVar("Function", bound=Callable[..., Any])


def cached(function: Function) -> Function:
    """Return `functools.cache` of a function, emptied when a capability is switched."""
    remembering: Any = functools.cache(function)
    switches.caches.append(remembering.cache_clear)
    return remembering  # type: ignore[no-any-return]


def lacking() -> list[Capability]:
    """Return the capabilities that are switched off or were found missing.

    Capabilities that were never probed are left out.
    """
    return [
        x for x in switches.table.values() if x.off or (x.known() and not x.expected)
    ]


def unchecked() -> str:
    """Describe a torch outside of the tested versions; "" for a tested one."""
    version = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    first, end = CHECKED
    if first <= version < end:
        return ""
    checked = f"{first[0]}.{first[1]} to {end[0]}.{end[1] - 1}"
    age = "older" if version < first else "newer"
    return f"torch {torch.__version__} is {age} than what was checked ({checked})"


def lacks() -> list[str]:
    """Describe what fuseopt does without here, one line for each thing."""
    lines = [unchecked()] if unchecked() else []
    for x in lacking():
        lines.append(f"without {x.name} ({x.missing()}): {x.without}")
    return lines


def probed(
    name: str, gives: str, without: str, **more: Any
) -> Callable[[Callable[[], Any]], Capability]:
    """Make a capability of its probe."""

    def made(probe: Callable[[], Any]) -> Capability:
        return Capability(name, gives, without, probe=probe, **more)

    return made
