"""What users hang on an optimizer while they train with it: values and places."""

from __future__ import annotations

import collections
import enum
import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

Undo = Callable[[], object]


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Plain:
    """An object of which nothing is known."""


class Slotted:
    __slots__ = ("x",)


class OwnDict(dict[Any, Any]):
    """A dict of the user's own kind."""


class OwnList(list[Any]):
    """A list of the user's own kind."""


class Pairs(collections.namedtuple("Pairs", "a b")):
    """A tuple of the user's own kind."""


def _holds_itself() -> Any:
    x: list[Any] = []
    x.append(x)
    return x


def _nested(x: Any, depth: int = 6) -> Any:
    for _ in range(depth):
        x = {"a": [x, (1, {"b": None})]}
    return x


class Reading:
    """An object with a property."""

    @property
    def value(self) -> int:
        return 3


#: What is hung: each takes the optimizer.
VALUES: dict[str, Callable[[Optimizer], Any]] = {
    "scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 100),
    "module": lambda o: torch.nn.Identity(),
    "optimizer": lambda o: o,
    "step": lambda o: o.zero_grad,
    "object": lambda o: Plain(),
    "property": lambda o: Reading(),
    "slots": lambda o: Slotted(),
    "enum": lambda o: Color.RED,
    "int-enum": lambda o: Level.LOW,
    "generator": lambda o: torch.Generator(),
    "ndarray": lambda o: np.arange(3.0),
    "numpy-number": lambda o: np.float64(2.0),
    "set": lambda o: {1, 2},
    "frozenset": lambda o: frozenset({1}),
    "deque": lambda o: collections.deque([1.0]),
    "ordered": lambda o: collections.OrderedDict(a=1),
    "default": lambda o: collections.defaultdict(list, a=[1]),
    "dict": lambda o: OwnDict(a=1),
    "list": lambda o: OwnList([1]),
    "namedtuple": lambda o: Pairs(1, 2.0),
    "tuple": lambda o: (1, 2.0, "x"),
    "proxy": lambda o: types.MappingProxyType({"a": 1}),
    "parameters": lambda o: torch.nn.ParameterList([torch.ones(2)]),
    "values": lambda o: {"a": 1}.values(),
    "iterator": lambda o: iter([1, 2]),
    "function": lambda o: _nested,
    "lambda": lambda o: lambda x: x,
    "partial": lambda o: functools.partial(int, "7"),
    "reference": lambda o: weakref.ref(o),
    "lock": lambda o: threading.Lock(),
    "tensor": lambda o: torch.ones(3),
    "number": lambda o: torch.tensor(2.0),
    "range": lambda o: range(3),
    "dtype": lambda o: torch.float16,
    "device": lambda o: torch.device("cpu"),
    "none": lambda o: None,
    "text": lambda o: "note",
    "bytes": lambda o: bytearray(b"note"),
    "complex": lambda o: 1j,
    "class": lambda o: Plain,
    "module of Python": lambda o: torch,
    "nested": lambda o: _nested(1.0),
    "nested object": lambda o: _nested(Plain()),
    "itself": lambda o: _holds_itself(),
    "its group": lambda o: o.param_groups[0],
    "its state": lambda o: o.state,
}


def _attribute(o: Any, x: Any) -> Undo:
    o.hung = x
    return lambda: delattr(o, "hung")


def _item(holder: Any, key: Any, x: Any) -> Undo:
    missing = object()
    before = holder.get(key, missing)
    holder[key] = x

    def undo() -> None:
        if before is missing:
            del holder[key]
        else:
            holder[key] = before

    return undo


def _state(o: Any, x: Any) -> Undo:
    return _item(o.state[o.param_groups[0]["params"][1]], "hung", x)


#: Where it is hung: (optimizer, value) -> how to remove it.
PLACES: dict[str, Callable[[Any, Any], Undo]] = {
    "attribute": _attribute,
    "group": lambda o, x: _item(o.param_groups[0], "hung", x),
    "state": _state,
    "beside state": lambda o, x: _item(o.state, "hung", x),
    "defaults": lambda o, x: _item(o.defaults, "hung", x),
    "list": lambda o, x: _attribute(o, [x]),
    "dict": lambda o, x: _item(o.param_groups[0], "hung", {"a": {"b": x}}),
}

#: What becomes of a group's list of parameters.
LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "deque": collections.deque,
    "list": OwnList,
    "parameters": torch.nn.ParameterList,
    "values": lambda ps: dict(enumerate(ps)).values(),
    "keys": lambda ps: dict.fromkeys(ps).keys(),
    "dict": lambda ps: dict.fromkeys(ps),
    "ordered": lambda ps: collections.OrderedDict.fromkeys(ps),
    "iterator": iter,
    "generator": lambda ps: (p for p in ps),
    "filter": lambda ps: filter(torch.is_tensor, ps),
    "none": lambda ps: None,
    "object": lambda ps: Plain(),
    "number": lambda ps: 3,
    "text": lambda ps: "text",
    "function": lambda ps: len,
    "tensor": lambda ps: ps[0],
    "names": lambda ps: [("a", p) for p in ps],
    "empty": lambda ps: [],
    "shared": lambda ps: [*ps, ps[0]],
    "none within": lambda ps: [None, *ps],
    "object within": lambda ps: [Plain(), *ps],
    "nested": lambda ps: [ps],
}
#: What becomes of the dicts and lists that torch itself makes.
FORMS: dict[str, Callable[[Any], Undo]] = {}


def _form(name: str) -> Callable[[Callable[[Any], Undo]], Callable[[Any], Undo]]:
    def register(f: Callable[[Any], Undo]) -> Callable[[Any], Undo]:
        FORMS[name] = f
        return f

    return register


@_form("group: ordered")
def _(o: Any) -> Undo:
    group = o.param_groups[0]
    o.param_groups[0] = collections.OrderedDict(group)
    return lambda: o.param_groups.__setitem__(0, group)


@_form("group: dict")
def _(o: Any) -> Undo:
    group = o.param_groups[0]
    o.param_groups[0] = OwnDict(group)
    return lambda: o.param_groups.__setitem__(0, group)


@_form("group: a second key")
def _(o: Any) -> Undo:
    group = o.param_groups[0]
    group[3] = Plain()
    return lambda: group.__delitem__(3)


@_form("group: without params")
def _(o: Any) -> Undo:
    group = o.param_groups[0]
    params = group.pop("params")
    return lambda: group.update(params=params)


def _whole(kind: Callable[[Any], Any], name: str) -> Callable[[Any], Undo]:
    def put(o: Any) -> Undo:
        before = getattr(o, name)
        setattr(o, name, kind(before))
        return lambda: setattr(o, name, before)

    return put


FORMS["groups: tuple"] = _whole(tuple, "param_groups")
FORMS["groups: list"] = _whole(OwnList, "param_groups")
FORMS["groups: deque"] = _whole(collections.deque, "param_groups")
FORMS["state: dict"] = _whole(dict, "state")
FORMS["state: own dict"] = _whole(OwnDict, "state")
FORMS["state: ordered"] = _whole(collections.OrderedDict, "state")
FORMS["defaults: own dict"] = _whole(OwnDict, "defaults")
FORMS["defaults: ordered"] = _whole(collections.OrderedDict, "defaults")


def _state_of_one(kind: Callable[[Any], Any]) -> Callable[[Any], Undo]:
    def put(o: Any) -> Undo:
        p = o.param_groups[0]["params"][1]
        return _item(o.state, p, kind(o.state[p]))

    return put


FORMS["state of one: own dict"] = _state_of_one(OwnDict)
FORMS["state of one: ordered"] = _state_of_one(collections.OrderedDict)
FORMS["state of one: default"] = _state_of_one(
    lambda s: collections.defaultdict(Plain, s)
)
FORMS["state of one: object"] = _state_of_one(lambda s: Plain())
FORMS["state of one: none"] = _state_of_one(lambda s: None)


def _option(key: str, value: Callable[[Any], Any]) -> Callable[[Any], Undo]:
    return lambda o: _item(o.param_groups[0], key, value(o.param_groups[0][key]))


FORMS["betas: list"] = _option("betas", list)
FORMS["betas: ndarray"] = _option("betas", np.array)
FORMS["betas: own list"] = _option("betas", OwnList)
FORMS["betas: deque"] = _option("betas", collections.deque)
FORMS["betas: namedtuple"] = _option("betas", lambda b: Pairs(*b))
FORMS["betas: iterator"] = _option("betas", iter)
FORMS["betas: none"] = _option("betas", lambda _: None)
FORMS["lr: numpy"] = _option("lr", np.float64)
FORMS["lr: array"] = _option("lr", np.array)
FORMS["lr: text"] = _option("lr", str)
FORMS["lr: object"] = _option("lr", lambda _: Plain())


def cases() -> dict[str, Callable[[Any], Undo]]:
    """All of them, by name: each takes the optimizer, and returns how to undo it."""

    def hangs(place: str, value: str) -> Callable[[Any], Undo]:
        return lambda o: PLACES[place](o, VALUES[value](o))

    def lists(name: str) -> Callable[[Any], Undo]:
        return lambda o: _item(
            o.param_groups[0], "params", LISTS[name](o.param_groups[0]["params"])
        )

    return {
        **{f"{p}: {v}": hangs(p, v) for p in PLACES for v in VALUES},
        **{f"params: {name}": lists(name) for name in LISTS},
        **FORMS,
    }
