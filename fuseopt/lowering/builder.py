"""Builder that collects the instructions of one body for the rules of ops."""

from __future__ import annotations

from collections.abc import Callable
from struct import pack, unpack

from ..ir.graph import FLOATS, Instr


def single(value: float) -> float:
    """Return the float32 nearest to a number."""
    return float(unpack("f", pack("f", value))[0])


class Builder:
    """Collects the instructions of one body, and reuses equal ones.

    `on_gpu`: emit the bits of eager's GPU kernels. `single`: the operands are numbers
    without dimensions, which no vector holds.
    """

    def __init__(
        self,
        common: str,
        compute: str,
        vector_library: bool,
        single: bool = False,
        on_gpu: bool = False,
    ) -> None:
        self.on_gpu = on_gpu
        self.single = single
        self.common = common
        self.compute = compute
        self.vector_library = vector_library
        self.instrs: list[Instr] = []
        self.known: dict[Instr, int] = {}
        self.numbers: dict[int, float | None] = {}
        #: operands that are one number for all elements: literals, or 0-d
        self.shared: set[int] = set()
        #: 0-d operands on the CPU beside tensors of a GPU
        self.on_host: set[int] = set()

    def unrounded(self, number: int) -> int:
        """Return a number of the call, or in memory, as its original float64."""
        instr = self.instrs[number]
        if instr.op == "cast":
            return self.unrounded(instr.args[0])
        if instr.op == "load":
            return self.cast(number, "f64")
        return self.emit(instr._replace(dtype="f64"))

    def emit(self, instr: Instr) -> int:
        if instr not in self.known:
            self.known[instr] = len(self.instrs)
            self.instrs.append(instr)
        return self.known[instr]

    def op(self, op: str, *args: int, dtype: str | None = None) -> int:
        return self.emit(Instr(op, args, dtype or self.compute))

    def const(self, value: float, dtype: str | None = None) -> int:
        return self.emit(Instr("const", (), dtype or self.compute, value))

    def zero(self) -> int:
        """Emit the number 0, like a literal operand of the call."""
        x = self.const(0.0)
        self.numbers[x] = 0.0
        return x

    def cast(self, x: int, dtype: str) -> int:
        return x if self.instrs[x].dtype == dtype else self.op("cast", x, dtype=dtype)

    def is_given(self, x: int) -> bool:
        """Does eager pass operand x to its GPU kernels as a number?"""
        return x in self.numbers or x in self.on_host

    def is_number(self, x: int, value: float) -> bool:
        """Is operand x a literal in the graph with exactly this value?"""
        return self.numbers.get(x) == value

    def rounded(self, x: int) -> int:
        """Round x to the common dtype."""
        return self.cast(self.cast(x, self.common), self.compute)

    def tail(self, tail: int, body: int, size: int | None = None) -> int:
        """Select `tail` after the end of eager's vectorized loop, `body` inside it.

        `size`: bytes of an element, if the loop takes two vectors of the processor at a
        time. Add AVX2 if it takes two vectors of 32 bytes. None if it takes 32
        elements. A GPU's loops have no such end, and one number is never in a vector.
        """
        if self.on_gpu:
            return body
        if tail == body or self.single:
            return tail
        return self.op("where", self.emit(Instr("tail", (), "b8", size)), tail, body)

    def narrow(self) -> bool:
        """Does eager compute in float32 and store 16 bits?"""
        return self.common != self.compute

    def is_int(self) -> bool:
        return self.compute not in FLOATS

    def both(self, *masks: int) -> int:
        return self.op("and", *masks, dtype="b8")

    def compare(self, op: str, x: int, y: int) -> int:
        return self.op(op, x, y, dtype="b8")


Rule = Callable[..., int | None]
