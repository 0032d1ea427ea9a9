"""Generate C++ from a Kernel: OpenMP over chunks, SIMD inside, one call per step.

The text includes only <math.h> and <stdint.h>, and copies of common code (headers.py).
So it compiles in a fraction of a second. It runs in two phases: lane code once per
lane, then element code over equal chunks of all lanes laid end to end. Folds are
finished after these. Before that come, in one thread, the variants whose results all
others may need. After it come those that need the results of all others.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.blocks import size_of
from ...ir.graph import FLOATS, VECTOR, Kernel, Variant
from ..optable import NARROW
from ..target import Source, Target, layout
from .blocks import Blocks
from .headers import header
from .reduce import in_one_thread, least_to_share, reduce
from .tables import table
from .variant import Function, has_elements, has_lane_phase, remembers

#: Without this flag, GCC replaces a conversion from float to integer and back by
#: `trunc`. That keeps the sign of zero, and numbers that no integer holds.
KEEP_CONVERSIONS = '#pragma GCC optimize("trapping-math")\n'
#: Without this, GCC reads the words of a table one by one on a processor of an unlisted
#: kind. Its gathers are two or three times as fast.
GATHER = """\
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("tune=haswell")
#endif
"""
#: The begin of a block that all threads run, each as the caller treats denormals.
PARALLEL = (
    "  #pragma omp parallel num_threads(threads) if (threads > 1)",
    "  {",
    "    const InMode as_caller(mode);",
)


def _converts_back(v: Variant) -> bool:
    """May a variant convert floats to integers, and integers to floats?"""
    casts = {
        (v.instrs[i.args[0]].dtype in FLOATS, i.dtype in FLOATS)
        for i in v.instrs
        if i.op == "cast"
    }
    return {(True, False), (False, True)} <= casts


def tables_of(kernel: Kernel) -> list[int]:
    """The tables that a kernel uses, see ir/tables.py."""
    used = {
        int(i.attr or 0)
        for v in kernel.every
        for i in v.instrs
        if i.op in ("lookup", "search")
    }
    return sorted(used)


def _main(kernel: Kernel) -> list[str]:
    """Return the entry: first variants, all variants, then those that need their
    results.
    """
    n, last = len(kernel.every), len(kernel.variants) + len(kernel.finish)
    lines = [
        'extern "C" void fuseopt_step(const Table* tables, int64_t threads) {',
        f"  threads = useful(tables, 0, {n}, threads);",
        "  const uint64_t mode = float_mode();",
        *(
            # each of these calls OpenMP, which one thread need not do
            ("  const int64_t grain = threads > 1 ? 1 : 1 << 30;",)
            if any(variant.reduction for variant in kernel.every)
            else ()
        ),
        *(
            f"  Turns turns{v} = {{0, 0}}; Folds{v} folds{v};"
            for v, variant in enumerate(kernel.every)
            if variant.reduction == "full" and in_one_thread(variant)
        ),
    ]
    if kernel.first:
        # so little work that threads would wait longer for one another than it takes
        alone = "  #pragma omp parallel num_threads(1)"
        lines += [alone, "  {", *_run(kernel, range(last, n)), "  }"]
    lines += [
        *PARALLEL,
        *_run(kernel, range(len(kernel.variants))),
    ]
    if kernel.finish:
        first = len(kernel.variants)
        lines += [
            "  }",
            f"  threads = useful(tables, {first}, {last}, threads);",
            *PARALLEL,
            *_run(kernel, range(first, last)),
        ]
    return [*lines, "  }", "}"]


def _run(kernel: Kernel, numbers: Sequence[int]) -> list[str]:
    """Return code for variants that may run at once: lane phase, chunks, folds.

    `numbers`: their indices among all variants.
    """
    variants = kernel.every
    plain = [v for v in numbers if not variants[v].reduction]
    folding = [v for v in numbers if variants[v].reduction]
    # elements of rows are often read again by the next kernel: they come last
    folding.sort(key=lambda v: variants[v].reduction != "full")
    lines = []
    beginning = [v for v in numbers if has_lane_phase(variants[v])]
    for v in beginning:
        last = f", last{v}" if remembers(variants[v]) else ""
        if last:
            lines.append(f"    Lane{v} last{v} = {{}};")
        lines += [
            "    #pragma omp for schedule(static) nowait",
            f"    for (int64_t lane = 0; lane < tables[{v}].lanes; ++lane)",
            f"      lane{v}(tables[{v}], lane{last});",
        ]
    if beginning:
        lines.append("    #pragma omp barrier")
    for v in folding:
        full = variants[v].reduction == "full"
        if full and in_one_thread(variants[v]):
            least = least_to_share(variants[v])
            lines += [
                f"    fold_shared<Folds{v}, range{v}>(",
                f"        tables[{v}], {least}, turns{v}, folds{v});",
                "    #pragma omp for schedule(dynamic, grain) nowait",
                f"    for (int64_t lane = 0; lane < tables[{v}].lanes; ++lane)",
                f"      fold_lane<fold{v}>(tables[{v}], lane, {least});",
            ]
            continue
        call = f"fold_part<fold{v}>" if full else f"fold_items<fold{v}, WIDEST{v}>"
        lines += [
            "    #pragma omp for schedule(dynamic, grain) nowait",
            f"    for (int64_t k = 0; k < shares(tables[{v}]); ++k)",
            f"      {call}(tables[{v}], k);",
        ]
    if plain:
        # a block: variants that are finished later have separate chunks
        lines += ["    {", f"    int64_t chunks[{len(plain) + 1}] = {{0}};"]
        lines += [
            f"    chunks[{k + 1}] = chunks[{k}] + chunks_of(tables[{v}]);"
            for k, v in enumerate(plain)
        ]
        lines += [
            "    #pragma omp for schedule(guided) nowait",
            f"    for (int64_t c = 0; c < chunks[{len(plain)}]; ++c) {{",
        ]
        for k, v in enumerate(plain):
            lines.append(
                f"      {'if' if k == 0 else 'else if'} (c < chunks[{k + 1}]) "
                f"run_chunk<span{v}>(tables[{v}], c - chunks[{k}]);"
            )
        lines += ["    }", "    }"]
    to_finish = [v for v in folding if variants[v].reduction == "full"]
    if to_finish:
        lines.append("    #pragma omp barrier")
    for v in to_finish:
        lines += [
            "    #pragma omp for schedule(static) nowait",
            f"    for (int64_t lane = 0; lane < tables[{v}].lanes; ++lane)",
            f"      finish{v}(tables[{v}], lane);",
        ]
    return lines


def _functions(number: int, variant: Variant) -> str:
    """Return the functions of one variant."""
    writer = Function(number, variant)
    if variant.reduction:
        element = reduce(number, variant, writer)
    elif size_of(variant.instrs):
        element = Blocks(number, variant).functions()
    else:
        element = writer.element()
    lane = [*writer.lane(), ""] if has_lane_phase(variant) else []
    return "\n".join([*lane, *element, ""])


class CppTarget(Target):
    """C++ for the CPU, compiled by the system's compiler."""

    name = "cpp"
    suffix = ".cpp"

    @staticmethod
    def _headers(kernel: Kernel, code: str) -> list[str]:
        """Return the headers that precede a kernel's own code."""
        ops = {i.op for v in kernel.every for i in v.instrs}
        needed = ["prelude"]
        if ops & VECTOR.keys():
            needed.append("functions")
        if any(i.dtype in NARROW for v in kernel.every for i in v.instrs):
            needed.append("halves")
        if "bitcast" in ops:
            needed.append("bits")
        if "Divisor" in code:
            needed.append("quotients")
        if any(has_elements(v) or v.reduction for v in kernel.every):
            needed.append("walk")
        if any(size_of(v.instrs) for v in kernel.every):
            needed.append("blocks")
        if any(v.reduction for v in kernel.every):
            needed += ["folds", "pieces", "rows", "folding"]
        return needed

    def render(self, kernel: Kernel) -> Source:
        functions = [_functions(number, v) for number, v in enumerate(kernel.every)]
        needed = self._headers(kernel, "\n".join(functions))
        parts = [header(name) for name in needed]
        if any(_converts_back(v) for v in kernel.every):
            parts.insert(0, KEEP_CONVERSIONS)
        tables = tables_of(kernel)
        if tables:
            parts.insert(0, GATHER)
        parts += ["\n".join([*table(k), ""]) for k in tables]
        parts += functions
        parts += [header("modes"), header("driver")]
        parts.append("\n".join([*_main(kernel), ""]))
        text = "\n".join(parts)
        return Source(self.name, text, "fuseopt_step", tuple(map(layout, kernel.every)))
