"""C++ that folds rows or columns of a lane ("dims" variants).

A block has several of them if they are short. Output code runs over blocks of results.

The geometry of such a lane is a list of numbers:

- 1 for columns, else 0;
- 1 if runs may be loaded as vectors;
- columns of a group;
- a slot whose tensor has the dense layout of eager's operand, or -1;
- the number of neighbouring runs in eager's operand;
- the number of batch dims, and of reduced dims;
- their sizes, and the number of columns;
- the strides of every element slot (batch, reduced, column);
- the strides of every output slot (batch, column).
"""

from __future__ import annotations

from .folded import Folded
from .folds import columns_type, run_type
from .walk import gathers, scatters


def fold_rows(p: Folded) -> list[str]:
    """Return the function that folds one item of the work, and runs output code."""
    v, n = p.v, p.n
    slots, results = len(p.slots), len(p.results)
    instrs = [v.instrs[i] for i in p.folds]
    runs = [
        f"{run_type(x.op, kind, int(x.attr or 0))} f{k};"
        for k, (x, kind) in enumerate(zip(instrs, p.kinds, strict=True))
    ]
    kept = [columns_type(x.op, kind) for x, kind in zip(instrs, p.kinds, strict=True)]
    bytes_of = " + ".join(f"sizeof({kind})" for kind in kept)
    columns = [f"{kind} c{k}[WIDEST{n} / COLUMNS];" for k, kind in enumerate(kept)]
    # only code with tails needs its position in eager's loop
    whole, place, strip = "-1", "-1", "-1"
    if p.w.tails.kinds:
        whole = "g.leader"
        place = "g.leader < 0 ? -1 : walk.at(g.leader)"
        strip = "g.leader < 0 ? -1 : strip.base[g.leader]"
    lines = [
        f"static const int64_t WIDEST{n} = widest({bytes_of});",
        f"static void fold{n}(const Table& t, int64_t lane, int64_t item) {{",
        "  const int64_t* geometry = t.geometry + t.strided[lane];",
        f"  const Rows g(geometry, {slots}, t.threads, WIDEST{n});",
        *(f"  {x}" for x in p.pointers()),
        *p.each("  {kind} y{k}[GATHERED + COLUMNS] = {{0}}, r{k}[GATHERED];"),
        *(f"  {x}" for x in runs),
        *(f"  {x}" for x in columns),
        f"  Walk<{slots}> walk(g.dims, g.sizes, g.steps, {whole});",
        "  const Rows::Kept kept(g);",
        f"  Walk<{results}> results(g.batches + 1, kept.size, g.to);",
        "  const auto fill = [&](int64_t count) {",
        "    for (int64_t done = 0, n; done < count; done += n) {",
        "      n = walk.take(count - done);",
        *(f"      {x}" for x in p.block("walk", place, "n", " + done")),
        "      walk.advance(n);",
        "    }",
        "  };",
        *(f"  {x}" for x in _give(p)),
        "  const int64_t per = g.per_item();",
        "  const int64_t last = shorter((item + 1) * per, g.count());",
    ]
    feeds = p.each("f{k}.feed(y{k}, m);")
    lines += [
        "  if (!g.by_tiles()) {",
        "    int64_t b = item * per;",
        "    walk.seek(b * g.each);",
        "    if (g.small()) {",
        "      for (int64_t m; b < last; b += m) {",
        "        m = shorter(last - b, GATHERED / g.each);",
        "        fill(m * g.each);",
        *p.each("        fold_batches(g, f{k}, c{k}[0], y{k}, m, r{k});"),
        "        give(b * g.columns, m * g.columns);",
        "      }",
        "      return;",
        "    }",
        "    const int64_t first = b;",
        "    for (; b < last; ++b) {",
        *p.each("      f{k}.open();"),
        "      for (int64_t part = 0; part < g.parts; ++part) {",
        *p.each("        f{k}.next(g.length, g.dense);"),
        "        for (int64_t left = g.length, m; left > 0; left -= m) {",
        "          m = shorter(left, GATHERED);",
        "          fill(m);",
        *(f"          {x}" for x in feeds),
        "        }",
        "      }",
        *p.each("      r{k}[b - first] = f{k}.close();"),
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
        *(f"      {x}" for x in p.block("strip", strip, "m", "")),
        *p.each("      fold_row(c{k}[0], grouped, y{k}, m, r{k});"),
        "      give(b * g.columns + c, m);",
        "      continue;",
        "    }",
        "    const int64_t blocks = (m + COLUMNS - 1) / COLUMNS;",
        "    for (int64_t i = 0; i < blocks; ++i) {",
        *p.each("      c{k}[i].open(grouped);"),
        "    }",
        "    const bool narrow = m == g.columns && m <= COLUMNS;",
        "    if (narrow) walk.seek(b * g.each);",
        "    for (int64_t part = 0, row = 0; part < g.parts; ++part) {",
        "      for (int64_t i = 0; i < blocks; ++i) {",
        *p.each("        c{k}[i].next(g.length);"),
        "      }",
        "      const int64_t end = row + g.length;",
        "      for (int64_t n; narrow && row < end; row += n) {",
        "        n = shorter(end - row, GATHERED / m);",
        "        fill(n * m);",
        *p.each("        feed_rows(c{k}[0], y{k}, n, m);"),
        "      }",
        f"      Strip<{slots}> strip;",
        "      const int64_t wide = blocks * COLUMNS;",
        "      for (int64_t n; row < end; row += n) {",
        "        n = shorter(end - row, GATHERED / wide);",
        "        for (int64_t k = 0; k < n; ++k) {",
        "          g.place(b, row + k, c, &strip);",
        *(f"          {x}" for x in p.block("strip", strip, "m", " + k * wide")),
        "        }",
        "        for (int64_t i = 0; i < blocks; ++i) {",
        *p.each("          feed_rows(c{k}[i], y{k} + i * COLUMNS, n, wide);"),
        "        }",
        "      }",
        "    }",
        "    for (int64_t i = 0; i < blocks; ++i) {",
        *p.each(
            "      __builtin_memcpy(r{k} + i * COLUMNS, c{k}[i].close(), "
            "COLUMNS * sizeof(*r{k}));"
        ),
        "    }",
        "    give(b * g.columns + c, m);",
        "  }",
        "}",
    ]
    return lines


def _give(p: Folded) -> list[str]:
    """Return output code over `count` results from number e on, in arrays r."""
    n = p.n
    lines = [
        "const auto give = [&](int64_t e, int64_t count) {",
        "  results.seek(e);",
        "  for (int64_t done = 0, n; done < count; done += n, e += n) {",
        "    n = results.take(count - done);",
    ]
    tail = "0"
    if p.w.tails.kinds:
        # a block ends where the set of tails changes
        tail = "tail"
        lines += [
            "    int64_t stop;",
            f"    const int tail = late{n}(t, g.batch * g.columns, e, e + n, &stop);",
            "    n = stop - e;",
        ]
    near = "".join(f", q{x.slot}" for x in p.results)
    arrays = "".join(p.each(", r{k} + done"))
    return [
        *lines,
        *(f"    {x}" for x in gathers("results", p.results, "n")),
        f"    output{n}(t, lane, {tail}, n{near}{arrays});",
        *(f"    {x}" for x in scatters("results", p.results, "n")),
        "    results.advance(n);",
        "  }",
        "};",
    ]
