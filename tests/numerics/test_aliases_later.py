"""Two objects that a step changes become one between its calls, and two again."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.beside import PATHS, WAYS, load
from tests.frozen import bits

TURNS = 9
STEP = """
import torch


class Changes(torch.optim.Optimizer):
    def __init__(self, params):
        half = len(params) // 2
        groups = [{"params": params[:half]}, {"params": params[half:]}]
        super().__init__(groups, {"lr": 0.1})
        self.seen = 0

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "m" not in state:
                    state["m"] = torch.zeros_like(p)
                IN_LOOP
                p.sub_(p.grad, alpha=0.1 / (1 + RATE))
        AFTER
"""
#: Where the two objects are: outside of the loop over parameters, or in it.
OUTSIDE = {
    "attributes": ("self.one", "self.other"),
    "attribute and item": ("self.one", "self.table['a']"),
    "items": ("self.table['a']", "self.table['b']"),
    "attribute and group": ("self.one", "self.param_groups[1]"),
    "attribute and option": ("self.one", "self.param_groups[0]['own']"),
    "options": ("self.param_groups[0]['own']", "self.param_groups[1]['own']"),
    "groups": ("self.param_groups[0]['next']", "self.param_groups[1]"),
    "list": ("self.rows[0]", "self.rows[1]"),
}
INSIDE = {
    "states' items": ("state['own']", "self.one"),
    "items of two states": ("state['own']", "self.state[group['params'][0]]['own']"),
    "state and option": ("state['own']", "group['own']"),
    "items of a state": ("state['own']", "state['like']"),
}
#: How an object is made, read and counted up.
KINDS = {
    "dict": (lambda: {"n": 1}, "{}['n']"),
    "list": (lambda: [1], "{}[0]"),
    "object": (lambda: types.SimpleNamespace(n=1), "{}.n"),
}
CASES = [
    (where, kind)
    for where, places in {**OUTSIDE, **INSIDE}.items()
    for kind in KINDS
    if kind == "dict" or "self.param_groups[1]" not in places  # a group is a dict
]


def text(one: str, other: str, read: str, inside: bool) -> str:
    first, second = read.format(one), read.format(other)
    changes = [f"{first} += 1", f"self.seen += {first} * {second}", f"{second} += 2"]
    indented = "\n                ".join(changes)
    whole = STEP.replace("IN_LOOP", indented if inside else "pass")
    whole = whole.replace("RATE", second)
    return whole.replace("AFTER", "pass" if inside else "\n        ".join(changes))


def put(opt: Any, place: str, value: Any) -> None:
    """In the state of each parameter, or the one place."""
    if not place.startswith("state["):
        exec(f"{place} = value", {"self": opt, "value": value})
        return
    key = place[7:-2]
    for group in opt.param_groups:
        for p in group["params"]:
            opt.state[p][key] = value() if callable(value) else value


def setting(opt: Any, one: str, other: str, make: Any, alike: bool) -> None:
    """The two objects, new ones: as two, or as one."""
    if "params'][0]" in other:
        # the first parameter's, in the states of all of its group
        for group in opt.param_groups:
            for k, p in enumerate(group["params"]):
                first = opt.state[group["params"][0]]
                opt.state[p]["own"] = first["own"] if alike and k else make()
        return
    if other == "self.param_groups[1]":
        put(opt, one, opt.param_groups[1] if alike else make())
        opt.param_groups[1].setdefault("n", 1)
        return
    value = make()
    if other.startswith("group["):
        for group in opt.param_groups:
            group["own"] = value if alike else make()
    elif other.startswith("state["):
        for p in (p for group in opt.param_groups for p in group["params"]):
            opt.state[p]["own"] = make()
            opt.state[p]["like"] = opt.state[p]["own"] if alike else make()
        return
    else:
        put(opt, other, value)
    put(opt, one, value if alike else make)
    if not one.startswith("state[") and not alike:
        put(opt, one, make())


def trained(
    kind: Any, way: Any, lanes: int, places: tuple[str, str], make: Any
) -> list[Any]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(3)) for _ in range(lanes)]
    opt = kind(params)
    opt.table, opt.rows = {"a": None, "b": None}, [None, None]
    setting(opt, *places, make, False)
    step, found = way(opt), []
    for turn in range(TURNS):
        for p in params:
            p.grad = torch.ones(3)
        if turn in (2, 4, 7):
            setting(opt, *places, make, turn != 4)
        step()
        found.append((opt.seen, [bits(p) for p in params]))
    return found


@pytest.mark.family(24)
@pytest.mark.filterwarnings("ignore:fuseopt")
@pytest.mark.parametrize("lanes", [4, 18])
@pytest.mark.parametrize("way", PATHS)
@pytest.mark.parametrize(("where", "kind"), CASES)
def test_two_become_one(
    where: str, kind: str, way: str, lanes: int, tmp_path: Path
) -> None:
    make, read = KINDS[kind]
    places = OUTSIDE.get(where) or INSIDE[where]
    path = tmp_path / "changes.py"
    path.write_text(text(*places, read, where in INSIDE))
    module: Any = load(path)
    want = trained(module.Changes, lambda opt: opt.step, lanes, places, make)
    assert trained(module.Changes, WAYS[way], lanes, places, make) == want
