"""What torch does not promise, as capabilities: probed, switched off, reported.

A capability is one thing that fuseopt does with private parts of torch. It is there if
its probe succeeds. A probe checks names and signatures, and where a changed meaning
would be silent, what they do. A capability that raises while it is used is switched off
for the rest of the process. FUSEOPT_WITHOUT=name,name (or all) switches some off.

Each says what a step loses without it. Some are needed for a step's bits: without them
only steps that provably do not need them are compiled, see sound.py.
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

    name: as in FUSEOPT_WITHOUT. gives: what fuseopt does with it. without: what a step
    loses. bits: a step may need it for eager's bits. probe: returns normally, or raises
    Missing. needs: other capabilities that it stands on. expected: some versions of
    Python lack it, and nobody is warned.
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
        #: is it known to be there? A call asks this first, and else `available`
        self.there = False
        switches.table[name] = self

    @property
    def off(self) -> bool:
        """Was it switched off by somebody?"""
        return switches.off(self.name)

    def missing(self) -> str:
        """Why it is not there; "" if it is."""
        if self.off:
            return "switched off by FUSEOPT_WITHOUT"
        for other in self.needs:
            if not other.available():
                return f"it needs {other.name}"
        if self._missing is None:
            self._missing = self._probed()
        return self._missing

    def known(self) -> str:
        """Why it is known not to be there; "" where nobody has looked yet."""
        if self.there:
            return ""
        return self.missing() if self.off or self._missing is not None else ""

    def available(self) -> bool:
        """Is it there, and not switched off?"""
        if not self.there:
            self.there = not self.missing()
        return self.there

    def broke(self, error: BaseException) -> None:
        """Switch it off for good: it raised an error while it was used."""
        first = (str(error).strip() or "?").partition("\n")[0]
        self._missing = f"it failed: {type(error).__name__}: {first}"
        switches.changed()
        log.info("%s is switched off: %s", self.name, self._missing)

    def lack(self, why: str) -> None:
        """Note that torch lacks it, as an attempt to use it has shown."""
        self._missing = why
        switches.changed()

    def probe_again(self) -> str:
        """Forget what use has shown; returns why it is not there, "" if it is."""
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
        except Exception as error:  # whatever a torch of tomorrow does
            return f"its probe failed: {type(error).__name__}: {error}"
        return ""


class Switches:
    """Which capabilities are switched off, by the environment and by tests.

    `table`: all capabilities, by name. `epoch` counts the changes, so that what was
    decided from them is decided again.
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
        """From now on each capability looks again whether it is there."""
        self.epoch += 1
        for capability in self.table.values():
            capability.there = False
        for clear in self.caches:
            clear()

    def asked(self) -> frozenset[str]:
        """The names that somebody switched off, known or not."""
        self.off("")
        return frozenset().union(self._off or (), *self._without)

    @contextlib.contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """Switch some off within this context."""
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
    """`functools.cache`, emptied whenever a capability is switched off or on."""
    remembering: Any = functools.cache(function)
    switches.caches.append(remembering.cache_clear)
    return remembering  # type: ignore[no-any-return]


def lacking() -> list[Capability]:
    """The capabilities that are not there, the switched off ones too; of those that
    nobody has asked for yet nothing is known.
    """
    return [
        x for x in switches.table.values() if x.off or (x.known() and not x.expected)
    ]


def unchecked() -> str:
    """What to say of a torch of another version than those that were checked, or ""."""
    version = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    first, end = CHECKED
    if first <= version < end:
        return ""
    checked = f"{first[0]}.{first[1]} to {end[0]}.{end[1] - 1}"
    age = "older" if version < first else "newer"
    return f"torch {torch.__version__} is {age} than what was checked ({checked})"


def lacks() -> list[str]:
    """What fuseopt does without here, one line for each thing; [] if nothing."""
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
