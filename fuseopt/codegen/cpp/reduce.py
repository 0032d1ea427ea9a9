"""The C++ of a variant with reductions: its elements are folded as they are computed.

Element code computes a block of neighbours (walk.py), stores what it stores, and
hands what is folded to arrays, which the folds take. "full" variants fold a lane to
one number: a thread takes a part of a lane as eager's threads would, and when all are
done a last loop combines the parts and runs output code. "dims" variants fold rows or
columns, several of them in a block where they are short; output code runs over blocks
of results.

The geometry of a "dims" lane: is it of columns; may runs be loaded as vectors; columns
of a group; a slot whose tensor is laid out as what eager reduces, without gaps, or -1;
how many runs are neighbours in what eager reduces;
number of batch dims, of reduced dims; their sizes, the number of columns; then the
strides of every element slot (batch, reduced, column) and of every output slot (batch,
column).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...ir.graph import REDUCTIONS, Variant
from ..optable import CPP_TYPES as REGISTER
from ..optable import LIBRARY, NARROW, library_call
from .folds import columns_type, run_type, serial
from .walk import gathers, rooms, scatters

if TYPE_CHECKING:
    from .variant import Function


def in_one_thread(variant: Variant) -> bool:
    """Does eager fold a whole lane in one thread, whatever its size?"""
    folds = (variant.instrs[i] for i in variant.folds)
    return any(serial(x.op, int(x.attr or 0)) for x in folds)


def least_to_share(variant: Variant) -> int:
    """How many threads are to share a lane that is folded in one: with 16-bit floats
    there is much to compute for each byte; wider ones keep memory busy.
    """
    dtypes = [slot.dtype for slot in variant.slots if slot.domain == "element"]
    return 2 if 2 * sum(d in NARROW for d in dtypes) > len(dtypes) else 3


class ReduceWriter:
    """Writes what variant.Function does not: folds, pieces and output code."""

    def __init__(self, number: int, variant: Variant, writer: Function) -> None:
        self.w = writer
        self.n = number
        self.v = variant
        self.folds = variant.folds
        self.slots = writer.walked("element")
        self.results = writer.walked("output")
        self.kinds = [REGISTER[variant.instrs[i].dtype] for i in self.folds]

    def write(self) -> list[str]:
        full = self.v.reduction == "full"
        arrays = "".join(
            f", {kind}* __restrict__ y{k}" for k, kind in enumerate(self.kinds)
        )
        lines = [*self.w.row(self.slots, arrays), "", *self.output(), ""]
        return [*lines, *(self.full() if full else self.dims())]

    # ------------------------------------------------------------ results

    def output(self) -> list[str]:
        """Output code: what becomes of results that are neighbours."""
        v, w, n = self.v, self.w, self.n
        asks = bool(w.tails.asked)
        given = "".join(f", {x.kind}* __restrict__ p{x.slot}" for x in self.results)
        given += "".join(f", const {kind}* y{k}" for k, kind in enumerate(self.kinds))
        body = w.prologue([]) + w.lane_numbers(v.output_code, "output")
        return [
            f"static void output{n}(const Table& t, int64_t lane, int TAIL, "
            f"int64_t count{given}) {{",
            "  (void)TAIL;",
            *(f"  {x}" for x in [*body, *self.output_loops()]),
            "}",
            *(w.tails.ends(late=True) if v.reduction == "dims" and asks else ()),
        ]

    def output_loops(self) -> list[str]:
        """One loop over the results; where there are many, calls of the library stand
        between loops, and what crosses them waits in arrays.
        """
        v, w = self.v, self.w
        many = v.reduction == "dims"
        loops: list[list[str]] = [[]]
        calls: list[list[str]] = []
        made: dict[int, int] = {}  # in which loop, or by the call before it
        waits: dict[int, None] = {}
        given: set[tuple[int, int]] = set()

        def use(x: int) -> None:
            at = len(loops) - 1
            crosses = made.get(x, at) < at or x in called
            if crosses and (at, x) not in given:
                given.add((at, x))
                waits[x] = None
                loops[at].append(f"const {self.kind(x)} x{x} = s{x}[j];")

        called: set[int] = set()
        for k, i in enumerate(self.folds):
            loops[0].append(f"const {self.kinds[k]} x{i} = y{k}[j];")
            made[i] = 0
        for i in v.output_code:
            instr = v.instrs[i]
            if (instr.op, instr.dtype) in LIBRARY and many:
                args, lines = [], []
                for a in dict.fromkeys(instr.args):
                    if a in made:
                        waits[a] = None
                    else:
                        lines.append(f"const {self.kind(a)} one{i}_{a} = {w.name(a)};")
                for a in instr.args:
                    args.append((f"s{a}", 1) if a in made else (f"&one{i}_{a}", 0))
                call = library_call(instr.op, instr.dtype, "count", args, f"s{i}")
                calls.append([*lines, call])
                loops.append([])
                made[i], waits[i] = len(loops) - 1, None
                called.add(i)
                continue
            if instr.op in ("const", "tail", *REDUCTIONS):
                continue
            for a in instr.args:
                use(a)
            made[i] = len(loops) - 1
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
        lines = [f"alignas(64) {self.kind(x)} s{x}[GATHERED];" for x in waits]
        for k, own in enumerate(loops):
            kept = [x for x in waits if made[x] == k and x not in called]
            lines += [
                *(calls[k - 1] if k else ()),
                "#pragma GCC ivdep",
                "for (int64_t j = 0; j < count; ++j) {",
                *(f"  {x}" for x in own),
                *(f"  s{x}[j] = x{x};" for x in kept),
                "}",
            ]
        return lines

    def kind(self, i: int) -> str:
        """The C++ type of an instruction's result."""
        return REGISTER[self.v.instrs[i].dtype]

    def each(self, text: str) -> list[str]:
        """A line per fold: {k} its number, {kind} its type."""
        return [text.format(k=k, kind=kind) for k, kind in enumerate(self.kinds)]

    def pointers(self) -> list[str]:
        """To all tensors, and memory for a block of each."""
        slots = [*self.slots, *self.results]
        return [*(self.w.pointer(x.slot) for x in slots), *rooms(slots)]

    def block(self, walk: str, e: str, n: str, done: str) -> list[str]:
        """Element code over n elements where `walk` stands; e: the first one's place in
        eager's loop. What is folded goes to the arrays, from `done` on.
        """
        near = "".join(f", q{x.slot}" for x in self.slots)
        arrays = "".join(self.each(f", y{{k}}{done}"))
        return [
            *gathers(walk, self.slots, n),
            f"piece{self.n}(t, lane, {e}, {n}{near}{arrays});",
            *scatters(walk, self.slots, n),
        ]

    # ------------------------------------------------------------ one number a lane

    def full(self) -> list[str]:
        """The folds of a lane; element code and feeding over a range of it; and the
        range that a thread has.
        """
        v, n = self.v, self.n
        instrs = [v.instrs[i] for i in self.folds]
        own = [
            f"{run_type(x.op, kind, int(x.attr or 0))} f{k};"
            for k, (x, kind) in enumerate(zip(instrs, self.kinds, strict=True))
        ]
        whole = [serial(x.op, int(x.attr or 0)) for x in instrs]
        parts = "1" if any(whole) else "eager_parts(all, t.threads)"
        begin = "0" if any(whole) else "item * part"
        end = "all" if any(whole) else "shorter(item * part + part, all)"
        lines = [
            f"struct Folds{n} {{",
            *(f"  {x}" for x in own),
            "};",
            *self.feed(whole),
            *self.range(),
            f"static void fold{n}(const Table& t, int64_t lane, int64_t item) {{",
            "  const int64_t all = t.start[lane + 1] - t.start[lane];",
            f"  if (item >= {parts}) return;",
            *(
                ()
                if any(whole)
                else ("  const int64_t part = eager_part(all, t.threads);",)
            ),
            f"  Folds{n} f;",
            f"  range{n}(t, lane, {begin}, {end}, f, 0, 0);",
            "}",
        ]
        return [*lines, *self.finish(own, whole)]

    def feed(self, whole: list[bool]) -> list[str]:
        """Hand to the folds of a lane what was made of elements [begin, end), in the
        parts of eager's threads and the runs of neighbours that eager would reduce.
        """
        n, count = self.n, len(self.folds)
        opens, nexts, ends = [], [], []
        for k, one in enumerate(whole):
            is_sum = self.v.instrs[self.folds[k]].op == "sum"
            opens.append(f"if (e == {'0' if one else 'first'}) f.f{k}.open();")
            unit = "unit" if is_sum else "unit && run == all"
            nexts.append(f"f.f{k}.next(length, {unit});")
            ends.append(
                f"if (e + m == {'all' if one else 'stop'}) {{ "
                f"const {self.kinds[k]} x = f.f{k}.close(); "
                f"parts[{'0' if one else 'first / part'} * {count} + {k}] = "
                f"pack({self.kept_part(k)}); }}"
            )
        arrays = "".join(self.each(", const {kind}* y{k}"))
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
            f"    const int64_t* row = g + 1 + g[0] * {1 + len(self.slots)};",
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
            *self.each("    f.f{k}.feed(y{k} + (e - begin), m);"),
            *(f"    {x}" for x in ends),
            "  }",
            "}",
        ]

    def range(self) -> list[str]:
        """Element code over [begin, end) of a lane, and what it makes to the folds: a
        few elements at a time, or all, MANY at most, once it is this ticket's turn.
        """
        n, slots = self.n, len(self.slots)
        flat = "".join(f", p{x.slot} + from" for x in self.slots)
        flat += "".join(self.each(", y{k}"))
        return [
            f"static void range{n}(const Table& t, int64_t lane, int64_t begin,",
            f"                     int64_t end, Folds{n}& f, Turns* turns,",
            "                     int64_t ticket) {",
            *(f"  {self.w.pointer(x.slot)}" for x in self.slots),
            *(f"  {x}" for x in rooms(self.slots)),
            *(f"  {x}" for x in self.each("alignas(64) {kind} y{k}[MANY];")),
            "  const bool flat = t.strided[lane] < 0;",
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
            *(f"        {x}" for x in self.block("walk", "e", "m", " + (e - from)")),
            "        walk.advance(m);",
            "      }",
            "    }",
            "    if (turns) turns->wait(ticket);",
            f"    feed{n}(t, lane, from, e, f{''.join(self.each(', y{k}'))});",
            "  }",
            "  if (turns) turns->pass(ticket);",
            "}",
        ]

    def kept_part(self, k: int) -> str:
        """A part of a sum waits in memory of the operand's dtype, as in eager."""
        instr = self.v.instrs[self.folds[k]]
        several = "all > part"
        if instr.op == "sum" and instr.attr == 1:
            return f"({several}) ? round_bf16(x) : x"
        if instr.op == "sum" and instr.attr == 2:
            return f"({several}) ? round_f16(x) : x"
        return "x"

    def finish(self, own: list[str], whole: list[bool]) -> list[str]:
        """Combine the parts of a lane, in their order, and run output code."""
        n, count = self.n, len(self.folds)
        lines = [
            f"static void finish{n}(const Table& t, int64_t lane) {{",
            "  const int64_t all = t.start[lane + 1] - t.start[lane];",
            "  const int64_t parts = eager_parts(all, t.threads);",
            f"  const uint64_t* from = t.partials + lane * t.threads * {count};",
        ]
        given = ""
        for k, (kind, one) in enumerate(zip(self.kinds, whole, strict=True)):
            lines.append(f"  {kind} x{k} = unpack<{kind}>(from[{k}]);")
            given += f", &x{k}"
            if one:
                continue
            # eager adds the parts of a sum as it adds elements, with 0 for each idle
            # thread, and others one after the other
            is_sum = self.v.instrs[self.folds[k]].op == "sum"
            again = f"InOrderRun<{kind}> f{k};"
            if is_sum or self.v.instrs[self.folds[k]].op in ("largest", "least"):
                again = own[k]
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
        call = f"t, lane, {max(1, self.w.tails.every)}, 1"
        call += "".join(f", p{x.slot}" for x in self.results) + given
        return [
            *lines,
            "  (void)parts;",
            *(f"  {self.w.pointer(x.slot)}" for x in self.results),
            f"  output{n}({call});",
            "}",
        ]

    # ------------------------------------------------------------ rows and columns

    def dims(self) -> list[str]:
        v, n = self.v, self.n
        slots, results = len(self.slots), len(self.results)
        instrs = [v.instrs[i] for i in self.folds]
        runs = [
            f"{run_type(x.op, kind, int(x.attr or 0))} f{k};"
            for k, (x, kind) in enumerate(zip(instrs, self.kinds, strict=True))
        ]
        columns = [
            f"{columns_type(x.op, kind)} c{k}[BLOCK / COLUMNS];"
            for k, (x, kind) in enumerate(zip(instrs, self.kinds, strict=True))
        ]
        # only what asks for tails has to know where it is in eager's loop
        whole, place, strip = "-1", "-1", "-1"
        if self.w.tails.asked:
            whole = "g.leader"
            place = "g.leader < 0 ? -1 : walk.at(g.leader)"
            strip = "g.leader < 0 ? -1 : strip.base[g.leader]"
        lines = [
            f"static void fold{n}(const Table& t, int64_t lane, int64_t item) {{",
            f"  const Rows g(t.geometry + t.strided[lane], {slots}, t.threads);",
            *(f"  {x}" for x in self.pointers()),
            *self.each("  {kind} y{k}[GATHERED + COLUMNS] = {{0}}, r{k}[GATHERED];"),
            *(f"  {x}" for x in runs),
            *(f"  {x}" for x in columns),
            f"  Walk<{slots}> walk(g.dims, g.sizes, g.steps, {whole});",
            "  const Rows::Kept kept(g);",
            f"  Walk<{results}> results(g.batches + 1, kept.size, g.to);",
            "  const auto fill = [&](int64_t count) {",
            "    for (int64_t done = 0, n; done < count; done += n) {",
            "      n = walk.take(count - done);",
            *(f"      {x}" for x in self.block("walk", place, "n", " + done")),
            "      walk.advance(n);",
            "    }",
            "  };",
            *(f"  {x}" for x in self.give()),
            "  const int64_t per = g.per_item();",
            "  const int64_t last = shorter((item + 1) * per, g.count());",
        ]
        feeds = self.each("f{k}.feed(y{k}, m);")
        lines += [
            "  if (!g.by_tiles()) {",
            "    int64_t b = item * per;",
            "    walk.seek(b * g.each);",
            "    if (g.small()) {",
            "      for (int64_t m; b < last; b += m) {",
            "        m = shorter(last - b, GATHERED / g.each);",
            "        fill(m * g.each);",
            *self.each("        fold_batches(g, f{k}, c{k}[0], y{k}, m, r{k});"),
            "        give(b * g.columns, m * g.columns);",
            "      }",
            "      return;",
            "    }",
            "    const int64_t first = b;",
            "    for (; b < last; ++b) {",
            *self.each("      f{k}.open();"),
            "      for (int64_t part = 0; part < g.parts; ++part) {",
            *self.each("        f{k}.next(g.length, g.dense);"),
            "        for (int64_t left = g.length, m; left > 0; left -= m) {",
            "          m = shorter(left, GATHERED);",
            "          fill(m);",
            *(f"          {x}" for x in feeds),
            "        }",
            "      }",
            *self.each("      r{k}[b - first] = f{k}.close();"),
            "    }",
            "    give(first, last - first);",
            "    return;",
            "  }",
            "  const int64_t tiles = g.tiles();",
            "  for (int64_t tile = item * per; tile < last; ++tile) {",
            "    const int64_t b = tile / tiles;",
            "    int64_t c, m;",
            "    const bool grouped = g.tile(tile % tiles, &c, &m);",
            "    if (g.folded_rows() == 1) {  // nothing meets",
            f"      Strip<{slots}> strip;",
            "      g.place(b, 0, c, &strip);",
            *(f"      {x}" for x in self.block("strip", strip, "m", "")),
            *self.each("      fold_row(c{k}[0], grouped, y{k}, m, r{k});"),
            "      give(b * g.columns + c, m);",
            "      continue;",
            "    }",
            "    const int64_t blocks = (m + COLUMNS - 1) / COLUMNS;",
            "    for (int64_t i = 0; i < blocks; ++i) {",
            *self.each("      c{k}[i].open(grouped);"),
            "    }",
            "    const bool narrow = m == g.columns && m <= COLUMNS;",
            "    if (narrow) walk.seek(b * g.each);",
            "    for (int64_t part = 0, row = 0; part < g.parts; ++part) {",
            "      for (int64_t i = 0; i < blocks; ++i) {",
            *self.each("        c{k}[i].next(g.length);"),
            "      }",
            "      const int64_t end = row + g.length;",
            "      for (int64_t n; narrow && row < end; row += n) {",
            "        n = shorter(end - row, GATHERED / m);",
            "        fill(n * m);",
            *self.each("        feed_rows(c{k}[0], y{k}, n, m);"),
            "      }",
            f"      Strip<{slots}> strip;",
            "      const int64_t wide = blocks * COLUMNS;",
            "      for (int64_t n; row < end; row += n) {",
            "        n = shorter(end - row, GATHERED / wide);",
            "        for (int64_t k = 0; k < n; ++k) {",
            "          g.place(b, row + k, c, &strip);",
            *(f"          {x}" for x in self.block("strip", strip, "m", " + k * wide")),
            "        }",
            "        for (int64_t i = 0; i < blocks; ++i) {",
            *self.each("          feed_rows(c{k}[i], y{k} + i * COLUMNS, n, wide);"),
            "        }",
            "      }",
            "    }",
            "    for (int64_t i = 0; i < blocks; ++i) {",
            *self.each(
                "      __builtin_memcpy(r{k} + i * COLUMNS, c{k}[i].close(), "
                "COLUMNS * sizeof(*r{k}));"
            ),
            "    }",
            "    give(b * g.columns + c, m);",
            "  }",
            "}",
        ]
        return lines

    def give(self) -> list[str]:
        """Output code over `count` results from number e on, which are in arrays r."""
        n = self.n
        lines = [
            "const auto give = [&](int64_t e, int64_t count) {",
            "  results.seek(e);",
            "  for (int64_t done = 0, n; done < count; done += n, e += n) {",
            "    n = results.take(count - done);",
        ]
        tail = "0"
        if self.w.tails.asked:
            # a block ends where another tail begins
            tail = "tail"
            lines += [
                "    int64_t stop;",
                "    const int tail ="
                f" late{n}(t, g.batch * g.columns, e, e + n, &stop);",
                "    n = stop - e;",
            ]
        near = "".join(f", q{x.slot}" for x in self.results)
        arrays = "".join(self.each(", r{k} + done"))
        return [
            *lines,
            *(f"    {x}" for x in gathers("results", self.results, "n")),
            f"    output{n}(t, lane, {tail}, n{near}{arrays});",
            *(f"    {x}" for x in scatters("results", self.results, "n")),
            "    results.advance(n);",
            "  }",
            "};",
        ]
