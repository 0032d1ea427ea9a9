// Goes over the elements of a lane. It divides when it is set on an element, and not
// from one block to the next.
enum { TOGETHER, REPEATED, APART, NEAR };
// Elements of two or four bytes that one instruction brings into any order; 0: none is.
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
static const int64_t SHUFFLED = 16;
#elif defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__)
static const int64_t SHUFFLED = 8;
#else
static const int64_t SHUFFLED = 0;
#endif
template <int SIZE> struct Bits {
  typedef int16_t type;
};
template <> struct Bits<4> {
  typedef int32_t type;
};
template <int SLOTS> struct Walk {
  const int64_t *size, *strides;
  int64_t dims, dim;      // dimensions after `dim` lie within a block
  int64_t within, steps;  // their elements; steps along `dim` that make a block
  int64_t passed;         // elements of the block that are done
  int64_t index[64], base[SLOTS], offset[SLOTS][GATHERED];
  int kind[SLOTS];
  // for NEAR slots: where the neighbours with a block's elements lie, and the neighbour
  // of each element; `held`: their number if a block holds fewer
  int64_t around[SLOTS][GATHERED / 8], held[SLOTS];
  alignas(64) int32_t which[SLOTS][GATHERED];
  // whole: a slot of whose tensor no block may hold but neighbours, or -1
  Walk(int64_t dims_, const int64_t* size_, const int64_t* strides_, int whole = -1)
      : size(size_), strides(strides_), dims(dims_), dim(dims_ - 1), within(1) {
    if (dims == 0) return;  // a lane that needs no walk
    const int64_t* kept = whole < 0 ? 0 : strides + whole * dims;
    while (dim > 0 && within * size[dim] <= GATHERED && size[dim] &&
           (!kept || kept[dim] == within || size[dim] == 1))
      within *= size[dim--];
    steps = GATHERED / within < size[dim] ? GATHERED / within : size[dim];
    if (kept && kept[dim] != within) steps = 1;
    for (int k = 0; k < SLOTS; ++k) {
      const int64_t* own = strides + k * dims;
      bool together = true, repeated = true;
      int64_t n = 1;
      for (int64_t d = dims - 1; d >= dim; --d) {
        if (size[d] == 1) continue;
        together &= own[d] == n, repeated &= own[d] == 0, n *= size[d];
      }
      kind[k] = together ? TOGETHER : repeated ? REPEATED : APART;
      if (kind[k] == APART) list(offset[k], own);
      if (kind[k] == APART && SHUFFLED && lie_near(k)) kind[k] = NEAR;
    }
  }
  // Does each vector of a whole block come from one vector of neighbours?
  bool lie_near(int k) {
    const int64_t *o = offset[k], n = steps * within;
    int64_t top = 0;
    for (int64_t j = 0; j < n; ++j) top = o[j] > top ? o[j] : top;
    const int64_t last = top - SHUFFLED + 1;  // nothing behind the block is read
    held[k] = last < 0 ? top + 1 : 0;
    for (int64_t j = 0; j < n; j += SHUFFLED) {
      const int64_t end = j + SHUFFLED < n ? j + SHUFFLED : n;
      int64_t low = last < 0 ? 0 : last;
      for (int64_t i = j; i < end; ++i) low = o[i] < low ? o[i] : low;
      if (low < 0) return false;
      for (int64_t i = j; i < j + SHUFFLED; ++i) {
        const int64_t far = i < end ? o[i] - low : 0;
        if (far >= SHUFFLED) return false;
        which[k][i] = far;
      }
      around[k][j / SHUFFLED] = low;
    }
    return true;
  }
  template <class T, class B> void shuffle(int k, const T* p, T* room) const {
#if defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__)
    typedef int32_t Order __attribute__((vector_size(4 * SHUFFLED)));
    typedef B Vector __attribute__((vector_size(sizeof(B) * SHUFFLED)));
    const int64_t* from = around[k];
    T few[SHUFFLED] = {0};
    if (held[k]) {
      for (int64_t j = 0; j < held[k]; ++j) few[j] = p[j];
      p = few;
    }
    for (int64_t j = 0; j < steps * within; j += SHUFFLED) {
      Vector v;
      Order order;
      __builtin_memcpy(&v, p + *from++, sizeof v);
      __builtin_memcpy(&order, which[k] + j, sizeof order);
      v = __builtin_shuffle(v, __builtin_convertvector(order, Vector));
      __builtin_memcpy(room + j, &v, sizeof v);
    }
#else
    (void)k, (void)p, (void)room;
#endif
  }
  void list(int64_t* to, const int64_t* own) const {
    int64_t n = 1;
    to[0] = 0;
    for (int64_t d = dims - 1; d >= dim; --d) {
      const int64_t count = d == dim ? steps : size[d];
      for (int64_t c = 1; c < count; ++c)
        for (int64_t i = 0; i < n; ++i) to[c * n + i] = to[i] + c * own[d];
      n *= count;
    }
  }
  void seek(int64_t e) {
    passed = e % within, e /= within;
    for (int k = 0; k < SLOTS; ++k) base[k] = 0;
    for (int64_t d = dim; d >= 0; --d) {
      index[d] = e % size[d], e /= size[d];
      for (int k = 0; k < SLOTS; ++k) base[k] += index[d] * strides[k * dims + d];
    }
  }
  int64_t taken() const {  // steps of this block
    const int64_t rest = size[dim] - index[dim];
    return rest < steps ? rest : steps;
  }
  // elements that the block still has, but no more than `most`
  int64_t take(int64_t most) const {
    const int64_t n = taken() * within - passed;
    return n < most ? n : most;
  }
  void advance(int64_t n) {
    const int64_t count = taken();
    passed += n;
    if (passed < count * within) return;
    passed = 0;
    move(dim, count);
    for (int64_t d = dim; d > 0 && index[d] == size[d]; --d) {
      move(d, -size[d]);
      move(d - 1, 1);
    }
  }
  void move(int64_t d, int64_t count) {
    index[d] += count;
    for (int k = 0; k < SLOTS; ++k) base[k] += count * strides[k * dims + d];
  }
  // where the first element of what is left of the block lies in a tensor
  int64_t at(int k) const {
    if (kind[k] >= APART) return base[k] + offset[k][passed];
    return base[k] + (kind[k] == TOGETHER ? passed : 0);
  }
  // where n elements that are written lie as neighbours: in memory, or in `room`
  template <class T> T* place(int k, T* p, T* room) const {
    return kind[k] == TOGETHER ? p + base[k] + passed : room;
  }
  // the same of n elements that are read
  template <class T> T* gather(int k, T* p, T* room, int64_t n) const {
    p += base[k];
    if (kind[k] == TOGETHER) return p + passed;
    if (kind[k] == REPEATED) {
      const T x = *p;
      for (int64_t j = 0; j < n; ++j) room[j] = x;
      return room;
    }
    if constexpr (sizeof(T) == 4 || sizeof(T) == 2) {
      if (kind[k] == NEAR && n == steps * within) {
        shuffle<T, typename Bits<sizeof(T)>::type>(k, p, room);
        return room;
      }
    }
    const int64_t* from = offset[k] + passed;
    for (int64_t j = 0; j < n; ++j) room[j] = p[from[j]];
    return room;
  }
  template <class T> void scatter(int k, T* p, const T* room, int64_t n) const {
    if (kind[k] == TOGETHER) return;
    p += base[k];
    if (kind[k] == REPEATED) {
      *p = room[n - 1];
      return;
    }
    const int64_t* to = offset[k] + passed;
    for (int64_t j = 0; j < n; ++j) p[to[j]] = room[j];
  }
};
