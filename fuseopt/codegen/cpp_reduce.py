"""The C++ of a variant with reductions: its elements are folded as they are computed.

A *piece* is a short row of elements: element code computes it, stores what it stores,
and hands what is folded to arrays, which the folds take. "full" variants fold a lane to
one number: a thread takes a part of a lane as eager's threads would, and when all are
done a last loop combines the parts and runs output code. "dims" variants fold rows or
columns: a thread takes several results, and runs output code for each when it is done.

The geometry of a "dims" lane: is it of columns; may runs be loaded as vectors; columns
of a group; a slot whose tensor is laid out as what eager reduces, without gaps, or -1;
how many runs are neighbours in what eager reduces;
number of batch dims, of reduced dims; their sizes, the number of columns; then the
strides of every element slot (batch, reduced, column) and of every output slot (batch,
column).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir import BY_ROWS, REDUCTIONS, Variant
from .cpp_folds import columns_type, run_type, serial
from .forms import CPP_TYPES as REGISTER
from .forms import LIBRARY

if TYPE_CHECKING:
    from .cpp_function import Function


class ReduceWriter:
    """Writes what cpp_function.Function does not: folds, pieces and output code."""

    def __init__(self, number: int, variant: Variant, writer: Function) -> None:
        self.w = writer
        self.n = number
        self.v = variant
        self.folds = variant.folds
        self.slots = [s for s, x in enumerate(variant.slots) if x.domain == "element"]
        self.results = [s for s, x in enumerate(variant.slots) if x.domain == "output"]
        self.kinds = [REGISTER[variant.instrs[i].dtype] for i in self.folds]

    def write(self) -> list[str]:
        full = self.v.reduction == "full"
        lines = [*self.piece(), "", *self.output(), ""]
        return [*lines, *(self.full() if full else self.dims())]

    # ------------------------------------------------------------ pieces

    def arrays(self) -> str:
        return "".join(
            f", {kind}* __restrict__ y{k}" for k, kind in enumerate(self.kinds)
        )

    def piece(self) -> list[str]:
        """Element code over a row of at most BLOCK elements."""
        v, n, w = self.v, self.n, self.w
        body = w.prologue(self.slots)
        body += w.lane_numbers(v.code, "element")
        for k, s in enumerate(self.slots):
            body.append(f"p{s} += at[{k}];")
        place = {s: f"p{s}[(i + j) * step[{k}]]" for k, s in enumerate(self.slots)}
        flat = w.blocks("0", "count", {s: f"p{s}[i + j]" for s in self.slots}, True)
        lines = [
            f"template <{'int' if len(w.tails) > 1 else 'bool'} TAIL>",
            f"static void row{n}(const Table& t, int64_t lane, const int64_t* at, "
            f"const int64_t* step, int64_t count{self.arrays()}) {{",
            *(f"  {x}" for x in body),
            "  bool unit = true;",
            f"  for (int k = 0; k < {len(self.slots)}; ++k) unit &= step[k] == 1;",
            "  if (unit) {",
            *(f"    {x}" for x in flat),
            "    return;",
            "  }",
            *(f"  {x}" for x in w.blocks("0", "count", place, False)),
            "}",
        ]
        call = ", ".join(f"y{k}" for k in range(len(self.folds)))
        head = (
            f"static void piece{n}(const Table& t, int64_t lane, int64_t e, "
            f"const int64_t* at, const int64_t* step, int64_t count{self.arrays()}) {{"
        )
        if not w.tails:
            return [
                *lines,
                head,
                f"  row{n}<false>(t, lane, at, step, count, {call});",
                "}",
            ]
        moved = ", ".join(f"y{k} + done" for k in range(len(self.folds)))
        given = f"(t, lane, here, step, m, {moved})"
        every = (1 << len(w.tails)) - 1
        return [
            *lines,
            *w.ends(),
            head,
            "  for (int64_t done = 0, stop; done < count;) {",
            f"    int tail = {every};",
            "    int64_t m = count - done;",
            "    if (e >= 0) {  // else its place in eager's loop is not known",
            f"      tail = tails{n}(t, lane, e + done, e + count, &stop);",
            "      m = stop - e - done;",
            "    }",
            f"    int64_t here[{len(self.slots)}];",
            f"    for (int k = 0; k < {len(self.slots)}; ++k)",
            "      here[k] = at[k] + done * step[k];",
            *(f"    {x}" for x in w.by_tail(f"row{n}", given)),
            "    done += m;",
            "  }",
            "}",
        ]

    # ------------------------------------------------------------ results

    def output(self) -> list[str]:
        """Output code: what becomes of one result of every fold."""
        v, w = self.v, self.w
        takes = "".join(
            f", {kind} x{i}" for kind, i in zip(self.kinds, self.folds, strict=True)
        )
        lines = [
            f"static void output{self.n}(const Table& t, int64_t lane, "
            f"const int64_t* at, int TAIL{takes}) {{",
            "  (void)TAIL;",
        ]
        body = w.prologue(self.results)
        body += w.lane_numbers(v.output_code, "output")
        for k, s in enumerate(self.results):
            body.append(f"p{s} += at[{k}];")
        for i in v.output_code:
            instr = v.instrs[i]
            if instr.op == "load":
                place = f"p{instr.attr}[0]"
                body.append(w.load(i, place))
            elif (instr.op, instr.dtype) in LIBRARY:
                body += w.call_once(i)
            elif instr.op not in ("const", "tail", *REDUCTIONS):
                body.append(w.compute(i))
        for i, s in v.stores:
            if v.slots[s].domain == "output":
                body.append(w.store(s, f"p{s}[0]", i))
        return [*lines, *(f"  {x}" for x in body), "}"]

    def late_tail(self, e: str) -> str:
        """Which tails hold for a result, as `output` takes them."""
        kinds = [int(x) & ~BY_ROWS for x in self.w.tails]
        bits = [
            f"eager_tail({e}, all, t.threads, {self.w.group(kind)}) << {k}"
            for k, kind in enumerate(kinds)
        ]
        return " | ".join(bits) if bits else "0"

    def buffers(self) -> list[str]:
        return [f"{kind} y{k}[BLOCK];" for k, kind in enumerate(self.kinds)]

    def each(self, text: str) -> list[str]:
        """A line per fold: {k} its number."""
        return [text.format(k=k) for k in range(len(self.folds))]

    def call(self) -> str:
        return "".join(f", y{k}" for k in range(len(self.folds)))

    # ------------------------------------------------------------ one number a lane

    def full(self) -> list[str]:
        v, n = self.v, self.n
        instrs = [v.instrs[i] for i in self.folds]
        own = [
            f"{run_type(x.op, kind, int(x.attr or 0))} f{k};"
            for k, (x, kind) in enumerate(zip(instrs, self.kinds, strict=True))
        ]
        whole = [serial(x.op, int(x.attr or 0)) for x in instrs]
        count = len(self.folds)
        slots = len(self.slots)
        opens, rows, ends = [], [], []
        for k, one in enumerate(whole):
            first = "first == begin" if one else "true"
            opens.append(f"if ({first}) f{k}.open();")
            unit = "unit" if instrs[k].op == "sum" else "unit && run == all"
            rows.append(f"f{k}.next(length, {unit});")
            last = "stop == end" if one else "true"
            keep = self.kept_part(k)
            ends.append(
                f"if ({last}) {{ const {self.kinds[k]} x = f{k}.close(); "
                f"parts[{'0' if one else 'first / part'} * {count} + {k}] = "
                f"pack({keep}); }}"
            )
        parts = "1" if any(whole) else "eager_parts(all, t.threads)"
        begin = "0" if any(whole) else "item * part"
        end = "all" if any(whole) else "shorter(item * part + part, all)"
        lines = [
            f"static void fold{n}(const Table& t, int64_t lane, int64_t item) {{",
            "  const int64_t all = t.start[lane + 1] - t.start[lane];",
            f"  if (item >= {parts}) return;",
            "  const int64_t part = eager_part(all, t.threads);",
            f"  uint64_t* parts = t.partials + lane * t.threads * {count};",
            f"  const int64_t begin = {begin}, end = {end};",
            *(f"  {x}" for x in own),
            *(f"  {x}" for x in self.buffers()),
            f"  int64_t at[{slots}], step[{slots}];",
            "  const bool flat = t.strided[lane] < 0;",
            "  int64_t run = all;  // neighbours in the tensor that eager would reduce",
            "  bool unit = true;",
            f"  if (!flat) operand_row(t, lane, {slots}, &run, &unit);",
            "  for (int64_t first = begin; first < end; first += part) {",
            "    const int64_t stop = shorter(first + part, end);",
            *(f"    {x}" for x in opens),
            "    for (int64_t from = first; from < stop;) {",
            "      const int64_t length = shorter(run - from % run, stop - from);",
            *(f"      {x}" for x in rows),
            "      for (int64_t e = from; e < from + length;) {",
            "        int64_t m = shorter(from + length - e, BLOCK);",
            "        if (flat) {",
            f"          for (int k = 0; k < {slots}; ++k) at[k] = e, step[k] = 1;",
            "        } else {",
            f"          m = shorter(m, locate(t, lane, e, {slots}, at, step));",
            "        }",
            f"        piece{n}(t, lane, e, at, step, m{self.call()});",
            *self.each("        f{k}.feed(y{k}, m);"),
            "        e += m;",
            "      }",
            "      from += length;",
            "    }",
            *(f"    {x}" for x in ends),
            "  }",
            "}",
        ]
        return [*lines, *self.finish(own, whole)]

    def kept_part(self, k: int) -> str:
        """A part of a sum waits in memory of the operand's dtype, as in eager."""
        instr = self.v.instrs[self.folds[k]]
        several = "end - begin < all || all > part"
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
            given += f", x{k}"
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
        zeros = ", ".join("0" for _ in self.results) or "0"
        return [
            *lines,
            f"  const int64_t at[] = {{{zeros}}};",
            "  (void)parts;",
            f"  output{n}(t, lane, at, {(1 << max(1, len(self.w.tails))) - 1}{given});",
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
            f"{columns_type(x.op, kind)} f{k};"
            for k, (x, kind) in enumerate(zip(instrs, self.kinds, strict=True))
        ]
        closed = "".join(f", f{k}.close()" for k in range(len(self.folds)))
        each_closed = "".join(f", c{k}[j]" for k in range(len(self.folds)))
        several = [
            f"const {kind}* c{k} = f{k}.close();" for k, kind in enumerate(self.kinds)
        ]
        return [
            f"static void fold{n}(const Table& t, int64_t lane, int64_t item) {{",
            f"  const Rows g(t.geometry + t.strided[lane], {slots}, {results});",
            f"  int64_t at[{slots}], step[{slots}], to[{max(results, 1)}];",
            *(f"  {x}" for x in self.buffers()),
            "  const int64_t all = g.batch() * g.columns;",
            "  if (!g.is_columns) {",
            *(f"    {x}" for x in runs),
            "    const int64_t run = g.last(), rows = g.rows_per_item();",
            "    const int64_t end = shorter((item + 1) * rows, g.batch());",
            "    for (int64_t b = item * rows; b < end; ++b) {",
            *self.each("      f{k}.open();"),
            "      for (int64_t o = 0; o < g.outer(); ++o) {",
            "        if (o % g.joined == 0) {",
            *self.each("          f{k}.next(run * g.joined, g.dense);"),
            "        }",
            "        for (int64_t e = 0; e < run; e += BLOCK) {",
            "          const int64_t m = shorter(run - e, BLOCK);",
            "          g.place(b, o, e, 0, at, step, true);",
            f"          piece{n}(t, lane, g.place_of(at), at, step, m{self.call()});",
            *self.each("          f{k}.feed(y{k}, m);"),
            "        }",
            "      }",
            "      g.result(b, 0, to);",
            f"      output{n}(t, lane, to, {self.late_tail('b')}{closed});",
            "    }",
            "    return;",
            "  }",
            *(f"  {x}" for x in columns),
            "  const int64_t tiles = g.tiles(), per = g.tiles_per_item();",
            "  const int64_t last = shorter((item + 1) * per, g.batch() * tiles);",
            "  for (int64_t tile = item * per; tile < last; ++tile) {",
            "    const int64_t b = tile / tiles;",
            "    int64_t c, m;",
            "    const bool grouped = g.tile(tile % tiles, &c, &m);",
            *self.each("    f{k}.open(grouped);"),
            *self.each("    for (int64_t j = m; j < COLUMNS; ++j) y{k}[j] = 0;"),
            "    for (int64_t o = 0; o < g.outer(); ++o) {",
            "      if (o % g.joined == 0) {",
            *self.each("        f{k}.next(g.last() * g.joined);"),
            "      }",
            "      for (int64_t e = 0; e < g.last(); ++e) {",
            "        g.place(b, o, e, c, at, step, false);",
            f"        piece{n}(t, lane, g.place_of(at), at, step, m{self.call()});",
            *self.each("        f{k}.feed(y{k});"),
            "      }",
            "    }",
            *(f"    {x}" for x in several),
            "    for (int64_t j = 0; j < m; ++j) {",
            "      g.result(b, c + j, to);",
            "      const int64_t o = b * g.columns + c + j;",
            f"      output{n}(t, lane, to, {self.late_tail('o')}{each_closed});",
            "    }",
            "  }",
            "}",
        ]
