// Bytes of a vector register in eager's reductions: on any x86 processor, and NEON's.
#ifdef __aarch64__
static const int64_t REGISTER = 16;
#else
static const int64_t REGISTER = 32;
#endif
// Results folded side by side where the reduced dimension is not the innermost.
static const int64_t COLUMNS = 32;
// Elements that are computed before they are folded. SOME fit in the first-level cache.
// Threads that fold in turns compute MANY, so that there are few turns.
static const int64_t SOME = 1152, MANY = 16384;
// How far ahead of a chain of sums memory is read, in bytes.
static const int64_t AHEAD = 2048;
enum { NATIVE, FROM_BF16, FROM_F16 };

static inline int64_t shorter(int64_t a, int64_t b) { return a < b ? a : b; }
static inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double fused(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}

// Adds the square of x. Processors of aarch64 have the fused instruction, and eager's
// compiler takes it there.
template <class T> static inline T squared(T x, T sum) {
#ifdef __aarch64__
  return fused(x, x, sum);
#else
  return sum + x * x;
#endif
}

// Adds a sequence of vectors of V numbers. ROWS sums take turns, each in four levels: a
// level is added to the next after so many vectors that numbers of like size meet.
// Levels after `top` are zeros, neither written nor added: no sum here is -0, and only
// that would be changed by a zero.
template <class T, int ROWS, int V> struct Cascade {
  T level[4][ROWS][V];
  int64_t seen, whole, power;
  int top;
  bool open;
  void begin(int64_t size) {
    seen = 0, whole = size / ROWS * ROWS, open = true;
    int64_t bits = 0;
    while ((int64_t(1) << bits) < size / ROWS) ++bits;
    power = bits / 4 > 4 ? bits / 4 : 4;
    top = 0;
    __builtin_memset(level, 0, sizeof level[0]);
  }
  void close() {
    open = false;
    for (int k = 1; k <= top; ++k)
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < V; ++v) level[0][r][v] += level[k][r][v];
  }
  void add(const T* x) {
    if (seen == whole && open) close();
    T* sums = level[0][seen < whole ? seen % ROWS : 0];
    for (int v = 0; v < V; ++v) sums[v] += x[v];
    if (++seen <= whole && seen % ROWS == 0) carry();
  }
  // n vectors, one behind the other
  void add(const T* x, int64_t n) {
    for (int64_t turns; n > 0; n -= turns * ROWS, x += turns * ROWS * V) {
      const int64_t turn = seen / ROWS, mask = (int64_t(1) << power) - 1;
      turns = shorter(mask + 1 - (turn & mask), shorter(n, whole - seen) / ROWS);
      if (seen % ROWS || turns <= 0) {
        add(x);
        x += V, --n, turns = 0;
        continue;
      }
      T sums[ROWS * V];
      __builtin_memcpy(sums, level, sizeof sums);
      for (int64_t k = 0; k < turns; ++k)
        for (int v = 0; v < ROWS * V; ++v) sums[v] += x[k * ROWS * V + v];
      __builtin_memcpy(level, sums, sizeof sums);
      seen += turns * ROWS;
      carry();
    }
  }
  // n vectors, `step` numbers apart
  void add(const T* x, int64_t n, int64_t step) {
    if (ROWS > 1) {
      for (; n > 0; --n, x += step) add(x);
      return;
    }
    for (int64_t turns; n > 0; n -= turns, x += turns * step) {
      const int64_t mask = (int64_t(1) << power) - 1;
      turns = shorter(mask + 1 - (seen & mask), n);
      T sums[V];
      __builtin_memcpy(sums, level, sizeof sums);
      for (int64_t k = 0; k < turns; ++k)
        for (int v = 0; v < V; ++v) sums[v] += x[k * step + v];
      __builtin_memcpy(level, sums, sizeof sums);
      seen += turns;
      carry();
    }
  }
  void carry() {
    const int64_t turn = seen / ROWS, mask = (int64_t(1) << power) - 1;
    if (turn & mask) return;
    for (int k = 1; k < 4; ++k) {
      if (k > top) {
        top = k;
        __builtin_memset(level[k], 0, sizeof level[k]);
      }
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < V; ++v) {
          level[k][r][v] += level[k - 1][r][v];
          level[k - 1][r][v] = 0;
        }
      if (turn & (mask << (k * power))) break;
    }
  }
  const T* result() {
    if (open) close();
    for (int r = 1; r < ROWS; ++r)
      for (int v = 0; v < V; ++v) level[0][0][v] += level[0][r][v];
    return level[0][0];
  }
};

// What Cascade<T, 4, 1> makes of so few numbers that no level is full.
template <class T> static inline T few_in_turns(const T* x, int64_t n, int64_t step) {
  T sums[4] = {0};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int r = 0; r < 4; ++r) sums[r] += x[(i + r) * step];
  for (; i < n; ++i) sums[0] += x[i * step];
  return n < 4 ? sums[0] : sums[0] + sums[1] + sums[2] + sums[3];
}

// `few` returns whether `of` may fold n contiguous numbers at once.
template <class T, int FROM> struct SumRun {
  static const int W = REGISTER / sizeof(T);
  static const int E = FROM == NATIVE ? W : 2 * W;  // numbers in one load
  Cascade<T, 4, W> vectors;
  Cascade<T, 4, 1> singles;
  T held[E], total;
  int count;
  bool wide, started;
  static bool few(int64_t n, bool dense) { return n < 64 || (dense && n <= BLOCK); }
  static T of(const T* x, int64_t n, bool dense) {
    if (!dense || n < E) return few_in_turns(x, n, 1);
    T sums[4][W] = {{0}}, sum = 0;
    const int64_t count = n / E;
    for (int64_t i = 0; i < count; ++i) {
      T* to = sums[i < count / 4 * 4 ? i % 4 : 0];
      for (int k = 0; k < W; ++k)
        to[k] += FROM == NATIVE ? x[i * E + k] : x[i * E + k] + x[i * E + W + k];
    }
    for (int64_t i = count * E; i < n; ++i) sum += x[i];
    for (int k = 0; k < W; ++k)
      sum += sums[0][k] + sums[1][k] + sums[2][k] + sums[3][k];
    return sum;
  }
  void open() { total = 0, started = false; }
  // n numbers follow; `dense`: they are neighbours in eager's operand
  void next(int64_t n, bool dense) {
    if (started) total += part();
    started = true, count = 0, wide = dense && n >= E;
    if (wide) vectors.begin(n / E);
    else singles.begin(n);
  }
  void load(const T* x) {
    T v[W];
    for (int k = 0; k < W; ++k) v[k] = FROM == NATIVE ? x[k] : x[k] + x[W + k];
    vectors.add(v);
  }
  void feed(const T* x, int64_t n) {
    if (!wide) {
      for (int64_t i = 0; i < n; ++i) singles.add(x + i);
      return;
    }
    for (; n > 0 && count; --n) {
      held[count++] = *x++;
      if (count == E) load(held), count = 0;
    }
    if (FROM == NATIVE) vectors.add(x, n / W), x += n / W * W, n %= W;
    for (; n >= E; x += E, n -= E) load(x);
    for (; n > 0; --n) held[count++] = *x++;
  }
  T part() {
    if (!wide) return *singles.result();
    T sum = 0;
    for (int k = 0; k < count; ++k) sum += held[k];
    const T* lanes = vectors.result();
    for (int k = 0; k < W; ++k) sum += lanes[k];
    return sum;
  }
  T close() { return total + part(); }
};

template <class T, int FROM> struct SquaresRun {
  static const int W = REGISTER / sizeof(T);
  static const int E = FROM == FROM_BF16 ? 2 * W : W;
  T lanes[W], held[E], total;
  int count;
  bool wide, started;
  static bool few(int64_t n, bool dense) { return n < W || !dense || FROM == FROM_F16; }
  static T of(const T* x, int64_t n, bool dense) {
    const int64_t plain = dense && FROM != FROM_F16 ? n / 4 * 4 : n;
    T sum = 0;
    for (int64_t i = 0; i < plain; ++i) sum = squared(x[i], sum);
    for (int64_t i = plain; i < n; ++i) sum = fused(x[i], x[i], sum);
    return sum;
  }
  void open() { total = 0, count = 0, started = false; }
  void next(int64_t, bool dense) {
    if (started) return;
    started = true, wide = dense && FROM != FROM_F16;
    for (int k = 0; k < W; ++k) lanes[k] = 0;
  }
  // n numbers, of which E are one load. The sums are in a register. As x may alias
  // `lanes`, a compiler would write and read `lanes` at each load.
  void load(const T* x, int64_t n) {
    typedef T Register __attribute__((vector_size(REGISTER)));
    Register sums, own;
    __builtin_memcpy(&sums, lanes, sizeof sums);
    for (const T* end = x + n; x < end; x += W) {
      __builtin_prefetch((const char*)x + AHEAD);
      __builtin_memcpy(&own, x, sizeof own);
#ifdef __aarch64__
      for (int k = 0; k < W; ++k) sums[k] = fused(own[k], own[k], sums[k]);
#else
      sums += own * own;
#endif
    }
    __builtin_memcpy(lanes, &sums, sizeof sums);
  }
  void feed(const T* x, int64_t n) {
    if (!wide) {
      T sum = total;
      for (int64_t i = 0; i < n; ++i) sum = squared(x[i], sum);
      total = sum;
      return;
    }
    for (; n > 0 && count; --n) {
      held[count++] = *x++;
      if (count == E) load(held, E), count = 0;
    }
    const int64_t loads = n / E * E;
    load(x, loads), x += loads, n -= loads;
    for (; n > 0; --n) held[count++] = *x++;
  }
  T close() {
    if (!wide) return total;
    T sum = lanes[0];
    for (int k = 1; k < W; ++k) sum += lanes[k];
    // eager's compiler took what is left over by four, and contracted the rest
    for (int k = 0; k < count; ++k)
      sum = k < count / 4 * 4 ? squared(held[k], sum) : fused(held[k], held[k], sum);
    return sum;
  }
};

template <class T> struct InOrderRun {
  T total;
  static bool few(int64_t, bool) { return true; }
  static T of(const T* x, int64_t n, bool) {
    T sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    return sum;
  }
  void open() { total = 0; }
  void next(int64_t, bool) {}
  void feed(const T* x, int64_t n) {
    T sum = total;
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    total = sum;
  }
  T close() { return total; }
};

template <class T, bool LARGEST> struct ExtremeRun {
  T best[8];
  bool any;
  void open() { any = false; }
  void next(int64_t, bool) {}
  static T choose(T a, T b) { return LARGEST ? larger(a, b) : smaller(a, b); }
  static bool few(int64_t n, bool) { return n < 8; }
  static T of(const T* x, int64_t n, bool) {
    T most = x[0];
    for (int64_t i = 0; i < n; ++i) most = choose(most, x[i]);
    return choose(most, x[0]);
  }
  // The first ones, up to where a NaN is near; how many. To ask what is best so far
  // whether it is one takes longer than to compare it, and the next waits for that.
  int64_t feed_numbers(const T* x, int64_t n) {
    typedef T Best __attribute__((vector_size(8 * sizeof(T))));
    Best most, own;
    __builtin_memcpy(&most, best, sizeof most);
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
      Best now = most;
      auto odd = most != most;
      for (int k = 0; k < 64; k += 8) {
        __builtin_memcpy(&own, x + i + k, sizeof own);
        odd |= own != own;
        now = LARGEST ? (now > own ? now : own) : (now < own ? now : own);
      }
      uint64_t words[sizeof(T)], found = 0;
      __builtin_memcpy(words, &odd, sizeof words);
      for (uint64_t word : words) found |= word;
      if (found) break;
      most = now;
    }
    __builtin_memcpy(best, &most, sizeof most);
    return i;
  }
  void feed(const T* x, int64_t n) {
    if (!any) {
      for (int k = 0; k < 8; ++k) best[k] = x[0];
      any = true;
    }
    int64_t i = 0;
    if constexpr (T(0.5) > T(0)) i = feed_numbers(x, n);
    for (; i + 8 <= n; i += 8)
      for (int k = 0; k < 8; ++k) best[k] = choose(best[k], x[i + k]);
    for (; i < n; ++i) best[0] = choose(best[0], x[i]);
  }
  T close() {
    for (int k = 1; k < 8; ++k) best[0] = choose(best[0], best[k]);
    return best[0];
  }
};

template <class T> struct SumColumns {
  Cascade<T, 1, COLUMNS> plain;
  Cascade<T, 4, COLUMNS> turns;
  T total[COLUMNS];
  bool grouped, started;
  static bool few(int64_t n, bool grouped) { return n < (grouped ? 16 : 64); }
  static T of(const T* x, int64_t n, int64_t step, bool grouped) {
    if (!grouped) return few_in_turns(x, n, step);
    T sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[i * step];
    return sum;
  }
  void open(bool whole_group) {
    grouped = whole_group, started = false;
    for (int v = 0; v < COLUMNS; ++v) total[v] = 0;
  }
  void next(int64_t n) {
    if (started) flush();
    started = true;
    if (grouped) plain.begin(n);
    else turns.begin(n);
  }
  void feed(const T* x) {
    if (grouped) plain.add(x);
    else turns.add(x);
  }
  void feed(const T* x, int64_t n, int64_t step) {
    if (grouped) plain.add(x, n, step);
    else turns.add(x, n, step);
  }
  void flush() {
    const T* x = grouped ? plain.result() : turns.result();
    for (int v = 0; v < COLUMNS; ++v) total[v] += x[v];
  }
  const T* close() {
    flush();
    return total;
  }
};
template <class T> struct SquaresColumns {
  T total[COLUMNS];
  static bool few(int64_t, bool) { return true; }
  static T of(const T* x, int64_t n, int64_t step, bool) {
    T sum = 0;
    for (int64_t i = 0; i < n; ++i) sum = squared(x[i * step], sum);
    return sum;
  }
  void open(bool) {
    for (int v = 0; v < COLUMNS; ++v) total[v] = 0;
  }
  void next(int64_t) {}
  void feed(const T* x) {
    for (int v = 0; v < COLUMNS; ++v) total[v] = squared(x[v], total[v]);
  }
  const T* close() { return total; }
};
template <class T> struct InOrderColumns {
  T total[COLUMNS];
  static bool few(int64_t, bool) { return true; }
  static T of(const T* x, int64_t n, int64_t step, bool) {
    T sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[i * step];
    return sum;
  }
  void open(bool) {
    for (int v = 0; v < COLUMNS; ++v) total[v] = 0;
  }
  void next(int64_t) {}
  void feed(const T* x) {
    for (int v = 0; v < COLUMNS; ++v) total[v] += x[v];
  }
  const T* close() { return total; }
};
template <class T, bool LARGEST> struct ExtremeColumns {
  T best[COLUMNS];
  bool any;
  static T choose(T a, T b) { return LARGEST ? larger(a, b) : smaller(a, b); }
  static bool few(int64_t, bool) { return true; }
  static T of(const T* x, int64_t n, int64_t step, bool) {
    T most = x[0];
    for (int64_t i = 1; i < n; ++i) most = choose(most, x[i * step]);
    return most;
  }
  void open(bool) { any = false; }
  void next(int64_t) {}
  void feed(const T* x) {
    for (int v = 0; v < COLUMNS; ++v) best[v] = any ? choose(best[v], x[v]) : x[v];
    any = true;
  }
  const T* close() { return best; }
};

// Threads that make parts of one sequence, each of which is folded in its turn.
extern "C" int sched_yield(void);
struct Turns {
  int64_t taken, passed;
  int64_t take() { return __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED); }
  void wait(int64_t ticket) {
    for (int k = 0; __atomic_load_n(&passed, __ATOMIC_ACQUIRE) != ticket; ++k)
      if (k > 4096) sched_yield();
  }
  void pass(int64_t ticket) { __atomic_store_n(&passed, ticket + 1, __ATOMIC_RELEASE); }
};

// Rows of columns, `step` numbers apart.
template <class T>
static inline void feed_rows(SumColumns<T>& c, const T* x, int64_t n, int64_t step) {
  c.feed(x, n, step);
}
template <class C, class T>
static inline void feed_rows(C& c, const T* x, int64_t n, int64_t step) {
  for (; n > 0; --n, x += step) c.feed(x);
}

// The number of parts in which eager's threads fold n numbers to one.
static inline int64_t eager_parts(int64_t n, int64_t threads) {
  const int64_t part = eager_part(n, threads);
  return n > part ? (n + part - 1) / part : 1;
}
