"""Guard that objects which a step changes stay distinct from the others it reads.

Dynamo makes two variables of two objects, and writes to one change no other. It guards
that one object in two places stays one, and not that two objects stay two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .guards import guard
from .hooks import add_lambda, install, is_ours, name_of
from .names import find
from .patches import Hook, Patcher


@guard("guard-distinct", "a guard that objects which a step changes stay distinct")
def DISTINCT(patcher: Patcher) -> None:
    """Guard that no two of the objects that a step reads become one.

    Omitted where the step changes none of them.
    """
    output = find("torch._dynamo.output_graph:OutputGraph")
    tensor = find("torch._dynamo.variables.tensor:TensorVariable")
    GlobalStateSource = find("torch._dynamo.source:GlobalStateSource")
    find("torch._dynamo.side_effects:SideEffects.is_modified")

    def compile(original: Hook, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(tx):
            held = [
                x
                for x in self.side_effects.id_to_variable.values()
                if x.source is not None and not isinstance(x, tensor)
            ]
            if any(map(self.side_effects.is_modified, held)):
                sources = [x.source for x in held if _has_name(x.source)]
                if len(sources) > 1:
                    install(GlobalStateSource(), _are_distinct(sources))
        return original(self, tx, *args, **kwargs)

    patcher.around(output, "compile_subgraph", compile, "self", "tx")


def _has_name(source: Any) -> bool:
    """Is there an expression for the object at a source? A cell has none."""
    try:
        return bool(name_of(source))
    except NotImplementedError:
        return False


def _are_distinct(sources: Sequence[Any]) -> Callable[[Any, Any], None]:
    """Return a function that adds the guard: the objects at sources are distinct."""
    names = dict.fromkeys(map(name_of, sources))

    def create(builder: Any, guard: Any) -> None:
        scope = {"G": builder.scope["G"]}
        exec(_function(sources, len(names)), scope)
        parts = [f"{len(names)} objects are distinct: {', '.join(names)}"]
        add_lambda(
            builder.guard_manager.root, scope["distinct"], parts, guard.user_stack
        )

    return create


def _function(sources: Sequence[Any], n: int) -> str:
    """Return the code of the guard, which evaluates each part of a source once."""
    variables: dict[str, str] = {}
    lines = []
    for source in _parts(sources):
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
        lines.append(f"        {variables[name]} = {text}")
    every = ", ".join(f"id({variables[name_of(x)]})" for x in sources)
    return "\n".join(
        [
            "def distinct(L):",
            "    try:",
            *lines,
            "    except Exception:",
            "        return False  # one of them is no longer there",
            f"    return len({{{every}}}) == {n}",
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
