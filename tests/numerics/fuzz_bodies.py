"""Random bodies of a step: lines over one parameter, many of which use views.

`random_body(seed)` is what an optimizer's loop does to each parameter: views of temps,
of state and of the parameter; writes through them; reductions; other dtypes; memory
that two entries of the state share. A line is kept if eager takes it for each kind of
parameter and leaves numbers of ordinary size. `Body.text()` is a module that stands for
itself, as in fuzz_optimizers.py.
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, ...]
SHAPES: tuple[Shape, ...] = (
    *((6, 8), (5, 4), (4, 4), (9, 9), (2, 17), (6, 1), (1, 5)),
    *((7,), (8,), (33,), (1,), (), (2, 3, 4), (3, 2, 2, 2)),
)
DTYPES = (*["float32"] * 5, "float64", "bfloat16", "float16")
#: How parameters lie in memory.
LAYOUTS = ("plain", "plain", "plain", "turned", "flat")
LANES = (2, 3, 4, 16, 18, 24)
#: An expression of a line has values of this size at most, and of so many elements.
LARGEST, MOST = 1e4, 500
#: So many lines are tried for one that is kept.
TRIALS = 12

FRAME = '''\
"""Body {seed}."""
import torch
from torch.optim import Optimizer

class Drawn(Optimizer):
    def __init__(self, params):
        super().__init__(params, dict(lr=0.125))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr = group["lr"]
            for p in group["params"]:
                g, s = p.grad, self.state[p]
                s["n"] = s.get("n", 0) + 1
{lines}

def build():
    drawn = torch.Generator().manual_seed({seed})
    shapes = {shapes}
    tensors = [torch.randn(s, generator=drawn).to(torch.{dtype}) for s in shapes]
    if "{layout}" == "turned":
        tensors = [t.T.contiguous().T if t.dim() == 2 else t for t in tensors]
    if "{layout}" == "flat":
        flat = torch.cat([t.reshape(-1) for t in tensors])
        parts = flat.split([t.numel() for t in tensors])
        tensors = [x.view(t.shape) for x, t in zip(parts, tensors)]
    ps = [torch.nn.Parameter(t) for t in tensors]
    return ps, Drawn(ps)
'''

NUMBERS = ("0.5", "2", "0.1", "-0.3", "lr", "1 - lr", "3")
#: Views, and what is a copy of some tensors and a view of others.
VIEWS = (
    *(".view(-1)", ".reshape(-1)", ".flatten()", ".t()", ".mT", ".transpose(0, -1)"),
    *(".unsqueeze(0)", ".unsqueeze(-1)", ".squeeze()", "[0]", "[-1]", "[1:]", "[::2]"),
    *("[:, 0]", "[:, 1:]", "[..., ::2]", "[..., -1]", "[None]", ".select(-1, 0)"),
    *(".narrow(0, 1, 2)", ".chunk(2)[1]", ".split(2)[1]", ".unbind()[1]"),
    *(".diagonal()", ".expand(2, *$.shape)", ".unflatten(0, (2, -1))", ".detach()"),
    *(".movedim(0, -1)", ".view(2, -1)", ".view(-1)[::3]", ".data", ".unfold(0, 2, 1)"),
    *(".as_strided((2,), (1,))", ".contiguous()", ".view(torch.int32)", ".flip(0)"),
)
REDUCTIONS = (
    *("sum()", "mean()", "norm()", "amax()", "amin()", "abs().amax()", "norm(1)"),
    *("sum(0)", "sum(-1, keepdim=True)", "mean(-1)", "mean(dim=())", "amax(dim=())"),
    *("norm(float('inf'))", "norm(2, dim=-1)", "square().mean(-1, keepdim=True)"),
    *("max(-1)[0]", "argmax()", "prod(-1)", "std()", "var(-1, correction=0)"),
    *("any()", "all(0)", "any(dim=())", "count_nonzero()", "gt(0).sum()", "cumsum(0)"),
    *("sum(dtype=torch.float64)", "isfinite().all()", "sort()[0]", "nansum()"),
)
ELEMENTWISE = (
    *("abs()", "neg()", "square()", "sign()", "abs().sqrt()", "clone()", "tanh()"),
    *("reciprocal()", "round()", "trunc()", "relu()", "isnan()", "logical_not()"),
    *("clamp(-0.5, 0.5)", "float()", "double()", "to(torch.bfloat16)", "half()"),
    *("int()", "long()", "bool()", "to(p.dtype)"),
)
BINARY = (
    *("{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / ({b}.abs() + 1)", "{a} * {n}"),
    *("{a} / {n}", "{n} - {a}", "{a} * {r}", "{a} > {b}", "{a} > {r}", "{a} ** 2"),
    *("torch.where({a} > 0, {b}, {c})", "torch.where({r} > 0, {a}, {b})"),
    *("torch.cat([{a}, {b}])", "torch.cat([{a}.reshape(-1), {b}.reshape(-1)])"),
    *("torch.stack([{a}, {b}])", "torch.stack([{r}, {r}, {a}.sum()])"),
    *("torch.addcmul({a}, {b}, {c}, value={n})", "torch.lerp({a}, {b}, {n})"),
    *("torch.maximum({a}, {b})", "torch.minimum({a}, {r})", "torch.copysign({a}, {b})"),
    *("torch.full_like({a}, {n})", "torch.empty_like({a}).copy_({b})"),
    *("torch.add({a}, {b}, alpha=2)", "{a}.masked_fill({b} > 0, {n})"),
    *("{a} - {a}.mean(-1, keepdim=True)", "{a} / ({b}.norm() + 1)"),
)
#: Views through which is written.
PLACES = (
    *("", "", "", "[0]", "[1:]", ".view(-1)[:2]", ".t()", "[..., 0]", ".diagonal()"),
    *(".reshape(-1)[::2]", "[:, 1]", ".view(-1)", ".select(0, -1)", ".unbind()[0]"),
    *(".chunk(2)[1]", ".unsqueeze(0)", ".flatten()[1:]", ".data", ".squeeze()"),
)
WRITES = (
    *("mul_({n})", "add_({n})", "neg_()", "add_({b})", "mul_({b})", "copy_({b})"),
    *("sub_({b}, alpha=0.5)", "zero_()", "mul_({r})", "add_({r})", "clamp_(-1, 1)"),
    *(
        "lerp_({b}, 0.25)",
        "addcmul_({b}, {c}, value=0.5)",
        "masked_fill_({c} > 0, 0.5)",
    ),
    *(
        "addcdiv_({b}, {c}.abs() + 1, value=-0.1)",
        "add_({b}.sum())",
        "mul_({b}.norm())",
    ),
    *("fill_({r})", "square_()", "add_({a})", "sub_({a}.mean())", "copy_({a} * 2)"),
    *("copy_({a}.flip(0))", "copy_(torch.where({c} > 0, {a}, {b}))"),
)
STATES = (
    *("torch.zeros_like(p)", "p.clone()", "p.detach()", "p.detach().view(-1)", "g"),
    *("torch.zeros_like(p, dtype=torch.float32)", "torch.zeros(())", "g.clone()"),
    *("torch.zeros(p.shape[:1])", "torch.ones_like(p).t()", "s['m'].view(-1)"),
    *("s['m'][:1]", "s['m'].detach()", "s['m'].t()", "p.new_full((2, *p.shape), 0.5)"),
    *(
        "torch.zeros_like(p, dtype=torch.bool)",
        "torch.zeros_like(p, dtype=torch.int32)",
    ),
)
BRANCHES = (
    *("if p.dim() > 1:", "if s['n'] > 1:", "if {r}.item() > 0.5:", "if {r} > 0.25:"),
    *("for _ in range(2):", "if p.dtype == torch.float32:", "if lr > 0.1:"),
)


@dataclass(frozen=True)
class Body:
    """A random body. `lines`: of the loop, each of one or more lines of text."""

    seed: int
    shapes: tuple[Shape, ...]
    dtype: str
    layout: str
    lines: tuple[str, ...]

    def text(self) -> str:
        """The source of its module."""
        return FRAME.format(
            seed=self.seed,
            shapes=[*self.shapes],
            dtype=self.dtype,
            layout=self.layout,
            lines=textwrap.indent("\n".join(self.lines), 16 * " "),
        )


class _Lanes:
    """One parameter of each shape, on which lines are tried in eager."""

    def __init__(self, body: Body) -> None:
        names: dict[str, Any] = {}
        exec(body.text(), names)
        params, _ = names["build"]()
        self.scopes: list[dict[str, Any]] = []
        for p in {p.shape: p for p in params}.values():
            g = torch.randn(p.shape).to(p.dtype)
            scope = {"torch": torch, "p": p, "g": g, "s": {"n": 1}, "lr": 0.125}
            self.scopes.append(scope)

    def takes(self, line: str) -> bool:
        """Does eager take a line, and is what it leaves of ordinary size? If not, all
        is as it was before.
        """
        before = [(dict(x), dict(x["s"])) for x in self.scopes]
        held = {
            t.untyped_storage().data_ptr(): t.untyped_storage()
            for x in self.scopes
            for t in (*x.values(), *x["s"].values())
            if isinstance(t, torch.Tensor)
        }
        bytes_of = [(storage, storage.clone()) for storage in held.values()]
        try:
            with torch.no_grad():
                for scope in self.scopes:
                    exec(line, scope)
            if all(map(_is_ordinary, self._tensors())):
                return True
        except Exception:
            pass  # whatever it is: eager does not take the line
        for scope, (names, state) in zip(self.scopes, before, strict=True):
            scope.clear()
            scope.update(names)
            scope["s"].clear()
            scope["s"].update(state)
        for storage, content in bytes_of:
            storage.copy_(content)
        return False

    def _tensors(self) -> list[torch.Tensor]:
        found = [t for x in self.scopes for t in (*x.values(), *x["s"].values())]
        return [t for t in found if isinstance(t, torch.Tensor)]


def _is_ordinary(t: torch.Tensor) -> bool:
    if t.numel() > MOST:
        return False
    if not t.is_floating_point() or not t.numel():
        return True
    largest = t.detach().double().abs().amax()
    return bool(torch.isfinite(largest)) and float(largest) <= LARGEST


class _Writer:
    """Draws lines over the names that there are."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.names = ["p", "g"]

    def name(self) -> str:
        """A name, as a rule one of the last."""
        if len(self.names) > 3 and self.draw.random() < 0.5:
            return self.draw.choice(self.names[-3:])
        return self.draw.choice(self.names)

    def fill(self, form: str, a: str = "") -> str:
        """A form with names in the place of letters; `r` is a reduction."""
        parts = {"a": a or self.name(), "b": self.name(), "c": self.name()}
        reduction = f"{self.name()}.{self.draw.choice(REDUCTIONS[:7])}"
        return form.format(**parts, n=self.draw.choice(NUMBERS), r=reduction)

    def expression(self) -> str:
        kind, a = self.draw.random(), self.name()
        if kind < 0.3:
            return a + self.draw.choice(VIEWS).replace("$", a)
        if kind < 0.5:
            return f"{a}.{self.draw.choice(REDUCTIONS)}"
        if kind < 0.65:
            return f"{a}.{self.draw.choice(ELEMENTWISE)}"
        return self.fill(self.draw.choice(BINARY))

    def write(self) -> str:
        target = self.draw.choice([x for x in self.names if x != "g"])
        target += self.draw.choice(PLACES)
        line = f"{target}.{self.fill(self.draw.choice(WRITES), target)}"
        if self.draw.random() < 0.1:
            return f"{self.fill(self.draw.choice(BRANCHES))}\n    {line}"
        return line


def random_body(seed: int) -> Body:
    """A body of some five to fifteen lines."""
    draw = random.Random(seed)
    some = draw.sample(SHAPES, draw.choice((1, 2, 2, 3)))
    lanes, dtype = draw.choice(LANES), draw.choice(DTYPES)
    shapes = tuple([draw.choice(some) for _ in range(lanes)])
    torch.manual_seed(seed)
    bare = Body(seed, shapes, dtype, draw.choice(LAYOUTS), ("pass",))
    tried, writer = _Lanes(bare), _Writer(draw)
    lines: list[str] = []

    def one_of(form: str, draw_from: Any, name: str = "") -> None:
        for _ in range(TRIALS):
            line = form.format(draw_from())
            if tried.takes(line):
                lines.append(line)
                writer.names += [name] * bool(name)
                return

    for name in ("m", "w")[: draw.choice((0, 1, 1, 2))]:
        form = f"if '{name}' not in s:\n    s['{name}'] = {{}}\n{name} = s['{name}']"
        one_of(form, lambda: draw.choice(STATES), name)
    for k in range(draw.randint(4, 12)):
        if draw.random() < 0.6:
            one_of(f"t{k} = {{}}", writer.expression, f"t{k}")
        else:
            one_of("{}", writer.write)
    for name in [x for x in writer.names if x[0] == "t"]:
        # what nobody keeps, nobody sees
        held = f"s['{name}'] = {name}.detach()"
        kept = draw.choice((held, f"p.add_({name}.sum() * 0.01)", ""))
        if kept and tried.takes(kept):
            lines.append(kept)
    return Body(seed, shapes, dtype, bare.layout, tuple(lines) or ("p.add_(g)",))
