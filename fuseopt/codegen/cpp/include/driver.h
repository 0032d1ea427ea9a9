// Elements per chunk: small enough to balance, large enough to amortise its start.
static const int64_t CHUNK = 16384;

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
