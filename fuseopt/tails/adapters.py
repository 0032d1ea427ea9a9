"""Averages that other packages keep: what they hold, and the update that they write.

Nothing here knows a formula. Dynamo is given a stand-in that holds what the object
holds and has the methods of its class, and traces the object's own update. Whatever a
stand-in does not know ends that trace, and the update is called as it is.

What the host has a part in is known by name: the decay, for which the object itself is
asked before, and the number of updates, of which a stand-in knows but what follows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch

from ..shadow.whole import NotTraced

Tensors = list[torch.Tensor]
#: What an object keeps its averages in, by which it is known, and the method that is
#: its update. That of a "module" is given a module, that of a list is given a list.
KINDS = (("module", "update"), ("shadow_params", "step"))
#: How many updates there were, and what the last one was given for a decay.
COUNTER, DECIDED = "optimization_step", "cur_decay_value"
#: What an object may hold besides, which a stand-in holds as it is.
_PLAIN = (bool, int, float, str, type(None), torch.device, torch.dtype)


def kind_of(x: Any) -> tuple[str, str] | None:
    """What an object keeps its averages in, and its update; None of what has none."""
    for held, method in KINDS:
        function = getattr(type(x), method, None)
        if hasattr(x, held) and isinstance(function, FunctionType):
            return held, method
    return None


class Count:
    """A number of which nothing is known but what follows it."""

    def __init__(self, following: Count | None = None) -> None:
        self.following = following

    def __add__(self, n: int) -> Count:
        if n != 1 or self.following is None:
            raise NotTraced
        return self.following

    def __bool__(self) -> bool:
        raise NotTraced

    def __eq__(self, other: object) -> bool:
        raise NotTraced

    __hash__ = None  # type: ignore[assignment]


class Held:
    """What a module holds, for those who only ask for its tensors."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.params: Tensors = list(module.parameters())
        self.others: Tensors = list(module.buffers())
        self.state: dict[str, torch.Tensor] = dict(module.state_dict(keep_vars=True))
        own = {*map(id, (*self.params, *self.others))}
        if not all(id(t) in own for t in self.state.values()):
            raise NotTraced("a module has a state besides its tensors")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Detached, as a module's."""
        return {key: t.detach() for key, t in self.state.items()}

    def parameters(self) -> Tensors:
        """A list, where a module has a generator."""
        return self.params

    def buffers(self) -> Tensors:
        """The same."""
        return self.others

    def __getattr__(self, name: str) -> Any:
        raise NotTraced(f"it asks a module for {name}")


class Standing:
    """What stands for an object while its update is traced. It holds what the object
    does, as far as it is known; `_fuseopt_done` is what the host is to do.
    """

    _fuseopt_decay: Any
    _fuseopt_step: Any
    _fuseopt_done: dict[str, bool]

    def get_decay(self, step: Any = None) -> float:
        """What the object itself said, which was asked for this very step."""
        if step is not self._fuseopt_step:
            raise NotTraced("it asks for the decay of another step")
        decay: float = self._fuseopt_decay
        return decay

    def __getattr__(self, name: str) -> Any:
        raise NotTraced(f"it reads {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == COUNTER:
            known = value is self._fuseopt_step
        else:
            known = name == DECIDED and value == self._fuseopt_decay
        if not known:
            raise NotTraced(f"it writes {name}")
        self._fuseopt_done[name] = True
        if name == COUNTER:
            object.__setattr__(self, name, value)


def functions_of(kind: type) -> dict[str, Any]:
    """What a class holds, but for what all modules and all objects do. Raises NotTraced
    for a class with attributes of its own kind.
    """
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base not in (object, torch.nn.Module):
            if not {"__setattr__", "__getattribute__"}.isdisjoint(vars(base)):
                raise NotTraced("its class says what attributes are")
            for name, value in vars(base).items():
                if not (name.startswith("__") and name.endswith("__")):
                    found[name] = value
    return found


class Update:
    """One update of an average, as Dynamo is given it."""

    def __init__(self, standing: Any, given: Any, method: str, step: Any) -> None:
        self.standing = standing
        self.given = given
        self.method = method
        self.step = step

    def apply(self) -> None:
        """Do it; traced."""
        update = getattr(self.standing, self.method)
        if self.step is None:
            update(self.given)
        else:
            update(self.given, step=self.step)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it may write."""
        for value in vars(self.standing).values():
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, Held):
                yield from (*value.params, *value.others, *value.state.values())
            elif isinstance(value, list):
                yield from value


class Average:
    """An average of another package's, and what it is of: a module, or parameters."""

    def __init__(self, average: Any, source: Any) -> None:
        kind = kind_of(average)
        assert kind is not None
        self.average = average
        self.held, self.method = kind
        self.source = source
        takes = inspect.signature(getattr(type(average), self.method)).parameters
        self._takes_step = "step" in takes
        self._functions: dict[str, Any] = {}
        self._seen: list[int] = []
        self._holds: dict[str, Any] = {}
        self._given: Any = None
        self._standing: Any = None
        # Dynamo guards which these are
        self._next = Count()
        self._now = Count(self._next)
        self._done: dict[str, bool] = {}

    def call(self, step: int | None) -> None:
        """Its update, as users call it."""
        more = {} if step is None or not self._takes_step else {"step": step}
        getattr(self.average, self.method)(self._argument(), **more)

    def update(self, step: int | None) -> Update:
        """One update, as Dynamo is given it. Raises NotTraced where it cannot be."""
        average, own = self.average, vars(self.average)
        if self.method in own or "get_decay" in own:
            raise NotTraced("its own methods were replaced")
        self._look()
        holds = dict(self._holds)
        holds.update((k, v) for k, v in own.items() if isinstance(v, _PLAIN))
        asked = own[COUNTER] + 1 if COUNTER in own else None
        if self._takes_step:
            asked = step
        token = None if asked is None else self._next
        if COUNTER in own:
            holds[COUNTER] = self._now
        if hasattr(average, "get_decay"):
            holds["_fuseopt_decay"] = decay = average.get_decay(asked)
            if type(decay) is not float:
                raise NotTraced("its decay is no float")
        holds["_fuseopt_step"] = token
        holds["_fuseopt_done"] = self._done
        self._done.clear()
        held = vars(self._standing)
        held.clear()
        held.update(holds)
        step_given = token if self._takes_step else None
        return Update(self._standing, self._given, self.method, step_given)

    def updated(self) -> None:
        """It was done: count it, as the object does."""
        standing, own = vars(self._standing), vars(self.average)
        if COUNTER in self._done:
            own[COUNTER] += 1
        if DECIDED in self._done:
            own[DECIDED] = standing["_fuseopt_decay"]

    def _argument(self) -> Any:
        """What the update is given."""
        if self.held == "module" or isinstance(self.source, list):
            return self.source
        return list(self.source.parameters())

    def _look(self) -> None:
        """Make the stand-in anew where the object holds other things."""
        functions = functions_of(type(self.average))
        argument = self._argument()
        holds: list[tuple[str, Any]] = [*vars(self.average).items()]
        holds += vars(self.average).get("_modules", {}).items()
        seen = [id(x) for pair in holds for x in _tensors(pair[1])]
        seen += [id(x) for x in _tensors(argument)]
        if self._standing is not None and functions == self._functions:
            if seen == self._seen:
                return
        every = (argument, *dict(holds).values())
        if len({x.device for y in every for x in _tensors(y)}) > 1:
            raise NotTraced("it lies on another device")
        kind = type(self.average)
        known = {k: v for k, v in functions.items() if k not in vars(Standing)}
        self._standing = object.__new__(type(kind.__name__, (Standing,), known))
        self._holds = {}
        for name, value in holds:
            if isinstance(value, torch.nn.Module):
                self._holds[name] = Held(value)
            elif isinstance(value, torch.Tensor) or _is_list(value):
                self._holds[name] = value
        module = isinstance(argument, torch.nn.Module)
        self._given = Held(argument) if module else argument
        self._seen, self._functions = seen, functions


def _is_list(value: Any) -> bool:
    """Is it a list of tensors?"""
    return isinstance(value, list) and all(isinstance(x, torch.Tensor) for x in value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module, or a list."""
    if isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.Tensor):
        yield value
    elif _is_list(value):
        yield from value
