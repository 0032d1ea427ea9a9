"""Random optimizers, as source files, and what a user does between their steps.

`random_optimizer(seed)` puts pieces of tests/numerics/fuzz_pieces.py together: 16 to 40
parameters, four to six steps. `Drawn.text()` is a module that stands for itself:
`build()` makes parameters and optimizer, `before(turn, opt, ps)` does what the user
does before a step. It is imported from a file, one module for each run, so that
nothing is shared between runs; no class draws random numbers.
"""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.numerics.fuzz_pieces import ALL, EVENTS, NEAR_ONE, NUMBERS, PIECES

#: How often pieces of each list are drawn: harmless ones, numbers, control, across,
#: and those of steps that keep more than numbers.
WEIGHTS = (8, 5, 4, 1, 3)
SHAPES = ((5,), (3, 4), (2, 3), (), (1,), (4, 1, 2), (17,))
LANES = (16, 16, 16, 16, 18, 20, 24, 40)
#: Where few lanes may be led too: what Dynamo takes goes by the number of lanes.
FEW_LANES = (4, 5, 6, 6, 7, 8)

FRAME = '''\
"""Optimizer {seed}."""
import copy
import torch
from torch.optim import Optimizer

{module}
class Base(Optimizer):
    looked = {{}}
    def look(self, n):
        return self.looked.get(n, 1.0)

class Drawn(Base):
{cls}
    def __init__(self, params):
        super().__init__(params, dict(lr=0.1, beta=0.75, decay=0.0, maximize=False))
{init}
{step}

def new(n, shape, dtype=torch.float32):
    drawn = torch.Generator().manual_seed(n)
    return torch.nn.Parameter(torch.randn(shape, generator=drawn).to(dtype))

def build():
    kinds = {kinds}
    ps = [new(n, *kinds[n % len(kinds)]) for n in range({lanes})]
    ends = {ends}
    groups = [dict(params=ps[a:b]) for a, b in zip([0, *ends], [*ends, len(ps)])]
    for n, own in enumerate(groups):
        own["lr"] = {rates}[n]
    opt = Drawn(groups)
{setup}
    return ps, opt

def before(turn, opt, ps):
    n = len(ps)
{before}
'''


#: What a letter of a piece stands for; the lines of a piece, by section.
Fill = Callable[[str], Any]
Sections = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Drawn:
    """A random optimizer. `pieces`: name and lines of each; `events`: turn and line."""

    seed: int
    lanes: int
    ends: tuple[int, ...]
    kinds: tuple[str, ...]
    rates: tuple[float, ...]
    form: str
    order: str
    write: str
    grad_mode: str
    pieces: tuple[tuple[str, Sections], ...]
    events: tuple[tuple[int, str], ...]
    turns: int

    def part(self, name: str) -> list[str]:
        """The lines of all pieces for one section."""
        return [x for _, p in self.pieces for k, lines in p if k == name for x in lines]

    def text(self) -> str:
        """The source of its module."""
        before = []
        for turn in sorted({turn for turn, _ in self.events}):
            before.append(f"if turn == {turn}:")
            for at, line in self.events:
                if at == turn:
                    before.append(f"    {line}")
        return FRAME.format(
            seed=self.seed,
            module="\n".join(self.part("module")),
            cls=indented([f'"""{self.form}"""', *self.part("class")], 1),
            init=indented(self.part("init"), 2),
            step=indented(self.step().splitlines(), 1),
            kinds="[" + ", ".join(self.kinds) + ",]",
            lanes=self.lanes,
            ends=list(self.ends),
            rates=list(self.rates),
            setup=indented(self.part("setup"), 1),
            before=indented(before, 1),
        )

    def step(self) -> str:
        """The methods that make the step."""
        lane, skip = self.part("lane"), "continue"
        form = self.form
        if form == "method" and self.part("inline"):
            form = "loop"
        start = [
            "if p.grad is None:",
            "    SKIP",
            "grad, state = p.grad, self.state[p]",
            'rate, upd = group["lr"], grad',
        ]
        if form == "foreach":
            last = ["lanes.append(p)", "ups.append(upd)", "rates.append(-rate)"]
        elif form == "function":
            last = ["apply(p, upd, rate)"]
        else:
            last = [self.write]
        body = [*start, *lane, *last]
        lanes = {
            "plain": 'for i, p in enumerate(group["params"]):',
            "reversed": 'for i, p in reversed(list(enumerate(group["params"]))):',
            "sorted": 'for i, p in sorted(enumerate(group["params"]), '
            "key=lambda ip: (ip[1].numel(), ip[0])):",
            "zip": 'for i, p in zip(range(len(group["params"])), group["params"]):',
            "list": 'for i, p in [(i, p) for i, p in enumerate(group["params"]) '
            "if p.grad is not None]:",
            "index": 'for i in range(len(group["params"])):',
            "generator": "for i, p in self.members(group):",
        }[self.order]
        if self.order == "index":
            body = ['p = group["params"][i]', *body]
        extra: list[str] = []
        if self.order == "generator":
            extra += [
                "def members(self, group):",
                '    for i, p in enumerate(group["params"]):',
                "        yield i, p",
            ]
        if form == "method":
            skip = "return"
            extra += ["def lane(self, g, group, i, p):", *inner(body)]
            body = body[:1] if self.order == "index" else []
            body.append("self.lane(g, group, i, p)")
        elif form == "function":
            extra += [
                "@staticmethod",
                "def put(p, upd, rate):",
                f"    {self.write}",
            ]
            body[-1] = "self.put(p, upd, rate)"
        first = list(self.part("step"))
        if form == "foreach":
            first += ["lanes, ups, rates = [], [], []"]
        every = [
            *first,
            "for g, group in enumerate(self.param_groups):",
            *inner([*self.part("group"), lanes, *inner(body)]),
        ]
        if form == "foreach":
            every += [
                "if lanes:",
                "    torch._foreach_add_(lanes, torch._foreach_mul(ups, rates))",
            ]
        every += self.part("end")
        head = ["def step(self, closure=None):"]
        if self.grad_mode == "decorator":
            head = ["@torch.no_grad()", *head]
        elif self.grad_mode == "with":
            every = ["with torch.no_grad():", *inner(every)]
        else:
            every = ["torch.set_grad_enabled(False)", "try:", *inner(every)]
            every += ["finally:", "    torch.set_grad_enabled(True)"]
        text = "\n".join([*extra, *head, *inner(every)])
        return re.sub(r"\bSKIP\b", skip, text)

    def __str__(self) -> str:
        return self.text()


def inner(lines: Sequence[str]) -> list[str]:
    """The same, one step to the right."""
    return [f"    {line}" for line in lines]


def indented(lines: Sequence[str], depth: int) -> str:
    """Lines of a block that stands there; never an empty one."""
    return textwrap.indent("\n".join(lines or ["pass"]), "    " * depth)


def filled(text: str, fill: Fill) -> str:
    """A line of a piece, with a value for each of its letters."""
    return re.sub(r"\$([knxytji])", lambda found: str(fill(found[1])), text)


def filled_piece(sections: dict[str, list[str]], fill: Callable[[], Fill]) -> Sections:
    """All of a piece but its events."""
    return tuple(
        (key, tuple(filled(line, fill()) for line in lines))
        for key, lines in sections.items()
        if key != "event"
    )


def alone(names: Sequence[str], event: str, turns: int = 5) -> Drawn:
    """Some pieces, and one thing that a user does to the tenth lane of sixteen."""

    def fill(k: int) -> Fill:
        values = {"k": k, "n": 16, "x": 2.0, "y": 1.0, "t": 2, "j": 9, "i": 9}
        return values.__getitem__

    return Drawn(
        seed=0,
        lanes=16,
        ends=(),
        kinds=("((5,), torch.float32)", "((3, 4), torch.float32)"),
        rates=(0.1,),
        form="loop",
        order="plain",
        write="p.add_(upd, alpha=-rate)",
        grad_mode="decorator",
        pieces=tuple(
            (name, filled_piece(ALL[name], lambda k=k: fill(k)))  # type: ignore[misc]
            for k, name in enumerate(names)
        ),
        events=((2, filled(event, fill(0))),) if event else (),
        turns=turns,
    )


def random_optimizer(seed: int, sizes: Sequence[int] = LANES) -> Drawn:
    """The optimizer of a seed, always the same; `sizes`: how many lanes."""
    r = random.Random(seed)
    lanes = r.choice(sizes)
    kinds = tuple(drawn_kinds(r))
    ends: tuple[int, ...] = ()
    if r.random() < 0.4:
        places = range(2, lanes - 1)
        ends = tuple(sorted(r.sample(places, min(r.choice((1, 1, 2)), len(places)))))
    smallest = min(b - a for a, b in zip((0, *ends), (*ends, lanes), strict=True))

    def drawn(k: int) -> Fill:
        lane, place = r.randrange(lanes), r.randrange(smallest)
        draws: dict[str, Callable[[], Any]] = {
            "k": lambda: k,
            "n": lambda: lanes,
            "x": lambda: r.choice(NUMBERS),
            "y": lambda: r.choice(NEAR_ONE),
            "t": lambda: r.randint(1, 3),
            "j": lambda: lane,
            "i": lambda: place,
        }
        return lambda letter: draws[letter]()

    turns = r.choice((4, 4, 5, 6))
    # what a few lanes may lead, whatever the user does
    tame = r.random() < 0.35
    pieces, events = [], []
    for k in range(r.choice((1, 2, 2, 3, 3, 4, 5))):
        name = r.choice(list(PIECES[0] if tame else r.choices(PIECES, WEIGHTS)[0]))
        sections = ALL[name]
        pieces.append((name, filled_piece(sections, lambda k=k: drawn(k))))
        own = [filled(line, drawn(k)) for line in sections.get("event", ())]
        events += [(r.randrange(turns), x) for x in own if r.random() < 0.8]
    for _ in range(r.choice((0, 0, 1, 1, 2, 3))):
        events.append((r.randrange(1, turns), filled(r.choice(EVENTS), drawn(99))))
    written = (
        "p.add_(upd, alpha=-rate)",
        "p.add_(upd, alpha=-rate)",
        "p.sub_(upd * rate)",
        "p.copy_(p - rate * upd)",
        "p.data.add_(upd, alpha=-rate)",
        "p.data.sub_(rate * upd)",
        "p.add_(upd.mul(-rate))",
    )
    grad_mode = r.choice(("decorator", "decorator", "decorator", "with", "set"))
    form = r.choice(("loop", "loop", "loop", "method", "function", "foreach"))
    if tame:
        # neither is led
        grad_mode = grad_mode.replace("set", "with")
        form = form.replace("foreach", "loop")
    return Drawn(
        seed=seed,
        lanes=lanes,
        ends=ends,
        kinds=kinds,
        rates=tuple(r.choice((0.1, 0.1, 0.03, 0.5, 0.0)) for _ in (0, *ends)),
        form=form,
        order=r.choice(
            ("plain",) * (60 if tame else 6)
            + ("reversed", "sorted", "zip", "list", "index", "generator")
        ),
        write=r.choice(written),
        grad_mode=grad_mode,
        pieces=tuple(pieces),
        events=tuple(sorted(events, key=lambda e: e[0])),
        turns=turns,
    )


def drawn_kinds(r: random.Random) -> list[str]:
    """Shapes and dtypes, of which parameters have one after another."""
    kinds = []
    for shape in r.sample(SHAPES, r.choice((1, 1, 2, 2, 3))):
        dtype = r.choice(("float32",) * 7 + ("float64", "bfloat16", "float16"))
        kinds.append(f"({shape}, torch.{dtype})")
    return kinds
