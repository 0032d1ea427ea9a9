// Rows of elements that lie at equal steps; the interface of Walk.
template <int SLOTS> struct Strip {
  int64_t base[SLOTS], step[SLOTS];
  template <class T> T* place(int k, T* p, T* room) const {
    return step[k] == 1 ? p + base[k] : room;
  }
  template <class T> T* gather(int k, T* p, T* room, int64_t n) const {
    p += base[k];
    if (step[k] == 1) return p;
    for (int64_t j = 0; j < n; ++j) room[j] = p[j * step[k]];
    return room;
  }
  template <class T> void scatter(int k, T* p, const T* room, int64_t n) const {
    if (step[k] == 1) return;
    for (int64_t j = 0; j < n; ++j) p[base[k] + j * step[k]] = room[j];
  }
};

// The most columns that are folded side by side: what is kept of them, `bytes` of
// COLUMNS of them, fits in the first-level cache. Wide rows are read as fast as memory
// is.
static constexpr int64_t widest(int64_t bytes) {
  const int64_t n = 16384 / bytes * COLUMNS;
  return n < BLOCK ? BLOCK : n < GATHERED ? n : GATHERED;
}

// The geometry of a lane whose rows or columns are folded. What is folded to one row of
// results is a batch; it has `each` elements in `parts` runs of `length` rows.
struct Rows {
  bool is_columns, dense;
  int64_t leader, group, batches, folded, columns, dims, last, parts, length, each;
  int64_t batch, width;
  const int64_t *sizes, *steps, *to;
  Rows(const int64_t* g, int64_t slots, int64_t threads, int64_t most)
      : is_columns(g[0]),
        dense(g[1]),
        leader(g[3]),
        group(g[2]),
        batches(g[5]),
        folded(g[6]),
        dims(g[5] + g[6] + 1),
        sizes(g + 7),
        steps(g + 7 + dims),
        to(steps + slots * dims) {
    columns = sizes[dims - 1], last = sizes[dims - 2];
    const int64_t outer = product(batches, dims - 2);
    parts = outer / g[4], length = last * g[4];
    each = outer * last * columns, batch = product(0, batches);
    // columns side by side: tiles of like widths, and something for each thread
    const int64_t share = (columns + threads - 1) / threads;
    const int64_t tiles = share > most ? (share + most - 1) / most : 1;
    width = (share + tiles * COLUMNS - 1) / (tiles * COLUMNS) * COLUMNS;
    width = width < COLUMNS ? COLUMNS : shorter(width, most);
  }
  int64_t product(int64_t from, int64_t until) const {
    int64_t n = 1;
    for (int64_t d = from; d < until; ++d) n *= sizes[d];
    return n;
  }
  // may a block hold batches?
  bool small() const { return each <= BLOCK; }
  int64_t folded_rows() const { return parts * length; }
  bool by_tiles() const { return is_columns && !small(); }
  int64_t per_item() const {
    const int64_t one = by_tiles() ? each / columns * width : each;
    return one < 16384 ? 16384 / one : 1;
  }
  int64_t count() const { return by_tiles() ? batch * tiles() : batch; }
  int64_t items() const { return (count() + per_item() - 1) / per_item(); }
  int64_t border() const { return group ? columns / group * group : 0; }
  int64_t tiles_of(int64_t n) const { return (n + width - 1) / width; }
  int64_t tiles() const { return tiles_of(border()) + tiles_of(columns - border()); }
  // columns [c, c + m) of a tile; does eager fold them in a group?
  bool tile(int64_t k, int64_t* c, int64_t* m) const {
    const int64_t edge = border(), grouped = tiles_of(edge);
    *c = k < grouped ? k * width : edge + (k - grouped) * width;
    *m = shorter(width, (k < grouped ? edge : columns) - *c);
    return k < grouped;
  }
  // column c of row `row` of those that are folded
  template <int SLOTS>
  void place(int64_t b, int64_t row, int64_t c, Strip<SLOTS>* strip) const {
    for (int k = 0; k < SLOTS; ++k) {
      strip->step[k] = steps[k * dims + dims - 1];
      strip->base[k] = c * strip->step[k];
    }
    for (int64_t d = dims - 2; d >= 0; --d) {
      int64_t& rest = d < batches ? b : row;
      const int64_t i = rest % sizes[d];
      rest /= sizes[d];
      for (int k = 0; k < SLOTS; ++k) strip->base[k] += i * steps[k * dims + d];
    }
  }
  // the dimensions of results
  struct Kept {
    int64_t size[64];
    Kept(const Rows& g) {
      for (int64_t d = 0; d < g.batches; ++d) size[d] = g.sizes[d];
      size[g.batches] = g.columns;
    }
  };
};

// Folds m rows of N elements, or m times N rows of columns. N is a constant, so a
// compiler adds the N elements side by side.
template <int64_t N, class R, class T>
static inline void fold_rows(bool dense, const T* x, int64_t m, T* to) {
#pragma GCC ivdep
  for (int64_t b = 0; b < m; ++b) to[b] = R::of(x + b * N, N, dense);
}
template <int64_t N, int64_t C, class F, class T>
static inline void fold_columns(bool grouped, const T* x, int64_t m, T* to) {
#pragma GCC ivdep
  for (int64_t b = 0; b < m; ++b)
    for (int64_t c = 0; c < C; ++c)
      to[b * C + c] = F::of(x + b * N * C + c, N, C, grouped);
}

// The same of one row of m columns.
template <class C, class T>
static inline void fold_row(const C&, bool grouped, const T* x, int64_t m, T* to) {
#pragma GCC ivdep
  for (int64_t j = 0; j < m; ++j) to[j] = C::of(x + j, 1, 1, grouped);
}

// Folds m batches of elements, a block of them, to rows of results.
template <class R, class C, class T>
static inline void fold_batches(const Rows& g, R& run, C& column, const T* x, int64_t m,
                                T* to) {
  const int64_t n = g.length;
  if (!g.is_columns && g.parts == 1 && R::few(n, g.dense)) {
    if (n == 1) return fold_rows<1, R>(g.dense, x, m, to);
    if (n == 2) return fold_rows<2, R>(g.dense, x, m, to);
    if (n == 3) return fold_rows<3, R>(g.dense, x, m, to);
    if (n == 4) return fold_rows<4, R>(g.dense, x, m, to);
    if (n == 5) return fold_rows<5, R>(g.dense, x, m, to);
    if (n == 7) return fold_rows<7, R>(g.dense, x, m, to);
    for (int64_t b = 0; b < m; ++b) to[b] = R::of(x + b * n, n, g.dense);
    return;
  }
  const bool one = g.parts == 1 && (g.border() == 0 || g.border() == g.columns);
  if (one && g.columns == n && C::few(n, g.border() > 0)) {
    const bool grouped = g.border() > 0;
    if (n == 1) return fold_columns<1, 1, C>(grouped, x, m, to);
    if (n == 3) return fold_columns<3, 3, C>(grouped, x, m, to);
    if (n == 5) return fold_columns<5, 5, C>(grouped, x, m, to);
  }
  for (int64_t b = 0; b < m; ++b, x += g.each, to += g.columns) {
    if (!g.is_columns) {
      run.open();
      for (int64_t k = 0; k < g.parts; ++k)
        run.next(n, g.dense), run.feed(x + k * n, n);
      *to = run.close();
      continue;
    }
    const int64_t border = g.border();
    if (g.parts == 1 && C::few(n, border > 0)) {
      for (int64_t c = 0; c < g.columns; ++c)
        to[c] = C::of(x + c, n, g.columns, c < border);
      continue;
    }
    for (int64_t c = 0, count; c < g.columns; c += count) {
      count = shorter(COLUMNS, (c < border ? border : g.columns) - c);
      column.open(c < border);
      for (int64_t k = 0; k < g.parts; ++k) {
        column.next(n);
        for (int64_t i = 0; i < n; ++i) column.feed(x + (k * n + i) * g.columns + c);
      }
      const T* sums = column.close();
      for (int64_t j = 0; j < count; ++j) to[c + j] = sums[j];
    }
  }
}
