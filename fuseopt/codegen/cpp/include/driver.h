// Elements per chunk: small enough to balance, large enough to amortise its start.
static const int64_t CHUNK = 16384;

// How many threads some variants are worth: one, if others would wait longer for one
// another than it takes.
static inline int64_t useful(const Table* tables, int from, int to, int64_t threads) {
  int64_t lanes = 0, elements = 0;
  for (int v = from; v < to; ++v) {
    lanes += tables[v].lanes;
    elements += tables[v].start[tables[v].lanes];
  }
  return elements < 2 * CHUNK && lanes < 4096 ? 1 : threads;
}

static inline int64_t lane_at(const Table& t, int64_t element) {
  int64_t low = 0, high = t.lanes;
  while (high - low > 1) {
    int64_t middle = (low + high) / 2;
    if (t.start[middle] <= element) low = middle;
    else high = middle;
  }
  return low;
}

static inline int64_t chunks_of(const Table& t) {
  return (t.start[t.lanes] + CHUNK - 1) / CHUNK;
}

template <void run(const Table&, int64_t, int64_t, int64_t)>
static inline void run_chunk(const Table& t, int64_t chunk) {
  int64_t begin = chunk * CHUNK, total = t.start[t.lanes];
  int64_t end = begin + CHUNK < total ? begin + CHUNK : total;
  for (int64_t lane = lane_at(t, begin); begin < end; ++lane) {
    int64_t first = t.start[lane], last = t.start[lane + 1];
    int64_t stop = last < end ? last : end;
    if (stop > begin) run(t, lane, begin - first, stop - first);
    begin = stop > begin ? stop : begin;
  }
}
