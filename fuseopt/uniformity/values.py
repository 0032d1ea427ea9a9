"""Abstract values: facts about a value, and whether lanes differ in it.

Two runs are compared throughout: the step of all lanes and that of the leading ones.
Plain data has one of three levels. *Uniform* data is the same in both runs, for any
number and order of lanes. Data of a *kind* belongs to a lane, and follows from the
properties that alike lanes share. A *number* was read from the contents of a lane's
tensors.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

NONE = type(None)
#: Types whose values are data: equal values behave alike, of any origin.
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    NONE,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    type(torch.finfo(torch.float32)),
    type(torch.iinfo(torch.int32)),
    type(Ellipsis),
    slice,
    range,
)
#: Types whose constants have exact values; numbers of an optimizer do not, since they
#: change.
EXACT = (bool, str, bytes, NONE, torch.dtype, torch.device, torch.layout)


class Level(enum.IntEnum):
    """Dependence of plain data on lanes. See the module."""

    UNIFORM = 0
    KIND = 1
    NUMBER = 2


class Value:
    """Facts about a value. Instances do not change."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Known(Value):
    """Exactly this object: a constant, a function, a class or a module."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Known):
            return NotImplemented
        a, b = self.value, other.value
        if a is b:
            return True
        return type(a) is type(b) and isinstance(a, PLAIN) and repr(a) == repr(b)

    def __hash__(self) -> int:
        return hash(type(self.value))


@dataclass(frozen=True, slots=True)
class Data(Value):
    """Plain data. `types`: the classes it may be an instance of; None for any."""

    level: Level
    types: frozenset[type] | None = None


@dataclass(frozen=True, slots=True)
class Tensor(Value):
    """A tensor of the current lane, or computed from its tensors.

    `shared`: it belongs to no lane, made of uniform values. `none`, `number`: it may
    also be None, or a number read from contents; `plain`: or plain data of a lane's
    kind. `foreign`: it may belong to another lane, if lists are not aligned. The dry
    run shows this where it meets a tensor of this lane, so no other use is allowed.
    `role`: "param" or "grad" if it is the lane's own.
    """

    shared: bool = False
    none: bool = False
    number: bool = False
    role: str = ""
    plain: bool = False
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class First(Value):
    """A tensor of the first, leading lane of a sequence: only its metadata is used."""


@dataclass(frozen=True, slots=True)
class Items(Value):
    """A tuple."""

    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Ref(Value):
    """A list or a dict that the step has created, by its number in the heap."""

    number: int


@dataclass(frozen=True, slots=True)
class Index(Value):
    """The position of the current lane in a sequence of lanes."""

    lanes: Any


@dataclass(frozen=True, slots=True)
class Count(Value):
    """The number of lanes of a sequence, which may only be compared with zero."""

    lanes: Any


@dataclass(frozen=True, slots=True)
class Sequence(Value):
    """One item for each lane of a sequence of lanes, such as `zip` returns."""

    lanes: Any
    item: Value


@dataclass(frozen=True, slots=True)
class Many(Value):
    """Items with one common value; data of `level` decides their number."""

    item: Value
    level: Level = Level.UNIFORM


@dataclass(frozen=True, slots=True)
class Optimizer(Value):
    """The optimizer itself, or `super()` of it: past one of its classes."""

    past: Any = None


@dataclass(frozen=True, slots=True)
class Groups(Value):
    """`param_groups`."""


@dataclass(frozen=True, slots=True)
class Group(Value):
    """A parameter group: `where` is its number, or the site of a loop over groups."""

    where: Any


@dataclass(frozen=True, slots=True)
class States(Value):
    """`optimizer.state`."""


@dataclass(frozen=True, slots=True)
class State(Value):
    """The state of the current lane: `optimizer.state[p]`."""


@dataclass(frozen=True, slots=True)
class Held(Value):
    """A container that existed before the step, in the optimizer or a module."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class Grouped(Value):
    """Lists of lanes, sorted by device and dtype. `keys`: the parts of a key.

    `indices`: True if each group also has its lanes' former positions. `single`: there
    is one group.
    """

    lists: tuple[Value, ...]
    lanes: Any
    keys: tuple[Value, ...]
    indices: bool
    single: bool = False


@dataclass(frozen=True, slots=True)
class Method(Value):
    """An attribute that will be called: a built-in method of a value."""

    of: Value
    name: str


@dataclass(frozen=True, slots=True)
class Bound(Value):
    """A Python function with its first argument."""

    function: Value
    first: Value


@dataclass(frozen=True, slots=True)
class Closure(Value):
    """A function that the step defines: the number of its definition."""

    number: int


@dataclass(frozen=True, slots=True)
class Choice(Value):
    """One of several functions, the same for all lanes."""

    of: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Unusable(Value):
    """A value that may not be used, with the reason."""

    why: str


@dataclass(frozen=True, slots=True)
class Carried(Value):
    """A variable that another lane may have set; `before`: its value until then."""

    name: str
    before: Value | None


@dataclass(frozen=True, slots=True)
class Gathered(Value):
    """A variable that lanes combine by an operation in which their order is irrelevant.

    The loop over lanes may add to it; only the code after the loop may read it.
    """

    operation: str
    types: frozenset[type] | None


def uniform(*kinds: type) -> Data:
    """Return plain data of some types that is the same for all lanes."""
    return Data(Level.UNIFORM, frozenset(kinds) if kinds else None)


def of_kind(*kinds: type) -> Data:
    """Return plain data of some types that is the same for lanes of a kind."""
    return Data(Level.KIND, frozenset(kinds) if kinds else None)


NUMERIC = frozenset({bool, int, float, complex})
NUMBER = Data(Level.NUMBER, NUMERIC)
TRUTH = frozenset({bool})


def level_of(value: Value) -> Level | None:
    """Return the level of plain data, None for other values."""
    if isinstance(value, Data):
        return value.level
    if isinstance(value, Known):
        return Level.UNIFORM
    return None


def types_of(value: Value) -> frozenset[type] | None:
    """Return the types of plain data; None if they are uncertain."""
    if isinstance(value, Data):
        return value.types
    if isinstance(value, Known):
        return frozenset({type(value.value)})
    return None


def _types(*values: Value) -> frozenset[type] | None:
    types: frozenset[type] = frozenset()
    for value in values:
        item_types = types_of(value)
        if item_types is None:
            return None
        types |= item_types
    return types


#: Two equal values of these classes may be different objects.
ALIKE = (Data, Tensor, First, Items, Sequence, Many, Choice)


def join(a: Value, b: Value, level: Level) -> Value:
    """Return the abstract value that covers `a` and `b`; `level`: that of the choice.

    Equal values may be different objects; only if `a is b` has neither branch changed
    the value.
    """
    if a is b or (a == b and not isinstance(a, ALIKE)):
        return a
    for x in (a, b):
        if isinstance(x, Unusable):
            return x
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Gathered):
            return x if isinstance(y, Carried) else _gathered(a, b)
    for x in (a, b):
        if isinstance(x, Carried):
            return Unusable(f"{x.name} may hold a value of an earlier lane")
    level_of_a, other = level_of(a), level_of(b)
    if level_of_a is not None and other is not None:
        if not (_plain(a) and _plain(b)):
            if level == Level.UNIFORM and isinstance(a, Known) and isinstance(b, Known):
                return Choice((a, b))
            return Unusable("it may be one of several functions or classes")
        return Data(max(level_of_a, other, level), _types(a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return Tensor(
            a.shared and b.shared and level == Level.UNIFORM,
            a.none or b.none,
            a.number or b.number,
            a.role if a.role == b.role else "",
            a.plain or b.plain,
            a.foreign or b.foreign,
        )
    if isinstance(a, First) and isinstance(b, First) and level == Level.UNIFORM:
        return a
    if isinstance(b, Tensor):
        a, b = b, a
        level_of_a = other = level_of(b)
    if isinstance(a, Tensor) and other is not None:
        return _or_data(a, b, level)
    if isinstance(a, Items) and isinstance(b, Items) and len(a.items) == len(b.items):
        return Items(
            tuple(join(x, y, level) for x, y in zip(a.items, b.items, strict=True))
        )
    if isinstance(a, Sequence) and isinstance(b, Sequence) and a.lanes == b.lanes:
        return Sequence(a.lanes, join(a.item, b.item, level))
    if level == Level.UNIFORM and (isinstance(a, Choice) or isinstance(b, Choice)):
        options = [x.of if isinstance(x, Choice) else (x,) for x in (a, b)]
        if all(isinstance(x, (Known, Choice)) for x in (a, b)):
            return Choice(tuple(dict.fromkeys((*options[0], *options[1]))))
    if isinstance(a, Many) and isinstance(b, Many):
        return Many(join(a.item, b.item, level), max(a.level, b.level, level))
    return Unusable("it may be one of several objects")


def _plain(x: Value) -> bool:
    return isinstance(x, Data) or (isinstance(x, Known) and isinstance(x.value, PLAIN))


def _or_data(t: Tensor, other: Value, level: Level) -> Value:
    of_other = level_of(other)
    assert of_other is not None
    if not _plain(other):
        return Unusable("it may be one of several objects")
    nothing = isinstance(other, Known) and other.value is None
    types_ = types_of(other)
    return Tensor(
        t.shared and of_other == level == Level.UNIFORM,
        t.none or types_ is None or NONE in types_,
        t.number or of_other == Level.NUMBER,
        t.role,
        t.plain or not nothing,
        t.foreign,
    )


def _gathered(a: Value, b: Value) -> Value:
    """Return the join of a gathered variable before and after an addition."""
    if isinstance(a, Gathered) and isinstance(b, Gathered):
        if a.operation == b.operation:
            types_ = a.types | b.types if a.types and b.types else None
            return Gathered(a.operation, types_)
    return Unusable("it may be one of several objects")
