"""What a kernel of PTX computes, without a GPU: one function of floats over arrays.

`python -m tests.tools.ptx` has nvcc make PTX of `powf` and prints the digests that
tests/codegen/test_triton_power.py holds. Each instruction is done as PTX defines it,
in numpy, for all threads at once; threads part at branches. `rcp.approx` alone, which a
GPU estimates, is an exact reciprocal here.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import zlib
from pathlib import Path

import numpy as np

SOURCE = """
extern "C" __global__ void kernel(const float* x, const float* y, float* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = powf(x[i], y[i]);
}
"""
INSTR = re.compile(r"^(?:@(!?)(%p\d+)\s+)?([a-z][\w.]*)\s*(.*?);")


def powf_of_nvcc(arch: str = "sm_90") -> str:
    """The PTX that nvcc makes of `out[i] = powf(x[i], y[i])`."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "k.cu")
        source.write_text(SOURCE)
        made = Path(folder, "k.ptx")
        command = ["nvcc", f"-arch={arch}", "-ptx", str(source), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True)
        return made.read_text()


class Kernel:
    """PTX of one kernel with float arrays as arguments, the last of them its result."""

    def __init__(self, text: str) -> None:
        body = text[text.index("{", text.index(".entry")) :]
        self.code: list[tuple[str, ...] | str] = []
        self.labels: dict[str, int] = {}
        for line in body.splitlines():
            line = line.split("//")[0].strip()
            if re.match(r"^[$\w]+:$", line):
                self.labels[line[:-1]] = len(self.code)
            elif found := INSTR.match(line):
                self.code.append(tuple(x or "" for x in found.groups()))

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """What the kernel stores for these arrays of float32."""
        n = len(arrays[0])
        threads = {0: np.ones(n, bool)}  # by instruction, those that are there
        regs: dict[str, np.ndarray] = {}
        places: dict[str, int] = {}  # registers that hold addresses: which argument
        out = np.zeros(n, np.float32)
        while threads:
            at = min(threads)
            here = threads.pop(at)
            while at < len(self.code) and here.any():
                if at in threads:
                    here = here | threads.pop(at)
                negated, guard, name, operands = self.code[at]
                args = [x.strip() for x in operands.split(",")] if operands else []
                at += 1
                if name.startswith("bra"):
                    taken = here
                    if guard:
                        taken = here & (regs[guard] != bool(negated))
                    target = self.labels[args[0]]
                    threads[target] = threads.get(target, np.zeros(n, bool)) | taken
                    here = here & ~taken
                    continue
                if name == "ret":
                    break
                if name == "ld.param.u64":
                    places[args[0]] = int(re.findall(r"param_(\d+)", args[1])[0])
                elif name.startswith("cvta") or name.endswith("64"):
                    known = [places[a] for a in args[1:] if a in places]
                    if known:
                        places[args[0]] = known[0]
                elif name.startswith("ld.global"):
                    place = places[args[1].strip("[]").split("+")[0]]
                    regs[args[0]] = arrays[place].view(np.int32)
                elif name.startswith("st.global"):
                    value = self._value(regs, args[1], n).view(np.float32)
                    out = np.where(here, value, out)
                elif args and not args[0].startswith("%rd"):
                    made = self._do(name, [self._value(regs, a, n) for a in args[1:]])
                    if made.dtype != bool:
                        made = made.view(np.int32)
                    before = regs.get(args[0], np.zeros(n, made.dtype))
                    regs[args[0]] = np.where(here, made, before)
        return out

    @staticmethod
    def _value(regs: dict[str, np.ndarray], x: str, n: int) -> np.ndarray:
        if x in regs:
            return regs[x]
        if x.startswith("%"):
            return np.zeros(n, np.int32)  # where the thread is, which nothing asks
        if x.startswith("0f"):
            return np.full(n, int(x[2:], 16), np.uint32).view(np.float32)
        return np.full(n, int(x), np.int64).astype(np.int32)

    @staticmethod
    def _do(name: str, xs: list[np.ndarray]) -> np.ndarray:
        op, *rest = name.split(".")
        ints = rest[-1] in ("s32", "u32", "b32")
        floats = [x.view(np.float32) for x in xs if x.dtype != bool]
        words = [x.view(np.int32) for x in xs if x.dtype != bool]
        if op in ("mov", "ld"):
            return xs[0]
        if op == "cvt":
            return _converted(rest, xs[0])
        if op == "setp":
            compare = {"lt": np.less, "gt": np.greater, "eq": np.equal,
                       "geu": lambda a, b: ~(a < b), "gtu": lambda a, b: ~(a <= b),
                       "neu": lambda a, b: ~(a == b), "ne": np.not_equal,
                       "nan": lambda a, b: np.isnan(a) | np.isnan(b)}  # fmt: skip
            return np.asarray(compare[rest[0]](*(words if ints else floats)))
        if op == "selp":
            a, b = words if ints else floats
            return np.where(xs[2], a, b)
        if op in ("or", "and", "xor") and rest == ["pred"]:
            return {"or": np.bitwise_or, "and": np.bitwise_and, "xor": np.bitwise_xor}[
                op
            ](xs[0], xs[1])
        if ints:
            of = {"add": np.add, "sub": np.subtract, "and": np.bitwise_and,
                  "xor": np.bitwise_xor, "or": np.bitwise_or,
                  "shl": np.left_shift}  # fmt: skip
            if op == "mad":
                return words[2]
            return of[op](*words)
        assert "ftz" not in rest or op == "rcp", name
        if op == "fma":
            return _fma(*floats)
        if op == "rcp":
            return np.float32(1) / floats[0]
        if op in ("abs", "neg"):
            return np.abs(floats[0]) if op == "abs" else -floats[0]
        return {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op](*floats)


def _converted(kinds: list[str], x: np.ndarray) -> np.ndarray:
    rounding = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor}
    source, target = kinds[-1], kinds[-2]
    if source == "s32":
        return x.view(np.int32).astype(np.float32)
    rounded = rounding[kinds[0]](x.view(np.float32))
    if target == "f32":
        return rounded
    whole = np.nan_to_num(rounded.astype(np.float64), nan=0.0)
    return np.clip(whole, -(2.0**31), 2.0**31 - 1).astype(np.int32)


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    from fuseopt.runtime.triton.interpreter import _fma_f32

    return _fma_f32(x, y, z)


#: Bases of bias corrections.
BETAS = (0.5, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999)
STEPS = 10_000


def sweep(beta: float) -> tuple[np.ndarray, np.ndarray]:
    """beta, and the steps 1 to STEPS, as arrays of float32."""
    steps = np.arange(1, STEPS + 1, dtype=np.float32)
    return np.full(STEPS, beta, np.float32), steps


def extremes() -> tuple[np.ndarray, np.ndarray]:
    """All pairs of numbers near the ends of the range, whole, odd, halves; and drawn
    ones.
    """
    tiny = np.float32(2.0**-126)
    ends = [0.0, 1e-45, 2e-39, tiny, 1e-30, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 7.5,
            40.0, 127.0, 128.0, 149.0, 150.0, 16777216.0, 3e38, np.inf]  # fmt: skip
    values = np.array([*ends, *(-x for x in ends), np.nan], np.float32)
    x, y = (a.ravel() for a in np.meshgrid(values, values, indexing="ij"))
    random = np.random.Generator(np.random.PCG64(1))
    drawn = np.exp(random.uniform(-80, 80, 20_000)).astype(np.float32)
    powers = random.uniform(-30, 30, 20_000).astype(np.float32)
    return np.concatenate([x, drawn]), np.concatenate([y, powers])


def digest(made: np.ndarray) -> int:
    """A checksum of float32 numbers, in which all NaN are one."""
    bits = np.where(np.isnan(made), np.float32(np.nan), made).view(np.uint32)
    return zlib.crc32(np.where(np.isnan(made), 0x7FC00000, bits).tobytes())


def main() -> None:
    """Print what nvcc's powf gives."""
    powf = Kernel(powf_of_nvcc())
    with np.errstate(all="ignore"):
        for beta in BETAS:
            print(f"    {beta}: {digest(powf(*sweep(beta))):#010x},")
        print(f"EXTREMES = {digest(powf(*extremes())):#010x}")


if __name__ == "__main__":
    main()
