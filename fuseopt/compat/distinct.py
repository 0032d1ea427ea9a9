"""Guard that objects which a step changes stay distinct from the others it reads.

Dynamo makes two variables of two objects, and writes to one change no other. It guards
that one object in two places stays one, and not that two objects stay two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .guards import guard
from .hooks import add_lambda, found_at, install, is_ours, name_of
from .names import find
from .patches import Hook, Patcher


@guard("guard-distinct", "a guard that objects which a step changes stay distinct")
def DISTINCT(patcher: Patcher) -> None:
    """Guard that no two of the objects that a step reads become one.

    Omitted for objects of a class of which the step changes none.
    """
    output = find("torch._dynamo.output_graph:OutputGraph")
    tensor = find("torch._dynamo.variables.tensor:TensorVariable")
    GlobalStateSource = find("torch._dynamo.source:GlobalStateSource")
    find("torch._dynamo.side_effects:SideEffects.is_modified")

    def compile(original: Hook, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(tx):
            # two objects that are one have one class
            changed: set[type] = set()
            held: list[tuple[type, Any]] = []
            for key, x in self.side_effects.id_to_variable.items():
                value = None if isinstance(x, tensor) else _object_of(tx, x)
                if value is not None and id(value) == key:
                    held.append((type(value), x.source))
                    if self.side_effects.is_modified(x):
                        changed.add(type(value))
            for kind in changed:
                sources = [source for k, source in held if k is kind]
                if len(sources) > 1:
                    install(GlobalStateSource(), _are_distinct(tx, sources))
        return original(self, tx, *args, **kwargs)

    patcher.around(output, "compile_subgraph", compile, "self", "tx")


def _object_of(tx: Any, variable: Any) -> Any:
    """Return the object of a variable; None if no expression gives it."""
    source = variable.source
    return found_at(tx, source) if source is not None and _has_name(source) else None


def _has_name(source: Any) -> bool:
    """Is there an expression for the object at a source? A cell has none."""
    try:
        return bool(name_of(source))
    except NotImplementedError:
        return False


def _are_distinct(tx: Any, sources: Sequence[Any]) -> Callable[[Any, Any], None]:
    """Return a function that adds the guard: the objects at sources are distinct."""
    tables, alone = _in_tables(tx, sources)
    text = _function(tables, alone)
    names = ", ".join(map(name_of, sources))

    def create(builder: Any, guard: Any) -> None:
        scope = {"G": builder.scope["G"]}
        exec(text, scope)
        root, parts = builder.guard_manager.root, [f"distinct objects: {names}"]
        add_lambda(root, scope["distinct"], parts, guard.user_stack)

    return create


def _in_tables(tx: Any, sources: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the dicts all of whose values are to be distinct, and the other sources.

    A lookup of a state by its parameter calls Python for the hash of a tensor.
    """
    of: dict[str, list[Any]] = {}
    bases = {}
    for source in sources:
        base, index = _name(source, "base"), _name(source, "index")
        if base and name_of(source) == f"{base}[{index}]":
            of.setdefault(base, []).append(source)
            bases[base] = source.base
    tables = []
    for base, inside in of.items():
        table = found_at(tx, bases[base])
        if len(inside) > 2 and isinstance(table, dict):
            others = [x for x in sources if x not in inside]
            values = {*map(id, dict.values(table))}
            apart = values.isdisjoint(id(found_at(tx, x)) for x in others)
            if apart and len(values) == len(table):
                tables.append(bases[base])
    covered = {name_of(x) for base in map(name_of, tables) for x in of[base]}
    return tables, [x for x in sources if name_of(x) not in covered]


def _function(tables: Sequence[Any], alone: Sequence[Any]) -> str:
    """Return the code of the guard, which evaluates each part of a source once."""
    variables: dict[str, str] = {}
    parts = []
    for source in _parts([*tables, *alone]):
        name = name_of(source)
        if name in variables:
            continue
        base, index = _name(source, "base"), _name(source, "index")
        text = name
        if base in variables and name == f"{base}[{index}]" and index in variables:
            text = f"{variables[base]}[{variables[index]}]"
        elif base in variables and name.startswith(base):
            text = variables[base] + name[len(base) :]
        variables[name] = f"x{len(variables)}"
        parts.append(f"{variables[name]} := {text}")
    within = [variables[name_of(x)] for x in tables]
    every = [f"id({variables[name_of(x)]})" for x in alone]
    every += [f"*map(id, dict.values({x}))" for x in within]
    count = " + ".join([str(len(alone)), *(f"len({x})" for x in within)])
    test = f"len({{{', '.join(every)}}}) == {count}"
    # few lines, each of which costs a call
    return "\n".join(
        [
            "def distinct(L):",
            f"    try: return (({'), ('.join(parts)}), {test})[-1]",
            "    except Exception: return False  # one of them is no longer there",
        ]
    )


def _parts(sources: Sequence[Any]) -> Iterator[Any]:
    """Yield sources with all that they are reached by, which come first."""
    for source in sources:
        inner = [getattr(source, x, None) for x in ("base", "index")]
        yield from _parts([x for x in inner if _is_named(x)])
        yield source


def _name(source: Any, part: str) -> str:
    inner = getattr(source, part, None)
    return name_of(inner) if _is_named(inner) else ""


def _is_named(x: Any) -> bool:
    return hasattr(x, "make_guard") and _has_name(x)
