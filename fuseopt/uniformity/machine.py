"""The abstract machine of one analysis: memory, frames, loops and current level."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..compiler.code_paths import is_known
from .memory import Dict, List, Memory, meet, merge
from .sequences import Branch
from .source import Source, Sources
from .values import Carried, Gathered, Level, Ref, Unusable, Value
from .world import World

#: The largest number of expressions and statements that an analysis walks.
BUDGET = 400_000
DEPTH = 30


class Refusal(Exception):
    """Lanes of a step may not be led: the reason, the expression, and its place."""

    def __init__(self, why: str, filename: str, line: int, text: str) -> None:
        self.why, self.filename, self.line, self.text = why, filename, line, text
        where = f" ({filename}:{line})" if filename else ""
        super().__init__(f"{why}: {text}{where}" if text else f"{why}{where}")


class Raises(Exception):
    """An expression has no value: a function that it calls always raises."""


@dataclass
class Frame:
    """A call that is being walked: its scope, and its returns so far."""

    source: Source
    scope: int
    names: frozenset[str]  # its local variables
    globals: dict[str, Any]
    cells: dict[str, Any]  # contents of the closure of a function that exists
    outer: tuple[Frame, ...] = ()  # enclosing frames of a function the step defines
    owner: Any = None  # the class whose method it is, for super()
    first: Value | None = None
    returns: list[tuple[Value, Memory | None, Level]] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)


@dataclass
class Loop:
    """A loop that is being walked; `lanes`: the sequence, if it is over lanes."""

    site: Any
    frame: Frame
    lanes: Any = None
    level: Level = Level.UNIFORM
    continues: list[tuple[Memory | None, Level, Any]] = field(default_factory=list)
    breaks: list[Memory] = field(default_factory=list)
    #: returns from within a loop over lanes
    leaves: list[tuple[Value, Memory]] = field(default_factory=list)
    #: the sites and values of variables that are set in the loop
    stores: dict[tuple[int, str], list[tuple[Any, Value]]] = field(default_factory=dict)
    #: lists that lanes add to, by their numbers in the heap
    grown: set[int] = field(default_factory=set)
    #: variables that the first lane sets for all lanes: the site
    firsts: dict[tuple[int, str], Any] = field(default_factory=dict)
    scopes: int = 0  # scopes with smaller numbers existed before the loop


@dataclass(frozen=True)
class Definition:
    """A function that the step defines, or a lambda."""

    node: ast.FunctionDef | ast.Lambda
    frames: tuple[Frame, ...]
    defaults: tuple[Value, ...]
    keyword_defaults: tuple[tuple[str, Value], ...]


class Machine:
    """Abstract machine; see the module.

    `evaluate`, `call` and `execute` walk an expression, a call, and statements.
    `sizes`: True if the step reads sizes. `classes`: True if it reads the class of a
    tensor, except for a test whether it is one. `firsts`: True if it reads metadata of
    a first lane on which other lanes depend. `codes`: the code objects that it may run.
    """

    evaluate: Callable[[Machine, ast.expr], Value]
    call: Callable[..., Value]
    execute: Callable[[Machine, Sequence[ast.stmt]], None]

    def __init__(self, sources: Sources, world: World) -> None:
        self.sources = sources
        self.world = world
        self.memory: Memory | None = Memory()
        self.frames: list[Frame] = []
        self.loops: list[Loop] = []
        self.path: tuple[int, ...] = ()
        self.lane: Loop | None = None
        # the level of the conditions on the path to this point
        self.level = Level.UNIFORM
        self.definitions: list[Definition] = []
        self.codes: set[types.CodeType] = set()
        self.sizes = False
        self.classes = False
        self.firsts = False
        self.effects = 0  # the number of writes to lanes so far
        self._numbers = 0
        self._budget = BUDGET
        self._at: list[tuple[ast.AST, str]] = []

    # ---------------------------------------------------------------- refusals

    def refusal(self, why: str, node: ast.AST | None = None) -> Refusal:
        """Return the exception to raise: the reason, and the expression."""
        filename = self.frames[-1].source.filename if self.frames else ""
        line = getattr(node, "lineno", 0)
        text = "" if node is None or not line else " ".join(ast.unparse(node).split())
        if len(text) > 80:
            text = text[:77] + "..."
        return Refusal(why, filename, line, text)

    def spend(self, node: ast.AST) -> None:
        self._budget -= 1
        if self._budget < 0:
            raise self.refusal("the code exceeds the budget of the analysis", node)

    # ---------------------------------------------------------------- places

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    def site(self, node: ast.AST) -> tuple[Any, ...]:
        """Return a place in the code, with the calls that lead there."""
        return (*self.path, id(node))

    def in_torch(self) -> bool:
        """Is the code that is being walked part of torch?"""
        return is_known(self.frames[-1].source.code)

    def branch(self, node: ast.AST) -> Branch:
        """Return the place of a branch, with the loops around it."""
        return Branch(self.site(node), self.turns())

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    @property
    def now(self) -> Memory:
        """Memory at this point, which the code must be able to reach."""
        assert self.memory is not None
        return self.memory

    def turns(self) -> tuple[Any, ...]:
        """Return the sites of the loops around this point, without those over lanes."""
        return tuple(x.site for x in self.loops if x.lanes is None)

    # ---------------------------------------------------------------- variables

    def place(self, name: str) -> int | None:
        """Return the number of the scope that has a variable of the step, or None."""
        frame = self.frame
        for x in (frame, *reversed(frame.outer)):
            if name in x.names:
                return x.scope
        return None

    def scope(self) -> int:
        """Return the number of a new scope without variables."""
        number = self.number()
        self.now.scopes[number] = {}
        return number

    def store(self, scope: int, name: str, value: Value, node: ast.AST) -> None:
        """Set a variable."""
        self.now.scopes[scope][name] = value
        for loop in self.loops:
            if scope <= loop.scopes:
                stored = loop.stores.setdefault((scope, name), [])
                stored.append((self.site(node), value))

    # ---------------------------------------------------------------- the heap

    def new(self, container: List | Dict) -> Ref:
        """Put a list or a dict that the step creates into the heap."""
        number = self.number()
        lane = None if self.lane is None else self.lane.site
        container = type(container)(
            **{**vars(container), "created_in": self.turns(), "lane": lane}
        )
        self.now.heap[number] = container
        return Ref(number)

    def list_of(self, *items: Value) -> Ref:
        return self.new(List(items))

    def container(self, ref: Ref, node: ast.AST) -> List | Dict:
        """Return the list or dict of a reference. Refuses unreadable ones."""
        container = self.now.heap[ref.number]
        if container.broken:
            raise self.refusal(container.broken, node)
        if isinstance(container, List) and (
            container.growing or container.added is not None
        ):
            raise self.refusal("it reads a list inside the loop that fills it", node)
        return container

    def is_local(self, container: List | Dict) -> bool:
        """Was the container created in the current iteration over lanes?

        Outside of loops over lanes: was it created outside of them?
        """
        return bool(container.lane == (None if self.lane is None else self.lane.site))

    # ---------------------------------------------------------------- ways

    @contextmanager
    def under(self, level: Level) -> Iterator[None]:
        """Walk a branch that a condition of this level has chosen."""
        before = self.level
        self.level = max(before, level)
        try:
            yield
        finally:
            self.level = before

    def either(
        self,
        level: Level,
        node: ast.AST,
        then: Callable[[], Value],
        otherwise: Callable[[], Value],
    ) -> Value:
        """Return the joined value of two branches, of which one is taken."""
        before = self.now.copy()
        with self.under(level):
            a = self._way(then)
            first = self.memory
            self.memory = before
            b = self._way(otherwise)
        second = self.memory
        if a is not None and b is not None and first and second:
            a = b = meet(a, b, level, (first, second))
        self.memory = merge(first, second, level, self.branch(node))
        if a is None or b is None:
            if a is b:
                raise Raises
            return b if a is None else a  # type: ignore[return-value]
        return a

    def _way(self, way: Callable[[], Value]) -> Value | None:
        try:
            return way()
        except Raises:
            self.memory = None
            return None

    def attempt(self, way: Callable[[], None]) -> None:
        """Walk a path; afterwards `memory` is None if it always raises."""
        try:
            way()
        except Raises:
            self.memory = None


def usable(machine: Machine, value: Value, node: ast.AST) -> Value:
    """Return the value itself. Refuses one that may not be used."""
    if isinstance(value, Unusable):
        raise machine.refusal(value.why, node)
    if isinstance(value, Carried):
        raise machine.refusal(f"{value.name} may hold a value of an earlier lane", node)
    if isinstance(value, Gathered):
        raise machine.refusal("it reads a count inside the loop that counts", node)
    return value
