"""Instructions of PTX -> what the machine runs: numbers of registers, of functions."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable

from .text import Instruction, Text

COMPUTE, BRANCH, CHOICE, EXIT, LOAD, STORE, LOAD_SHARED, STORE_SHARED = range(8)
ATOMIC, SYNC, SHUFFLE, REDUX, LOAD_MATRIX, STORE_MATRIX = range(8, 14)
ACQUIRE, RELEASE = 1, 2
WHOLE, SELECT, COPY, HALVES, JOIN, SPLIT, PACK, PERMUTE, SHIFT = range(9)

SHUFFLES = ("bfly", "idx", "up", "down")
REDUCED = ("and", "or", "xor", "add", "min.u32", "max.u32", "min.s32", "max.s32")
COMBINED = ("add", "and", "or", "xor", "min", "max", "exch")
ADDRESS = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]")
NAME = re.compile(r"[a-z]\w*")
#: Names that are no registers.
NAMED = {"true", "false", "global_smem"}
#: What else a name may say that changes nothing here.
IDLE = {"weak", "nc", "L1", "evict_first", "evict_last", "no_allocate", "level"}


class Instr(ctypes.Structure):
    """As in machine.cpp."""

    _fields_ = (
        *((n, ctypes.c_int32) for n in ("kind", "what", "guard", "negated")),
        *((n, ctypes.c_int32) for n in ("results", "operands")),
        ("to", ctypes.c_int32 * 8),
        ("from_", ctypes.c_int32 * 8),
        ("offset", ctypes.c_int64),
        *((n, ctypes.c_int32) for n in ("width", "extended", "target", "flags")),
    )


class Unknown(NotImplementedError):
    """The machine has no such instruction."""


class Encoder:
    """`code` and `targets` of a text; `registers` by name, `constants` by register.

    `function(name)`: the number of a function of the machine, -1 for none.
    `parameters`: what the kernel is called with.
    """

    def __init__(self, text: Text, function: Callable[[bytes], int]) -> None:
        self.text = text
        self.function = function
        self.registers: dict[str, int] = {}
        self.constants: dict[int, int] = {}
        self.targets: list[int] = []
        self.tid, self.ctaid = map(self.register, ("%tid.x", "%ctaid.x"))
        self.parameters = [self.register(name) for name in text.parameters]
        self.code = [self._encoded(x) for x in text.instructions]
        self.code.append(self._made(EXIT))

    # ---------------------------------------------------------------- operands

    def register(self, name: str) -> int:
        """The number of a register."""
        return self.registers.setdefault(name, len(self.registers))

    def operand(self, text: str) -> int:
        """The register of an operand, which may be a constant."""
        if text.startswith("%"):
            if "." in text and text not in ("%tid.x", "%ctaid.x"):
                raise Unknown(f"the machine has no {text}")
            return self.register(text)
        if text == "_" or (NAME.fullmatch(text) and text not in NAMED):
            return self.register(text)
        number = self.register(f"constant {text}")
        self.constants[number] = _constant(text)
        return number

    def _list(self, text: str) -> list[int]:
        return [self.operand(x.strip()) for x in text.strip("{} ").split(",")]

    # ---------------------------------------------------------------- instructions

    def _encoded(self, x: Instruction) -> Instr:
        try:
            made = self._kind(x)
        except Unknown as error:
            raise Unknown(f"{error} ({x})") from None
        made.guard = self.register(x.guard) if x.guard else -1
        made.negated = x.negated
        return made

    def _kind(self, x: Instruction) -> Instr:
        name, *rest = x.parts
        if name == "bra":
            return self._made(BRANCH, target=self.text.labels[x.operands[0]])
        if name == "brx":
            table = self.text.choices[x.operands[1]]
            first = len(self.targets)
            self.targets += [self.text.labels[label] for label in table]
            which = [self.operand(x.operands[0])]
            return self._made(CHOICE, (), which, what=len(table), target=first)
        if name == "ret" or name == "exit":
            return self._made(EXIT)
        if name in ("bar", "barrier"):
            if len(x.operands) != 1 or "sync" not in rest:
                raise Unknown("no barriers of some threads")
            return self._made(SYNC)
        if name == "shfl":
            to, given, lane, clamp, _ = x.operands
            if clamp not in ("31", "0"):
                raise Unknown("no shuffles of parts of a warp")
            given = [self.operand(given), self.operand(lane)]
            kind = SHUFFLES.index(rest[1])
            return self._made(SHUFFLE, [self.operand(to)], given, kind)
        if name == "redux":
            kind = rest[1] if rest[1] in REDUCED else ".".join(rest[1:])
            to, given = map(self.operand, x.operands[:2])
            return self._made(REDUX, [to], [given], REDUCED.index(kind))
        if name in ("ld", "st", "atom", "red"):
            return self._memory(x, name, rest)
        if name in ("ldmatrix", "stmatrix"):
            return self._matrices(x, name == "ldmatrix", rest)
        return self._computed(x)

    def _computed(self, x: Instruction) -> Instr:
        name, (to, *given) = ".".join(x.parts), x.operands
        if to.startswith("{"):
            name = name.replace("mov", "split")
            results = self._list(to)
        else:
            results = [self.operand(t) for t in to.split("|")]
        if given[0].startswith("{"):
            name = name.replace("mov", "join")
            operands = self._list(given[0])
        else:
            operands = [self.operand(g) for g in given]
        number = self.function(name.encode())
        if number < 0:
            raise Unknown(f"the machine has no {name}")
        width = 4 if name.endswith("32") else 8
        shape = _shape(name)
        return self._made(COMPUTE, results, operands, number, flags=shape, width=width)

    def _memory(self, x: Instruction, name: str, rest: list[str]) -> Instr:
        kind, said = rest[-1], [r for r in rest[:-1] if r not in IDLE]
        width, extended = int(re.sub(r"\D", "", kind)) // 8, kind.startswith("s")
        if "param" in said:
            return self._parameter(x)
        where = x.operands[0 if name in ("st", "red") else 1]
        found = ADDRESS.fullmatch(where)
        if found is None or not {"global", "shared"} & {*said}:
            raise Unknown(f"no memory as in {where}")
        base, offset = self.operand(found[1]), int(found[2] or "0", 0)
        more = {"offset": offset, "width": width, "extended": extended}
        if name in ("atom", "red"):
            return self._atomic(x, name, said, base, more)
        known = {"global", "shared", "v2", "v4"}
        if not {*said} <= known:
            raise Unknown(f"no {name} that is {' '.join(sorted({*said} - known))}")
        shared = "shared" in said
        if name == "ld":
            to = self._list(x.operands[0])
            return self._made(LOAD_SHARED if shared else LOAD, to, [base], **more)
        given = [base, *self._list(x.operands[1])]
        return self._made(STORE_SHARED if shared else STORE, (), given, **more)

    def _matrices(self, x: Instruction, load: bool, rest: list[str]) -> Instr:
        if not {"m8n8", "shared", "b16"} <= {*rest}:
            raise Unknown("no such matrices")
        found = ADDRESS.fullmatch(x.operands[load])
        if found is None:
            raise Unknown(f"no memory as in {x.operands[load]}")
        base, registers = self.operand(found[1]), self._list(x.operands[not load])
        more = {"what": int("trans" in rest), "offset": int(found[2] or "0", 0)}
        if load:
            return self._made(LOAD_MATRIX, registers, [base], **more)
        return self._made(STORE_MATRIX, (), [base, *registers], **more)

    def _atomic(
        self,
        x: Instruction,
        name: str,
        said: list[str],
        base: int,
        more: dict[str, int],
    ) -> Instr:
        """An atomic. Without a scope that reaches other programs it orders nothing."""
        operation = next((o for o in said if o in COMBINED), "")
        if "shared" in said or not operation or x.parts[-1].startswith(("f", "s", "v")):
            raise Unknown("no such atomic")
        order = 0
        if {"gpu", "sys"} & {*said}:
            order |= ACQUIRE if {"acquire", "acq_rel"} & {*said} else 0
            order |= RELEASE if {"release", "acq_rel"} & {*said} else 0
        to = [self.operand(x.operands[0])] if name == "atom" else []
        given = [base, self.operand(x.operands[-1])]
        what = COMBINED.index(operation)
        return self._made(ATOMIC, to, given, what, flags=order, **more)

    def _parameter(self, x: Instruction) -> Instr:
        to, name = self.operand(x.operands[0]), x.operands[1].strip("[] ")
        number = self.function(b"mov.b64")
        return self._made(COMPUTE, [to], [self.register(name)], number)

    @staticmethod
    def _made(
        kind: int,
        to: list[int] | tuple[()] = (),
        given: list[int] | tuple[()] = (),
        what: int = 0,
        **more: int,
    ) -> Instr:
        made = Instr(
            kind=kind, what=what, results=len(to), operands=len(given), guard=-1, **more
        )
        made.to[: len(to)], made.from_[: len(given)] = to, given
        return made


def _shape(name: str) -> int:
    """How what is written of operands makes what is written of the result."""
    shapes = {"selp": SELECT, "mov": COPY, "join": JOIN, "split": SPLIT}
    shapes["prmt"] = PERMUTE
    first, last = name.split(".")[0], name.split(".")[-1]
    if first == "shr" and last.endswith(("32", "64")):
        return SHIFT
    if first == "cvt" and "x2." in name:
        return PACK
    return HALVES if last.endswith("x2") else shapes.get(first, WHOLE)


def _constant(text: str) -> int:
    """The bits of a constant."""
    if text == "global_smem":
        return 0
    if text in ("true", "false"):
        return int(text == "true")
    if text[:2] in ("0f", "0d", "0F", "0D"):
        return int(text[2:], 16)
    try:
        return struct.unpack("<Q", struct.pack("<q", int(text.rstrip("U"), 0)))[0]
    except (ValueError, struct.error):
        raise Unknown(f"no constant {text}") from None
