"""Random steps that move numbers: between keys of state, attributes, groups, tensors.

`random_stores(seed)` is a for-loop whose lines copy, swap and combine integers, floats
and truth values of a lane, of the optimizer and of its group; pack them into tuples,
lists and dicts and take them out again; and scale the update by one of them. No line of
it fails in eager. `Stores.text()` is a module that stands for itself.
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass

#: Fewer lanes than 16 are traced whole.
LANES = (3, 16, 18, 20)
SHAPES = ((5,), (3, 4), (6,), ())

FRAME = '''\
"""Stores {seed}."""
import torch
from torch.optim import Optimizer

class Drawn(Optimizer):
    def __init__(self, params):
        super().__init__(params, dict(lr=0.125, k=2, r=0.5))
        self.i, self.x, self.f = 1, 0.25, True
        self.pair, self.table = (1, 2), {{"i": 3, "x": 0.5}}

    @torch.no_grad()
    def step(self, closure=None):
{before}
        for group in self.param_groups:
{within}
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, s = p.grad, self.state[p]
                if not s:
{state}
{lines}

def build():
    drawn = torch.Generator().manual_seed({seed})
    shapes = {shapes}
    params = [torch.nn.Parameter(torch.randn(s, generator=drawn)) for s in shapes]
    return params, Drawn(params)
'''

STATE = (
    *('s["a"] = 1', 's["b"] = 1', 's["c"] = 0', 's["x"] = 1.5', 's["y"] = 0.0'),
    *('s["f"] = False', 's["m"] = torch.zeros_like(p)', 's["z"] = torch.zeros(())'),
)
#: Of integers, floats and truth values: places of a lane, then of all lanes.
LANE = {
    "int": ('s["a"]', 's["b"]', 's["c"]'),
    "float": ('s["x"]', 's["y"]'),
    "bool": ('s["f"]',),
}
COMMON = {
    "int": ("self.i", 'group["k"]', 'self.table["i"]', "self.pair[0]"),
    "float": ("self.x", 'group["r"]', 'self.table["x"]'),
    "bool": ("self.f",),
}
#: Forms of an expression of each type: $i, $x, $f are places of that type.
FORMS = {
    "int": (
        *("$i", "$i", "$i", "$i + 1", "$i + $i", "max($i, $i)", "min($i, $i)"),
        *("$i - $i", "3 * $i % 101", "$i // 2", "int($x * 4)", "-$i", "int($f)"),
        *("abs($i)", "$i if $f else $i", "1", "7", "[$i, $i][1]", "len(s)"),
        *("($i, $i)[0]", "divmod($i, 3)[1]", "sum(($i, $i)) % 97", "301", "303"),
    ),
    "float": (
        *("$x", "$x", "$x * 0.5", "$x + 0.25", "float($i)", "max($x, $x)", "$i / 4"),
        *("1.0 / (1 + abs($i))", "0.5", "0.9 ** ($i % 5)", "$x if $f else $x", "-$x"),
        *("min($x, $i)", "($x, $x)[1]", "round($x, 1)"),
    ),
    "bool": (
        *("$f", "not $f", "$i > 3", "$i == $i", "$x > 0.5", "bool($i % 2)", "True"),
        *("$f and $f", "$i < $i"),
    ),
}
#: Statements that move several at once.
MOVES = (
    *('s["a"], s["b"] = s["b"], s["a"]', 's["a"], s["b"] = s["b"], s["a"] + s["b"]'),
    *('s["x"], s["y"] = s["y"], s["x"]', 's["c"] = s["a"]; s["a"] += 1'),
    *('s["last"] = s["a"]', 's["most"] = max(s.get("most", 0), s["a"])'),
    *('u = (s["a"], s["x"]); s["c"], s["y"] = u', 'u = s["a"]; s["b"] = u; s["c"] = u'),
    *(
        's["two"] = (s["a"], s["b"])',
        's["row"] = [s["a"], 1]',
        's["in"] = {"n": s["a"]}',
    ),
    *('s["c"] = s.pop("b"); s["b"] = s["a"]', 's.update(c=s["a"], b=s["c"])'),
    *('s["z"].fill_(s["a"])', 's["z"].add_(s["x"])', 's["m"].fill_(s["b"])'),
    *('s["m"].mul_(0.9).add_(g, alpha=s["x"])', 's["z"] = torch.tensor(float(s["b"]))'),
    *('s.setdefault("d", s["a"])', 's["e"] = s["f"]', 'for k in ("a", "b"): s[k] += 1'),
    'for k, j in zip(("a", "b", "c"), ("b", "c", "a")): s[k] = s[j]',
)
#: The same outside of the loop over parameters, and within it: the latter are unlike.
COMMON_MOVES = (
    *("self.i += 1", "self.last = self.i", "self.i, self.n = self.i + 1, self.i"),
    *('group["k"] += 1', "self.pair = (self.pair[1], sum(self.pair))", "self.x *= 0.5"),
    *('self.table["i"], self.i = self.i, self.table["i"]', 'group["r"] = self.x'),
    *("self.pair = (self.i, self.pair[0])", 'group["old"] = group["lr"]'),
)
LEAKS = (
    'self.i = s["a"]',
    'group["k"] = s["b"]',
    'self.pair = (s["a"], 1)',
    "self.i += 1",
)


@dataclass(frozen=True)
class Stores:
    seed: int
    shapes: tuple[tuple[int, ...], ...]
    before: tuple[str, ...]
    within: tuple[str, ...]
    lines: tuple[str, ...]

    def text(self) -> str:
        """The module, which has `build() -> (parameters, optimizer)`."""

        def block(lines: tuple[str, ...], deep: int) -> str:
            return textwrap.indent("\n".join(lines or ("pass",)), "    " * deep)

        return FRAME.format(
            seed=self.seed,
            shapes=list(self.shapes),
            before=block(self.before, 2),
            within=block(self.within, 3),
            state=block(STATE, 5),
            lines=block(self.lines, 4),
        )


class _Writer:
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def place(self, kind: str, lane: bool, written: bool = False) -> str:
        places = [*(LANE if lane else COMMON)[kind]]
        if written:
            places = [x for x in places if not x.startswith("self.pair")]
        elif lane and self.draw.random() < 0.2:
            places = [*COMMON[kind]]
        return self.draw.choice(places)

    def expression(self, kind: str, lane: bool) -> str:
        forms = [x for x in FORMS[kind] if lane or "s)" not in x]
        form = self.draw.choice(forms)
        for letter, of in (("$i", "int"), ("$x", "float"), ("$f", "bool")):
            while letter in form:
                form = form.replace(letter, self.place(of, lane), 1)
        return form

    def line(self, lane: bool) -> str:
        kind = self.draw.choice(("int", "int", "int", "float", "bool"))
        target = self.place(kind, lane, written=True)
        return f"{target} = {self.expression(kind, lane)}"


def random_stores(seed: int) -> Stores:
    """A step of some four to twelve lines."""
    draw = random.Random(seed)
    writer = _Writer(draw)
    shapes = draw.sample(SHAPES, draw.choice((1, 1, 2)))
    lanes = tuple([draw.choice(shapes) for _ in range(draw.choice(LANES))])
    outer: tuple[list[str], list[str]] = [], []
    for lines in outer:
        for _ in range(draw.choice((0, 0, 1, 2))):
            moves = [x for x in COMMON_MOVES if "group" not in x or lines is outer[1]]
            lines.append(draw.choice(moves))
    inner: list[str] = []
    for _ in range(draw.randint(2, 7)):
        chance = draw.random()
        if chance < 0.5:
            inner.append(draw.choice(MOVES))
        elif chance < 0.97:
            inner.append(writer.line(True))
        else:
            inner.append(draw.choice(LEAKS))
    scale = writer.place("int", True), writer.place("float", True)
    inner.append(f"p.add_(g, alpha=-group['lr'] * {scale[1]} / (1 + abs({scale[0]})))")
    return Stores(seed, lanes, tuple(outer[0]), tuple(outer[1]), tuple(inner))
