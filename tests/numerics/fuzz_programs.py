"""Random programs of an update, as Python source over tensors of every layout.

`random_program(seed)` has a few dozen tensors at most, some of which share memory, and
lines that change them (foreach calls and methods, in place and
not, scalars as literals and as arguments, views, reductions, externs). A program prints
as the function that it is. Only what docs/numerics.md calls exact is written: the
compiled step must give the bits of eager.
"""

from __future__ import annotations

import linecache
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

#: Reductions whose order of sums is eager's own; one that is not leaves this list, and
#: gets a row in the exceptions of docs/numerics.md.
EXACT_REDUCTIONS = (
    "sum()",
    "mean()",
    "norm()",
    "amax()",
    "amin()",
    "sum(-1, keepdim=True)",
    "mean(0)",
    "amax(-1)",
)
#: ATen calls in the middle.
EXTERNS = ("cumsum(0)", "sort(0)[0]", "flip(0)", "roll(1)")

#: ATen's names for these, which no rule covers.
RUN_AS_THEY_ARE = frozenset(
    "sum mean norm linalg_vector_norm amax amin cumsum sort flip roll".split()
)

SHAPES = ((), (0,), (1,), (3,), (2, 3), (5, 7), (33,), (2, 3, 4), (2, 2, 3, 2))
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: "turned": other orders of dimensions; "gaps": every second element; "offset": from
#: an unaligned element on; "flat": parts of one tensor, side by side; "shared": parts
#: that overlap; "woven": one in the gaps of the other; "tied": all are one memory.
LAYOUTS = tuple("plain plain turned gaps offset flat shared woven tied".split())
NUMBERS = (0.5, 0.9, 1.0, 2.0, 0.1, -0.3, 1e-8, 3, 0.0)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: strides and offset in elements of its storage."""

    name: str
    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class Program:
    """The tensors and lines of a step; the first `statics` tensors belong to it."""

    places: tuple[Place, ...]
    statics: int
    lines: tuple[str, ...]
    results: tuple[str, ...]
    seed: int
    special: bool

    @property
    def source(self) -> str:
        names = ", ".join([*(p.name for p in self.places), "lr", "k"])
        body = "\n".join(f"    {line}" for line in self.lines)
        back = ", ".join(self.results) + ("," if self.results else "")
        return f"def step({names}):\n{body}\n    return ({back})\n"

    def __repr__(self) -> str:
        places = "\n".join(f"# {p}" for p in self.places)
        return f"{places}\n# seed {self.seed}, special {self.special}\n{self.source}"

    def numbers(self, turn: int) -> tuple[float, int]:
        """lr and k of a call."""
        return ((0.3, 4), (0.7, 5))[turn]

    def function(self) -> Callable[..., Any]:
        space: dict[str, Any] = {"torch": torch}
        name = f"<program {hash(self.source)}>"
        # capture reads the lines of a step, as it would from its file
        linecache.cache[name] = (0, None, self.source.splitlines(True), name)
        exec(compile(self.source, name, "exec"), space)
        return space["step"]  # type: ignore[no-any-return]

    def tensors(self, turn: int = 0) -> list[Tensor]:
        """The tensors before the step, in memory of their own; `turn` changes grads."""
        sizes: dict[int, int] = {}
        for p in self.places:
            reach = p.offset + _extent(p.shape, p.stride)
            sizes[p.storage] = max(sizes.get(p.storage, 0), reach)
        storages: dict[int, Tensor] = {}
        made = []
        for p in self.places:
            if p.storage not in storages:
                seed = 1000 * self.seed + p.storage + 77 * turn
                storages[p.storage] = self._fill(sizes[p.storage], p.dtype, seed)
            made.append(storages[p.storage].as_strided(p.shape, p.stride, p.offset))
        return made

    def _fill(self, n: int, dtype: torch.dtype, seed: int) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        if dtype == torch.bool:
            return torch.rand(n, generator=g) < 0.5
        if not dtype.is_floating_point:
            return torch.randint(-9, 9, (n,), generator=g).to(dtype)
        x = torch.randn(n, generator=g, dtype=torch.float64)
        if self.special and n:
            values = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 1e30, -1e-30])
            at = torch.randint(0, n, (len(values),), generator=g)
            x[at] = values.double()
        return x.to(dtype)

    def graph(self, tensors: Sequence[Tensor]) -> GraphModule:
        """The function as Dynamo hands it over: statics are attributes of the graph.

        The other tensors and both numbers are its arguments.
        """
        gm = symbolic_trace(self.function())
        holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        for holder, place, t in list(zip(holders, self.places, tensors, strict=False))[
            : self.statics
        ]:
            gm.register_buffer(place.name, t)
            with gm.graph.inserting_before(holder):
                attribute = gm.graph.get_attr(place.name)
            holder.replace_all_uses_with(attribute)
            gm.graph.erase_node(holder)
        gm.recompile()
        return gm


class _Writer:
    """Draws tensors and lines; runs each line in eager, and keeps those it allows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.places: list[Place] = []
        self.storages = 0
        self.lines: list[str] = []
        self.space: dict[str, Any] = {"torch": torch, "lr": 0.3, "k": 4}
        self.lists: dict[str, list[str]] = {}
        self.frozen: set[str] = set()  # expanded: eager refuses to write them
        self.temps = 0

    def pick(self, options: Sequence[Any]) -> Any:
        return self.random.choice(list(options))

    def chance(self, percent: int) -> bool:
        return self.random.random() < percent / 100

    # ------------------------------------------------------------ tensors

    def place(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], layout: str, at: int
    ) -> None:
        """One tensor; `at`: where "flat" and "shared" ones begin in their storage."""
        shape = tuple(shape)
        stride, offset, storage = _dense(shape), 0, self.storages
        if layout == "turned" and len(shape) > 1:
            order = [len(shape) - 1, *range(len(shape) - 1)]
            if len(shape) == 4 and self.chance(50):
                order = [0, 2, 3, 1]
            inner = _dense([shape[d] for d in order])
            stride = tuple(inner[order.index(d)] for d in range(len(shape)))
        elif layout == "gaps":
            stride = tuple(2 * s for s in stride)
            offset = self.pick((0, 1))
        elif layout == "offset":
            offset = self.pick((1, 3))
        elif layout == "expanded" and shape:
            axis = self.pick(range(len(shape)))
            stride = tuple(0 if d == axis else s for d, s in enumerate(stride))
            self.frozen.add(name)
        if at >= 0:  # a part of the storage that came last
            offset, storage = at, self.storages - 1
        else:
            self.storages += 1
        self.places.append(Place(name, storage, dtype, shape, stride, offset))

    def group(
        self, name: str, dtypes: Sequence[torch.dtype], shapes: Any, layouts: Any
    ) -> None:
        """A list of tensors, one for each lane, all in one storage where flat."""
        self.lists[name] = []
        layout = self.pick(layouts)
        at = 0
        for i, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True)):
            own = f"{name}{i}"
            self.lists[name].append(own)
            if layout not in ("flat", "shared", "woven", "tied"):
                self.place(own, dtype, shape, layout, -1)
                continue
            if dtype != dtypes[0]:
                self.place(own, dtype, shape, "plain", -1)
                continue
            if i == 0:
                self.storages += 1
            self.place(own, dtype, shape, "gaps" if layout == "woven" else "plain", at)
            size = math.prod(shape)
            at += {
                "flat": size,
                "shared": self.pick((size // 2, size)),
                "woven": 1 if i % 2 == 0 else 2 * size,
                "tied": 0,
            }[layout]

    # ------------------------------------------------------------ lines

    def values(self, name: str) -> Tensor:
        found: Tensor = eval(name, self.space)
        return found

    def write(self, line: str) -> bool:
        """Keep a line if eager allows it."""
        try:
            exec(line, self.space)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        self.lines.append(line)
        return True

    def number(self) -> str:
        kind = self.random.randrange(10)
        if kind < 6:
            return repr(self.pick(NUMBERS))
        return str(
            self.pick(("lr", "-lr", "1 - lr", "lr * 0.5", "k", "k + 1", "0.9 ** k"))
        )

    def subset(self) -> list[int]:
        """Positions of the lanes: some, in any order, at times one twice."""
        n = len(self.lists["p"])
        kind = self.random.randrange(10)
        lanes = list(range(n))
        if kind >= 6:
            lanes = self.random.sample(lanes, self.pick(range(1, n + 1)))
        if kind == 9:
            lanes.append(lanes[0])
        return lanes

    def column(self, lanes: Sequence[int], names: Sequence[str]) -> str:
        """A list of tensors by position."""
        name = self.pick(names)
        return "[" + ", ".join(self.lists[name][i] for i in lanes) + "]"

    def temp(self) -> str:
        self.temps += 1
        return f"t{self.temps}"

    def full(self, target: str, other: str) -> bool:
        """May these be added with `alpha`?

        Where one repeats, or has 16 bits and the layout of another call of the lane,
        eager rounds some elements in another way.
        """
        pairs = zip(eval(target, self.space), eval(other, self.space), strict=True)
        repeats = any(name in other for name in self.frozen)
        return not repeats and all(
            x.shape == y.shape and x.element_size() > 2 for x, y in pairs
        )

    def foreach(self) -> None:
        lanes = self.subset()
        target = self.column(lanes, [n for n in self.lists if n != "g"])
        names = list(self.lists)
        other, third = self.column(lanes, names), self.column(lanes, names)
        numbers = "[" + ", ".join(self.number() for _ in lanes) + "]"
        x, kind = self.number(), self.random.randrange(24)
        name, args = {
            0: ("add", x),
            1: ("add", other),
            2: ("add", f"{other}, alpha={x}"),
            3: ("sub", f"{other}, alpha={x}"),
            4: ("mul", x),
            5: ("mul", other),
            6: ("div", x),
            7: ("div", other),
            8: ("mul", numbers),
            9: ("add", numbers),
            10: ("addcmul", f"{other}, {third}, {x}"),
            11: ("addcdiv", f"{other}, {third}, {x}"),
            12: ("addcmul", f"{other}, {third}, {numbers}"),
            13: ("lerp", f"{other}, {x}"),
            14: ("abs", ""),
            15: ("neg", ""),
            16: ("sqrt", ""),
            17: ("reciprocal", ""),
            18: ("sign", ""),
            19: ("clamp_min", x),
            20: ("clamp_max", x),
            21: ("pow", self.pick(("2", "3", "0.5", "-1"))),
            22: ("mul", "s0"),
            23: ("copy", other),
        }[kind]
        if name == "sqrt":
            self.write(f"torch._foreach_abs_({target})")
        if "alpha" in args and not self.full(target, other):
            args = other
        args = f"{target}, {args}" if args else target
        if self.chance(25) and name != "copy":
            made = self.temp()
            if self.write(f"{made} = torch._foreach_{name}({args})"):
                # its results stand beside the lists from here on
                whole = [*self.lists["p"]]
                for at, lane in enumerate(lanes):
                    whole[lane] = f"{made}[{at}]"
                self.lists[made] = whole
            return
        self.write(f"torch._foreach_{name}_({args})")

    def tensor(self, writable: bool = False) -> str:
        """One tensor of the program, or a view of it."""
        names = [n for n in self.lists if not writable or n != "g"]
        name = str(self.pick(self.lists[self.pick(names)]))
        x = self.values(name)
        if self.chance(20) and x.dim():
            views = ["[1:]", "[0]", "[::2]", "[:1]"]
            if x.dim() > 1:
                views += [".t()", "[:, 1:]", "[..., ::2]"] if x.dim() == 2 else [".mT"]
            name += self.pick(views)
        return name

    def alike(self, name: str) -> str:
        """Another tensor of the shape of one, or a number."""
        try:
            shape = self.values(name).shape
        except (RuntimeError, IndexError):
            return name
        found = [
            y
            for own in self.lists.values()
            for y in own
            if self.values(y).shape == shape
        ]
        return str(self.pick([*found, "s0"])) if found else "s0"

    def method(self) -> None:
        x = self.tensor(writable=True)
        y = self.tensor() if self.chance(25) else self.alike(x)
        z, n = self.alike(x), self.number()
        kind = self.random.randrange(25)
        line = {
            0: f"{x}.add_({y})",
            1: f"{x}.add_({n})",
            2: f"{x}.sub_({y})",
            3: f"{x}.mul_({y})",
            4: f"{x}.mul_({n})",
            5: f"{x}.div_({n})",
            6: f"{x}.lerp_({z}, 0.25)",
            7: f"{x}.addcmul_({y}, {z}, value={n})",
            8: f"{x}.addcdiv_({y}, {z}, value={n})",
            9: f"{x}.copy_({y})",
            10: f"{x}.clamp_(-0.5, 1.5)",
            11: f"{x}.copy_(torch.where({y} > {n}, {x}, {z}))",
            12: f"{x}.copy_(torch.where({y} == {z}, 1.0, {x}))",
            13: f"{x}.neg_()",
            14: f"{x}.zero_()",
            15: f"{x}.fill_({n})",
            16: "s0.add_(1)",
            17: f"{x}.add_({y}.{self.pick(EXTERNS)})",
            18: f"{x}.mul_({y}.{self.pick(EXACT_REDUCTIONS)})",
            19: f"{x}.div_({y}.abs().add_(0.5))",
            20: "i0.add_(k).mul_(2)",
            21: f"b0.copy_({y}.reshape(-1)[:1] > 0)",
            22: f"{x}.add_(i0[:1])",
            23: f"{x}.copy_(torch.maximum({y}, {z}.abs() + 0.5))",
            24: f"{x}.mul_(torch.where(b0[:1], 0.5, 2.0))",
        }[kind]
        if any(f in line.split("(")[0] for f in self.frozen):
            return
        self.write(line)

    def value(self) -> None:
        """A temp, which later lines may read and write."""
        x = self.tensor()
        y, n = self.alike(x), self.number()
        kind = self.random.randrange(7)
        right = {
            0: f"{x} * {n}",
            1: f"{x} - {y}",
            2: f"torch.zeros_like({x})",
            3: f"{x}.clone()",
            4: f"{x}.square().mul_({n})",
            5: f"{x}.{self.pick(EXTERNS)}",
            6: f"{x}.{self.pick(EXACT_REDUCTIONS)}",
        }[kind]
        made = self.temp()
        if self.write(f"{made} = {right}"):
            self.lists[made] = [made] * len(self.lists["p"])

    def loop(self) -> None:
        """The same two lines for every lane, as a for-loop writes them."""
        n = self.number()
        kind = self.random.randrange(5)
        first = self.pick([x for x in self.lists if x != "g"])
        for p, g in zip(
            self.lists[first], self.lists[self.pick(self.lists)], strict=True
        ):
            if p in self.frozen:
                continue
            full = self.full(f"[{p}]", f"[{g}]")
            alpha = ", alpha=-0.1" if full else ""
            self.write(
                {
                    0: f"{p}.mul_({n}).add_({g}{alpha})",
                    1: f"{p}.lerp_({g}, 0.1)",
                    2: f"{p}.addcmul_({g}, {g}, value={n})",
                    3: f"{p}.sub_({g} * {n})",
                    4: f"{p}.add_(torch.sign({g}){alpha})",
                }[kind]
            )


def random_program(seed: int, layouts: Sequence[str] = LAYOUTS) -> Program:
    """A program whose lists have tensors of some of `layouts`."""
    w = _Writer(seed)
    n = w.pick((1, 2, 2, 3, 4))
    shapes = [w.pick(SHAPES) for _ in range(n)]
    same = w.chance(50)
    first = w.pick(FLOATS)
    dtypes = [first if same else w.pick(FLOATS) for _ in range(n)]
    w.group("p", dtypes, shapes, layouts)
    w.group("m", dtypes if w.chance(70) else [torch.float32] * n, shapes, layouts)
    w.place("s0", w.pick((torch.float32, torch.float64)), (), "plain", -1)
    w.place("i0", w.pick((torch.int64, torch.int32)), (3,), "plain", -1)
    w.place("b0", torch.bool, (2,), "plain", -1)
    statics = len(w.places)
    w.group(
        "g", dtypes if w.chance(80) else [first] * n, shapes, [*layouts, "expanded"]
    )
    program = Program((*w.places,), statics, (), (), seed % 1000, w.chance(15))
    w.space.update(zip((p.name for p in w.places), program.tensors(), strict=True))
    for _ in range(w.pick(range(1, 9))):
        w.pick((w.foreach, w.foreach, w.method, w.method, w.value, w.loop))()
    w.write("i0.sub_(1)")  # at least one tensor changes
    temps = [f"t{i + 1}" for i in range(w.temps) if f"t{i + 1}" in w.space]
    tensors = [t for t in temps if isinstance(w.space[t], Tensor)]
    results = (w.pick(tensors),) if tensors and w.chance(30) else ()
    return Program(
        program.places, statics, (*w.lines,), results, program.seed, program.special
    )
