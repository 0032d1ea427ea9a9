static inline int64_t shares(const Table& t) { return t.lanes * t.threads; }
template <void fold(const Table&, int64_t, int64_t)>
static inline void fold_part(const Table& t, int64_t k) {
  fold(t, k / t.threads, k % t.threads);
}
// Where eager folds a whole lane in one thread, threads share what is computed for its
// elements, and take turns at the fold. That keeps up with the arithmetic of a few
// threads: with more of them, only lanes that are most of all are better shared. And
// where one thread is as fast as memory is, two are not faster: `least` begin to share.
static inline bool is_shared(const Table& t, int64_t lane, int64_t least) {
  const int64_t n = t.start[lane + 1] - t.start[lane];
  return t.threads >= least && n > 2 * MANY &&
         n * (t.threads < 4 ? 16 : 4) > t.start[t.lanes];
}
template <void fold(const Table&, int64_t, int64_t)>
static inline void fold_lane(const Table& t, int64_t lane, int64_t least) {
  if (!is_shared(t, lane, least)) fold(t, lane, 0);
}
template <class Folds,
          void range(const Table&, int64_t, int64_t, int64_t, Folds&, Turns*, int64_t)>
static inline void fold_shared(const Table& t, int64_t least, Turns& turns,
                               Folds& folds) {
  int64_t ticket = -1;
  for (int64_t lane = 0, first = 0, until; lane < t.lanes; ++lane) {
    if (!is_shared(t, lane, least)) continue;
    const int64_t all = t.start[lane + 1] - t.start[lane];
    if (ticket < 0) ticket = turns.take();
    for (until = first + (all + MANY - 1) / MANY; ticket < until;) {
      const int64_t begin = (ticket - first) * MANY, end = shorter(begin + MANY, all);
      range(t, lane, begin, end, folds, &turns, ticket);
      ticket = turns.take();
    }
    first = until;
  }
}
template <void fold(const Table&, int64_t, int64_t), int64_t WIDEST>
static inline void fold_items(const Table& t, int64_t k) {
  const int64_t lane = k / t.threads, share = k % t.threads;
  const int64_t items =
      Rows(t.geometry + t.strided[lane], 0, t.threads, WIDEST).items();
  for (int64_t i = share * items / t.threads; i < (share + 1) * items / t.threads; ++i)
    fold(t, lane, i);
}
