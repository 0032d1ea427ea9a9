"""C++ of output code, which runs over neighbouring results."""

from __future__ import annotations

from ...ir.graph import REDUCTIONS
from ..optable import LIBRARY, library_call
from .folded import Folded


def output(p: Folded) -> list[str]:
    """Return output code, which runs over neighbouring results."""
    v, w, n = p.v, p.w, p.n
    has_tails = bool(w.tails.kinds)
    parameters = "".join(f", {x.kind}* __restrict__ p{x.slot}" for x in p.results)
    parameters += "".join(f", const {kind}* y{k}" for k, kind in enumerate(p.kinds))
    body = w.prologue([]) + w.lane_numbers(v.output_code, "output")
    return [
        f"static void output{n}(const Table& t, int64_t lane, int TAIL, "
        f"int64_t count{parameters}) {{",
        "  (void)TAIL;",
        *(f"  {x}" for x in [*body, *_output_loops(p)]),
        "}",
        *(w.tails.ends(late=True) if v.reduction == "dims" and has_tails else ()),
    ]


def _output_loops(p: Folded) -> list[str]:
    """Return one loop over the results, or several with library calls between.

    With many results, arrays keep the values that cross a call.
    """
    v, w = p.v, p.w
    many = v.reduction == "dims"
    loops: list[list[str]] = [[]]
    calls: list[list[str]] = []
    loop_of: dict[int, int] = {}  # instruction -> its loop, or the loop after its call
    waits: dict[int, None] = {}
    declared: set[tuple[int, int]] = set()

    def use(x: int) -> None:
        at = len(loops) - 1
        crosses = loop_of.get(x, at) < at or x in called
        if crosses and (at, x) not in declared:
            declared.add((at, x))
            waits[x] = None
            loops[at].append(f"const {p.kind(x)} x{x} = s{x}[j];")

    called: set[int] = set()
    for k, i in enumerate(p.folds):
        loops[0].append(f"const {p.kinds[k]} x{i} = y{k}[j];")
        loop_of[i] = 0
    for i in v.output_code:
        instr = v.instrs[i]
        if (instr.op, instr.dtype) in LIBRARY and many:
            args, lines = [], []
            for a in dict.fromkeys(instr.args):
                if a in loop_of:
                    waits[a] = None
                else:
                    lines.append(f"const {p.kind(a)} one{i}_{a} = {w.name(a)};")
            for a in instr.args:
                args.append((f"s{a}", 1) if a in loop_of else (f"&one{i}_{a}", 0))
            call = library_call(instr.op, instr.dtype, "count", args, f"s{i}")
            calls.append([*lines, call])
            loops.append([])
            loop_of[i], waits[i] = len(loops) - 1, None
            called.add(i)
            continue
        if instr.op in ("const", "tail", *REDUCTIONS):
            continue
        for a in instr.args:
            use(a)
        loop_of[i] = len(loops) - 1
        if instr.op == "load":
            loops[-1].append(w.load(i, f"p{instr.attr}[j]"))
        elif (instr.op, instr.dtype) in LIBRARY:
            loops[-1] += w.call_once(i)
        else:
            loops[-1].append(w.compute(i))
    for i, s in v.stores:
        if v.slots[s].domain == "output":
            use(i)
            loops[-1].append(w.store(s, f"p{s}[j]", i))
    lines = [f"alignas(64) {p.kind(x)} s{x}[GATHERED];" for x in waits]
    for k, body in enumerate(loops):
        kept = [x for x in waits if loop_of[x] == k and x not in called]
        lines += [
            *(calls[k - 1] if k else ()),
            "#pragma GCC ivdep",
            "for (int64_t j = 0; j < count; ++j) {",
            *(f"  {x}" for x in body),
            *(f"  s{x}[j] = x{x};" for x in kept),
            "}",
        ]
    return lines
