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
        effects, found = self.side_effects, []
        if is_ours(tx):
            found = [(k, x) for k, x in effects.id_to_variable.items() if _is_held(x)]
        if any(effects.is_modified(x) for _, x in found):
            # two objects that are one have one class
            changed: set[type] = set()
            held: dict[type, list[Any]] = {}
            for key, x in found:
                value = found_at(tx, x.source)
                if id(value) == key:
                    held.setdefault(type(value), []).append(x.source)
                    if effects.is_modified(x):
                        changed.add(type(value))
            for kind in changed:
                if len(held[kind]) > 1:
                    install(GlobalStateSource(), _are_distinct(tx, held[kind]))
        return original(self, tx, *args, **kwargs)

    def _is_held(x: Any) -> bool:
        return not isinstance(x, tensor) and _is_named(x.source)

    patcher.around(output, "compile_subgraph", compile, "self", "tx")


def _has_name(source: Any) -> bool:
    """Is there an expression for the object at a source? A cell has none."""
    try:
        return bool(name_of(source))
    except NotImplementedError:
        return False


def _are_distinct(tx: Any, sources: Sequence[Any]) -> Callable[[Any, Any], None]:
    """Return a function that adds the guard: the objects at sources are distinct."""
    text = _function(*_in_tables(tx, sources))
    if not _made(text, tx.output.global_scope)(tx.output.local_scope):
        text = _function([], sources)  # a dict holds one value twice
    names = ", ".join(map(name_of, sources))

    def create(builder: Any, guard: Any) -> None:
        holds = _made(text, builder.scope["G"])
        root, parts = builder.guard_manager.root, [f"distinct objects: {names}"]
        add_lambda(root, holds, parts, guard.user_stack)

    return create


def _made(text: str, global_scope: Any) -> Callable[[Any], bool]:
    scope: dict[str, Any] = {"G": global_scope}
    exec(text, scope)
    distinct: Callable[[Any], bool] = scope["distinct"]
    return distinct


def _in_tables(tx: Any, sources: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the dicts that hold three or more of the objects, and the other sources.

    A lookup of a state by its parameter calls Python for the hash of a tensor.
    """
    of: dict[str, list[Any]] = {}
    for source in sources:
        base, index = _name(source, "base"), _name(source, "index")
        in_base = bool(base) and name_of(source) == f"{base}[{index}]"
        of.setdefault(base if in_base else "", []).append(source)
    tables, alone = [], of.pop("", [])
    for inside in of.values():
        base = inside[0].base
        if len(inside) > 2 and isinstance(found_at(tx, base), dict):
            tables.append(base)
        else:
            alone += inside
    return tables, alone


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
