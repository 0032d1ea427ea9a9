"""C++ that folds a lane to one number ("full" variants).

A thread takes a part of a lane as eager's threads would. When all are done, a last loop
combines the parts and runs output code.
"""

from __future__ import annotations

from ...ir.graph import Slot
from ..optable import CPP_STORAGE, CPP_TYPES
from .folded import Folded
from .folds import run_type, serial
from .walk import rooms


def fold_lanes(p: Folded) -> list[str]:
    """Return the folds of a lane, their feeding over a range, and a thread's range."""
    v, n = p.v, p.n
    instrs = [v.instrs[i] for i in p.folds]
    declared = [
        f"{run_type(x.op, kind, int(x.attr or 0))} f{k};"
        for k, (x, kind) in enumerate(zip(instrs, p.kinds, strict=True))
    ]
    whole = [serial(x.op, int(x.attr or 0)) for x in instrs]
    parts = "1" if any(whole) else "eager_parts(all, t.threads)"
    begin = "0" if any(whole) else "item * part"
    end = "all" if any(whole) else "shorter(item * part + part, all)"
    lines = [
        f"struct Folds{n} {{",
        *(f"  {x}" for x in declared),
        "};",
        *_feed(p, whole),
        *_range(p),
        *_block(p),
        f"static void fold{n}(const Table& t, int64_t lane, int64_t item) {{",
        "  const int64_t all = t.start[lane + 1] - t.start[lane];",
        f"  if (item >= {parts}) return;",
        *(
            ()
            if any(whole)
            else ("  const int64_t part = eager_part(all, t.threads);",)
        ),
        f"  Folds{n} f;",
        "  if (all > 0 && all <= BLOCK && t.strided[lane] < 0) {",
        f"    block{n}(t, lane, all, f);",
        "    return;",
        "  }",
        f"  range{n}(t, lane, {begin}, {end}, f, 0, 0);",
        "}",
    ]
    return [*lines, *_finish(p, declared, whole)]


def _feed(p: Folded, whole: list[bool]) -> list[str]:
    """Return code that feeds the folds of a lane with elements [begin, end).

    The pieces are the parts of eager's threads, and the runs of neighbours that eager
    would reduce.
    """
    n, count = p.n, len(p.folds)
    opens, nexts, ends = [], [], []
    for k, one in enumerate(whole):
        is_sum = p.v.instrs[p.folds[k]].op == "sum"
        opens.append(f"if (e == {'0' if one else 'first'}) f.f{k}.open();")
        unit = "unit" if is_sum else "unit && run == all"
        nexts.append(f"f.f{k}.next(length, {unit});")
        ends.append(
            f"if (e + m == {'all' if one else 'stop'}) {{ "
            f"const {p.kinds[k]} x = f.f{k}.close(); "
            f"parts[{'0' if one else 'first / part'} * {count} + {k}] = "
            f"pack({_kept_part(p, k)}); }}"
        )
    arrays = "".join(p.each(", const {kind}* y{k}"))
    return [
        f"static void feed{n}(const Table& t, int64_t lane, int64_t begin,",
        f"                    int64_t end, Folds{n}& f{arrays}) {{",
        "  const int64_t all = t.start[lane + 1] - t.start[lane];",
        "  const int64_t part = eager_part(all, t.threads);",
        f"  uint64_t* parts = t.partials + lane * t.threads * {count};",
        "  int64_t run = all;  // neighbours in the tensor that eager would reduce",
        "  bool unit = true;",
        "  if (t.strided[lane] >= 0) {",
        "    const int64_t* g = t.geometry + t.strided[lane];",
        f"    const int64_t* row = g + 1 + g[0] * {1 + len(p.slots)};",
        "    run = row[0], unit = row[1];",
        "  }",
        "  for (int64_t e = begin, m; e < end; e += m) {",
        "    const int64_t first = e / part * part;",
        "    const int64_t stop = shorter(first + part, all);",
        "    const int64_t length = shorter(run - e % run, stop - e);",
        "    m = shorter(length, end - e);",
        *(f"    {x}" for x in opens),
        "    if (e == first || e % run == 0) {",
        *(f"      {x}" for x in nexts),
        "    }",
        *p.each("    f.f{k}.feed(y{k} + (e - begin), m);"),
        *(f"    {x}" for x in ends),
        "  }",
        "}",
    ]


def _range(p: Folded) -> list[str]:
    """Return element code over [begin, end) of a lane, which feeds the folds.

    It works on a few elements at a time. Once it is this ticket's turn, it takes all,
    up to MANY.
    """
    n, slots = p.n, len(p.slots)
    flat = "".join(f", p{x.slot} + from" for x in p.slots)
    flat += "".join(p.each(", y{k}"))
    return [
        f"static void range{n}(const Table& t, int64_t lane, int64_t begin,",
        f"                     int64_t end, Folds{n}& f, Turns* turns,",
        "                     int64_t ticket) {",
        *(f"  {p.w.pointer(x.slot)}" for x in p.slots),
        *(f"  {x}" for x in rooms(p.slots)),
        *(f"  {x}" for x in p.each("alignas(64) {kind} y{k}[MANY];")),
        "  const bool flat = t.strided[lane] < 0;",
        *_direct(p),
        "  const int64_t none[] = {1, 1};",
        "  const int64_t* g = flat ? none : t.geometry + t.strided[lane];",
        f"  Walk<{slots}> walk(flat ? 0 : g[0], g + 1, g + 1 + g[0]);",
        "  if (!flat) walk.seek(begin);",
        "  const int64_t most = turns ? MANY : SOME - GATHERED;",
        "  for (int64_t from = begin, e; from < end; from = e) {",
        "    if (flat) {",
        "      // short pieces: the next one's loads begin while this one is added",
        "      e = turns ? end : shorter(from + BLOCK, end);",
        f"      piece{n}(t, lane, from, e - from{flat});",
        "    } else {",
        "      e = from;",
        "      for (int64_t m; e < end && e - from <= most; e += m) {",
        "        m = walk.take(end - e);",
        *(f"        {x}" for x in p.block("walk", "e", "m", " + (e - from)")),
        "        walk.advance(m);",
        "      }",
        "    }",
        "    if (turns) turns->wait(ticket);",
        f"    feed{n}(t, lane, from, e, f{''.join(p.each(', y{k}'))});",
        "  }",
        "  if (turns) turns->pass(ticket);",
        "}",
    ]


def _direct(p: Folded) -> list[str]:
    """Return code that folds neighbours where they lie, if nothing else is done to
    them.

    Threads that fold in turns bring them to their caches before their turn.
    """
    slots = p.v.slots
    if any(slots[s].domain == "element" for _, s in p.v.stores):
        return []
    loads = [p.v.instrs[p.v.instrs[x].args[0]] for x in p.folds]
    for load, kind in zip(loads, p.kinds, strict=True):
        if load.op != "load" or not _lies_as(slots[int(load.attr or 0)], kind):
            return []
    given = "".join(f", p{x.attr} + begin" for x in loads)
    return [
        "  if (flat && !turns) {",
        f"    feed{p.n}(t, lane, begin, end, f{given});",
        "    return;",
        "  }",
    ]


def _lies_as(slot: Slot, kind: str) -> bool:
    """Are elements numbers of a C++ type, in memory and in registers?"""
    types = {CPP_STORAGE[slot.dtype], CPP_TYPES[slot.dtype]}
    return slot.domain == "element" and types == {kind}


def _block(p: Folded) -> list[str]:
    """Return code for a lane of neighbours in up to one block: one part, one run."""
    n, count = p.n, len(p.folds)
    given = "".join(f", p{x.slot}" for x in p.slots)
    given += "".join(p.each(", y{k}"))
    return [
        f"static void block{n}(const Table& t, int64_t lane, int64_t all, "
        f"Folds{n}& f) {{",
        *(f"  {p.w.pointer(x.slot)}" for x in p.slots),
        *(f"  {x}" for x in p.each("alignas(64) {kind} y{k}[BLOCK];")),
        f"  piece{n}(t, lane, 0, all{given});",
        f"  uint64_t* parts = t.partials + lane * t.threads * {count};",
        *p.each("  f.f{k}.open(), f.f{k}.next(all, true), f.f{k}.feed(y{k}, all);"),
        *p.each("  parts[{k}] = pack(f.f{k}.close());"),
        "}",
    ]


def _kept_part(p: Folded, k: int) -> str:
    """Return a part of a sum, in the operand's dtype while it waits in memory, as in
    eager.
    """
    instr = p.v.instrs[p.folds[k]]
    several = "all > part"
    if instr.op == "sum" and instr.attr == 1:
        return f"({several}) ? round_bf16(x) : x"
    if instr.op == "sum" and instr.attr == 2:
        return f"({several}) ? round_f16(x) : x"
    return "x"


def _finish(p: Folded, declared: list[str], whole: list[bool]) -> list[str]:
    """Return code that combines the parts of a lane in order, and runs output code."""
    n, count = p.n, len(p.folds)
    lines = [
        f"static void finish{n}(const Table& t, int64_t lane) {{",
        "  const int64_t all = t.start[lane + 1] - t.start[lane];",
        "  const int64_t parts = eager_parts(all, t.threads);",
        f"  const uint64_t* from = t.partials + lane * t.threads * {count};",
    ]
    arguments = ""
    for k, (kind, one) in enumerate(zip(p.kinds, whole, strict=True)):
        lines.append(f"  {kind} x{k} = unpack<{kind}>(from[{k}]);")
        arguments += f", &x{k}"
        if one:
            continue
        # eager adds the parts of a sum like elements, with 0 for each idle thread, and
        # folds others one after the other
        is_sum = p.v.instrs[p.folds[k]].op == "sum"
        again = f"InOrderRun<{kind}> f{k};"
        if is_sum or p.v.instrs[p.folds[k]].op in ("largest", "least"):
            again = declared[k]
        last = "t.threads" if is_sum else "parts"
        lines += [
            "  if (parts > 1) {",
            f"    {again}",
            f"    f{k}.open();",
            f"    f{k}.next({last}, true);",
            f"    for (int64_t i = 0; i < {last}; ++i) {{",
            f"      const {kind} x = i < parts ? "
            f"unpack<{kind}>(from[i * {count} + {k}]) : 0;",
            f"      f{k}.feed(&x, 1);",
            "    }",
            f"    x{k} = f{k}.close();",
            "  }",
        ]
    call = f"t, lane, {max(1, p.w.tails.every)}, 1"
    call += "".join(f", p{x.slot}" for x in p.results) + arguments
    return [
        *lines,
        "  (void)parts;",
        *(f"  {p.w.pointer(x.slot)}" for x in p.results),
        f"  output{n}({call});",
        "}",
    ]
