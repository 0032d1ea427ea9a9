"""Built-in methods: of tensors, lists, dicts, states, groups, plain data."""

from __future__ import annotations

import ast

import torch

from . import containers, functions, iteration, objects, stores, tensors
from .loops import over_lanes
from .machine import Machine, usable
from .memory import Dict, List, loose
from .values import (
    NUMBER,
    PLAIN,
    Data,
    First,
    Group,
    Grouped,
    Held,
    Items,
    Known,
    Level,
    Many,
    Method,
    Ref,
    State,
    States,
    Tensor,
    Value,
    join,
    level_of,
    types_of,
)

# ---------------------------------------------------------------- methods


def method(
    machine: Machine,
    value: Value,
    name: str,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    """Return the value of a call of a built-in method."""
    if isinstance(value, (Tensor, First)):
        return _of_tensor(machine, value, name, args, keywords, node)
    if isinstance(value, Ref):
        container = machine.now.heap[value.number]
        if isinstance(container, List):
            return _of_list(machine, value, container, name, args, node)
        return _of_dict(machine, value, container, name, args, keywords, node)
    if isinstance(value, State):
        return _of_state(machine, name, args, keywords, node)
    if isinstance(value, States):
        if name == "get" and isinstance(args[0], Tensor) and args[0].role == "param":
            if len(args) == 1:
                raise machine.refusal("state that may be missing is not analysed", node)
        raise machine.refusal("it reads the state of an unknown parameter", node)
    if isinstance(value, Group):
        return _of_group(machine, value, name, args, node)
    if isinstance(value, Grouped):
        return _of_grouped(machine, value, name, node)
    if isinstance(value, Held):
        return _of_held(machine, value, name, args, node)
    if isinstance(value, Items) and name in ("index", "count"):
        return functions.compute(machine, [value, *args], node)
    if level_of(value) is not None:
        return _of_data(machine, value, name, args, keywords, node)
    raise machine.refusal(f"it calls {name} of an unknown object", node)


def _of_tensor(
    machine: Machine,
    value: Tensor | First,
    name: str,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    level = Level.UNIFORM
    for x in (*args, *keywords.values()):
        usable(machine, x, node)
        argument_level = level_of(x)
        if argument_level is not None:
            level = max(level, argument_level)
    answer = tensors.metadata(machine, value, name, level, node)
    if answer is not None:
        if level == Level.NUMBER:
            raise machine.refusal("it reads a size by a number read from a lane", node)
        return answer
    if isinstance(value, First):
        raise machine.refusal("it uses a tensor of the first lane", node)
    if name in tensors.READS:
        if name == "tolist":
            raise machine.refusal("it reads tensor data as a list", node)
        return NUMBER
    # only a tensor has this method, so the value is one, even if it could be None
    receiver = Tensor(shared=value.shared, foreign=value.foreign)
    return tensors.aten(machine, name, [receiver, *args], keywords, node)


def _of_list(
    machine: Machine,
    ref: Ref,
    container: List,
    name: str,
    args: list[Value],
    node: ast.AST,
) -> Value:
    if name == "append":
        stores.append(machine, ref, args[0], node)
        return Known(None)
    if name == "copy":
        return functions.RULES[id(list)][1](machine, [ref], {}, node)
    if name == "extend":
        return _extend(machine, ref, container, args[0], node)
    if (
        name == "clear"
        and machine.is_local(container)
        and container.created_in == machine.turns()
    ):
        machine.now.heap[ref.number] = List(
            (), created_in=container.created_in, lane=container.lane
        )
        return Known(None)
    raise machine.refusal(f"it calls {name} of a list", node)


def _extend(
    machine: Machine, ref: Ref, container: List, more: Value, node: ast.AST
) -> Value:
    sequence = iteration.lanes_of(machine, more, node)
    if sequence is None:
        items = iteration.spread(machine, more, machine.site(node), node)
        if machine.is_local(container) and isinstance(items, list):
            for x in items:
                stores.append(machine, ref, x, node)
            return Known(None)
        if machine.is_local(container) and isinstance(items, Many):
            stores.append(machine, ref, items.item, node)
            extended = machine.now.heap[ref.number]
            assert isinstance(extended, List)
            values = [
                *(extended.items or ()),
                *([extended.many] if extended.many else []),
            ]
            machine.now.heap[ref.number] = loose(extended, values)
            return Known(None)
        raise machine.refusal("it appends an unknown value to a list", node)
    if machine.lane is not None:
        raise machine.refusal("it uses all lanes within a loop over lanes", node)

    def add(x: Value) -> None:
        stores.append(machine, ref, x, node)

    over_lanes(machine, sequence, add, node, frozenset())
    return Known(None)


def _of_dict(
    machine: Machine,
    ref: Ref,
    container: Dict,
    name: str,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    if container.broken:
        raise machine.refusal(container.broken, node)
    if name in ("get", "setdefault", "pop"):
        default = args[1] if len(args) > 1 else Known(None)
        certain = isinstance(args[0], Known) and container.other is None
        present = container.get(args[0].value) if isinstance(args[0], Known) else None
        if certain and present is None:
            if name == "setdefault":
                stores.store_ref(machine, ref, args[0], default, node)
            return default
        result = containers.ref_item(machine, ref, args[0], node)
        if not certain:
            result = join(result, default, Level.KIND)
        if name == "get" or (name == "setdefault" and certain):
            return result
        raise machine.refusal(f"it calls {name} of a dict", node)
    if name in ("items", "keys", "values") and container.other is None:
        pairs: dict[str, list[Value]] = {
            "items": [Items((Known(k), v)) for k, v in container.items],
            "keys": [Known(k) for k, _ in container.items],
            "values": [v for _, v in container.items],
        }
        return Items(tuple(pairs[name]))
    if name == "update" and not args:
        for key, value in keywords.items():
            stores.store_ref(machine, ref, Known(key), value, node)
        return Known(None)
    raise machine.refusal(f"it calls {name} of a dict", node)


def _of_state(
    machine: Machine,
    name: str,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    if name == "get":
        default = args[1] if len(args) > 1 else Known(None)
        return containers.state_item(machine, args[0], node, default)
    if name == "setdefault":
        stores.store_state(machine, args[0], args[1], node)
        return containers.state_item(machine, args[0], node)
    if name == "update":
        if args:
            container = (
                machine.container(args[0], node) if isinstance(args[0], Ref) else None
            )
            if not isinstance(container, Dict) or container.other is not None:
                raise machine.refusal(
                    "it stores an unknown value in the state of a lane", node
                )
            for key, value in container.items:
                stores.store_state(machine, Known(key), value, node)
        for word, value in keywords.items():
            stores.store_state(machine, Known(word), value, node)
        return Known(None)
    if name == "keys":
        return Many(Data(Level.KIND, frozenset({str})), Level.KIND)
    if name == "pop" and isinstance(args[0], Known):
        missing = args[1] if len(args) > 1 else None
        return containers.state_item(machine, args[0], node, missing)
    raise machine.refusal(f"it calls {name} of a state", node)


def _of_group(
    machine: Machine, group: Group, name: str, args: list[Value], node: ast.AST
) -> Value:
    if name == "get":
        default = args[1] if len(args) > 1 else Known(None)
        key = args[0]
        if isinstance(key, Known) and ("group", key.value) not in machine.world.written:
            if not any(key.value in g for g in machine.world.groups):
                return default
        return containers.group_item(machine, group, key, node, default)
    if name == "setdefault":
        stores.store_item(machine, group, args[0], args[1], node)
        return containers.group_item(machine, group, args[0], node)
    raise machine.refusal(f"it calls {name} of a group", node)


def _of_grouped(machine: Machine, value: Grouped, name: str, node: ast.AST) -> Value:
    if name not in ("items", "values"):
        raise machine.refusal(f"it calls {name} of lanes that were sorted", node)
    return Method(value, f"each of {name}")


def _of_held(
    machine: Machine, container: Held, name: str, args: list[Value], node: ast.AST
) -> Value:
    x = machine.world.object(container)
    written = container.number in machine.world.written
    if isinstance(x, dict) and name == "get":
        default = args[1] if len(args) > 1 else Known(None)
        level = containers.key_level(machine, args[0], node)
        if isinstance(args[0], Known) and not written:
            if args[0].value in x:
                return containers.held_item(machine, container, args[0], node)
            return default
        item = containers.held_item(machine, container, args[0], node)
        return usable(machine, join(item, default, level), node)
    if isinstance(x, dict) and name in ("items", "keys", "values") and not written:
        value = machine.world.value
        rows: list[Value] = []
        for k, v in x.items():
            pair = value(k, container.name), value(v, f"{container.name}[...]")
            rows.append(
                Items(pair) if name == "items" else pair[0 if name == "keys" else 1]
            )
        if len(rows) <= 16:
            return Items(tuple(rows))
    if isinstance(x, list) and name == "append":
        objects.write(machine, container.number, args[0], node)
        return Known(None)
    if name in ("index", "count", "copy") and not written:
        levels = [containers.key_level(machine, y, node) for y in args]
        return Data(max(levels, default=Level.UNIFORM))
    raise machine.refusal(f"it calls {name} of {container.name}", node)


#: Methods of strings that return strings.
_TEXT = frozenset(
    "lower upper strip lstrip rstrip replace format join removeprefix "
    "removesuffix".split()
)


def _of_data(
    machine: Machine,
    value: Value,
    name: str,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    computed = functions.compute(machine, [value, *args, *keywords.values()], node)
    level = level_of(computed)
    assert level is not None
    kinds = types_of(value) or frozenset()
    if level == Level.NUMBER and name not in ("is_integer", "conjugate"):
        raise machine.refusal("it formats tensor data as text", node)
    values = [value, *args, *keywords.values()]
    if all(isinstance(x, Known) and isinstance(x.value, PLAIN) for x in values):
        words = {k: v.value for k, v in keywords.items()}  # type: ignore[attr-defined]
        result = getattr(value.value, name)(*(x.value for x in args), **words)  # type: ignore
        if isinstance(result, PLAIN):
            return machine.world.value(result, name)
    if torch.Size in kinds:
        return Data(level, frozenset({int}))
    text = name in _TEXT
    truth = name in ("startswith", "endswith", "isdigit", "is_integer")
    return Data(
        level, frozenset({str}) if text else frozenset({bool}) if truth else None
    )
