"""C++ of a variant's instructions, of which its functions and loops consist."""

from __future__ import annotations

import functools

from ...errors import EagerOnly
from ...ir.graph import Variant
from .. import optable
from ..optable import CPP_STORAGE as STORAGE
from ..optable import CPP_TYPES as REGISTER
from ..optable import LIBRARY
from ..target import lane_values
from .distribute import Phases, phases
from .quotients import divisions
from .remainder import Tails
from .rounding import known


class Instructions:
    """Writes the instructions of one variant, and their loads and stores."""

    def __init__(self, number: int | str, variant: Variant) -> None:
        self.number = number
        self.v = variant
        self.handed = {x: k for k, x in enumerate(lane_values(variant))}
        self.n_slots = len(variant.slots)
        self.elements = frozenset(variant.code)
        self.tails = Tails(number, variant)
        self.known = known(variant)
        self.has_halves = any(i.dtype in optable.NARROW for i in variant.instrs)

    @functools.cached_property
    def phases(self) -> Phases:
        """Element code in phases, between which it calls a library."""
        return phases(self.v, frozenset(op for op, _ in LIBRARY), self.divisions)

    @functools.cached_property
    def divisions(self) -> tuple[int, ...]:
        """Divisions that loops make by multiplying."""
        return divisions(self.v)

    def name(self, i: int) -> str:
        instr = self.v.instrs[i]
        if instr.op == "tail":
            return self.tails.name(instr.attr)
        if instr.op == "const":
            return optable.cpp_literal(float(instr.attr or 0.0), instr.dtype)
        return f"x{i}"

    def compute(self, i: int, vector: bool = False) -> str:
        instr = self.v.instrs[i]
        if instr.op == "index":
            text = "(int32_t)(at + i + j)"
        elif instr.op == "cast" and instr.dtype in optable.NARROW:
            text = self.rounded(instr.args[0], instr.dtype, vector)
        else:
            args = [self.name(a) for a in instr.args]
            text = optable.cpp(
                instr, args, [self.v.instrs[a].dtype for a in instr.args]
            )
        return f"const {REGISTER[instr.dtype]} x{i} = {text};"

    @property
    def counted(self) -> int | None:
        """Return the slot whose elements are counted, or None.

        All counted slots have one layout, so that one of them serves for all.
        """
        instrs = self.v.instrs
        loads = [instrs[x.args[0]] for x in instrs if x.op == "index"]
        if not loads:
            return None
        if self.v.reduction or {x.op for x in loads} != {"load"}:
            raise EagerOnly("an index of elements that are computed, or reduced")
        return min(int(x.attr or 0) for x in loads)

    def scalar(self, i: int) -> str:
        return self.taken(i, f"scalars[{self.v.instrs[i].attr}]")

    def taken(self, i: int, place: str) -> str:
        """Return a number of lane code, read from a double in memory."""
        kind = REGISTER[self.v.instrs[i].dtype]
        text = f"({kind}){place}"
        if self.has_halves and kind in ("float", "double"):
            text = f"calmed({text})"
        return f"const {kind} x{i} = {text};"

    def pointer(self, s: int) -> str:
        kind = STORAGE[self.v.slots[s].dtype]
        return (
            f"{kind}* __restrict__ p{s} = ({kind}*)"
            f"t.pool[t.position[lane * {self.n_slots} + {s}]];"
        )

    def prologue(self, slots: list[int]) -> list[str]:
        lines = [self.pointer(s) for s in slots]
        if self.v.scalars:
            n = len(self.v.scalars)
            lines.append(
                f"const double* __restrict__ scalars = t.rows + t.row[lane] * {n};"
            )
        return lines

    def load(self, i: int, place: str) -> str:
        dtype = self.v.instrs[i].dtype
        return f"const {REGISTER[dtype]} x{i} = {optable.cpp_load(dtype, place)};"

    def store(self, s: int, place: str, i: int) -> str:
        dtype = self.v.slots[s].dtype
        return f"{place} = {optable.cpp_store(self.rounded(i, dtype), dtype)};"

    def rounded(self, i: int, dtype: str, vector: bool = False) -> str:
        """Return instruction i as a number of type `dtype`; `vector`: many are
        computed.
        """
        x = self.name(i)
        if dtype not in optable.NARROW or dtype in self.known.fits[i]:
            return x
        if dtype == "f16":
            return f"{'vector' if vector else 'round'}_f16({x})"
        calm = i in self.elements and self.known.calm[i]
        return f"{'calm' if calm else 'round'}_bf16({x})"

    def call_once(self, i: int) -> list[str]:
        """Return the call of a vector library's function on one number."""
        instr = self.v.instrs[i]
        kind = REGISTER[instr.dtype]
        names = [f"a{i}", f"b{i}"][: len(instr.args)]
        operands = [
            f"{a} = {self.name(x)}, " for a, x in zip(names, instr.args, strict=True)
        ]
        args = [(f"&{a}", 1) for a in names]
        call = optable.library_call(instr.op, instr.dtype, "1", args, f"&x{i}")
        return [f"{kind} {''.join(operands)}x{i};", call]
