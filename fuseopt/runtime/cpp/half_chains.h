// Chains of products of bfloat16, and the function that makes chains of any kind.
//
// The loops of ATen for small products have several sums, which get the terms in turn.
// TREE adds them as a tree. A probe compares the bits.
#if defined(CHAIN_BYTES)
#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif

// Products of bfloat16. Terms and sums are float32; a result is rounded once.
struct Halves {
  typedef Products<float> P;
  typedef P::V V;
  typedef P::U U;
  enum { L = P::L };

  static float wide(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    __builtin_memcpy(&y, &bits, 4);
    return y;
  }

  static uint16_t narrow(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }

  // Writes m x n numbers as rows of `width`; columns from n on are zero.
  static void widen(Matrix<uint16_t> x, int64_t m, int64_t n, int64_t width,
                    float* to) {
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < width; ++j)
        to[i * width + j] = j < n ? wide(x.at[i * x.m + j * x.n]) : 0.0f;
  }

  // One vector of a row: `Count` sums of the terms in turn. They are added from first
  // to last, or as a tree. Terms that are left over belong to the first sum, or follow
  // the tree.
  template <int Count>
  static V sum(int64_t k, const float* a, const float* b, int64_t bk, bool tree) {
    V s[Count];
    for (int c = 0; c < Count; ++c) s[c] = V{};
    const int64_t turns = tree ? 2 * Count : Count, whole = k / turns * turns;
    for (int64_t i = 0; i < whole; i += Count)
#pragma GCC unroll 16
      for (int c = 0; c < Count; ++c) {
        V x = a[i + c] - V{};
        s[c] = CHAIN_FMA(x, *(const U*)(b + (i + c) * bk), s[c]);
      }
    if (tree) {
      for (int half = Count / 2; half; half /= 2)
        for (int c = 0; c < half; ++c) s[c] = s[c] + s[c + half];
      s[0] = s[0] + V{};  // ATen adds zero, which changes the sign of a zero
    }
    for (int64_t i = whole; i < k; ++i) {
      V x = a[i] - V{};
      V product = x * *(const U*)(b + i * bk);
      __asm__("" : "+m"(product));  // it may overflow
      s[0] = s[0] + product;
    }
    if (!tree)
      for (int c = 1; c < Count; ++c) s[0] = s[0] + s[c];
    return s[0];
  }

  static void one(const int64_t* w, Matrix<uint16_t> out, Matrix<uint16_t> add,
                  Matrix<uint16_t> left, Matrix<uint16_t> right, float beta,
                  float alpha, float* room) {
    int64_t m = w[0], n = w[1], k = w[2], width = (n + L - 1) / L * L;
    float *a = room, *b = a + (m * k + L - 1) / L * L, *c = b + k * width;
    widen(left, m, k, k, a);
    widen(right, k, n, width, b);
    if (add.at) widen(add, m, n, width, c);
    const bool tree = w[KIND] & TREE;
    const int64_t count = w[KIND] / COUNT;
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < width; j += L) {
        const float *row = a + i * k, *column = b + j;
        V x = count == 1   ? sum<1>(k, row, column, width, tree)
              : count == 2 ? sum<2>(k, row, column, width, tree)
              : count == 4 ? sum<4>(k, row, column, width, tree)
                           : sum<MOST_SUMS>(k, row, column, width, tree);
        if (w[KIND] & ADDED) {
          x = x * alpha;
          __asm__("" : "+m"(x));  // a rounding before the next sum
          if (add.at) {
            V times = beta - V{};
            x = CHAIN_FMA(times, *(const U*)(c + i * width + j), x);
          }
        }
        for (int h = 0; h < L && j + h < n; ++h)
          out.at[i * out.m + (j + h) * out.n] = narrow(x[h]);
      }
  }

  static void row(const ProductChain* c, int64_t row, char* memory) {
    for (int64_t i = 0; i < c->count; ++i) {
      const int64_t* w = c->words + i * CHAIN_WORDS;
      float beta = c->scales[2 * i], alpha = c->scales[2 * i + 1];
      Matrix<uint16_t> add = place_in<uint16_t>(c, w + ADD, row, memory);
      if (beta == 0.0f) add.at = 0;
      Matrix<uint16_t> out = place_in<uint16_t>(c, w + OUT, row, memory);
      Matrix<uint16_t> left = place_in<uint16_t>(c, w + LEFT, row, memory);
      Matrix<uint16_t> right = place_in<uint16_t>(c, w + RIGHT, row, memory);
      char* room = memory + c->local;
#if defined(CHAIN_PAIRS)
      if (w[KIND] & IN_PAIRS) {
        Pairs::product(w, out, add, left, right, beta, alpha, (uint32_t*)room);
        continue;
      }
#endif
      one(w, out, add, left, right, beta, alpha, (float*)room);
    }
  }
};

// Makes all rows, each with `Kind::row`.
template <class Kind> static int64_t run_rows(const ProductChain* c) {
  int64_t n = c->threads;
  const uint64_t mode = float_mode();
#pragma omp parallel for num_threads(n) if (n > 1) schedule(static)
  for (int64_t t = 0; t < n; ++t) {
    const InMode as_caller(mode);
    for (int64_t r = c->rows * t / n; r < c->rows * (t + 1) / n; ++r)
      Kind::row(c, r, c->memory + t * c->room);
  }
  return 1;
}

#if !defined(__clang__)
#pragma GCC pop_options
#endif
#endif

// Returns 1 if chains make products of kind IN_PAIRS, or 0.
extern "C" int64_t fuseopt_chain_pairs() {
#if defined(CHAIN_PAIRS)
  return 1;
#else
  return 0;
#endif
}

// Computes all rows; returns 0 where this processor lacks the instructions.
extern "C" int64_t fuseopt_chain(const ProductChain* c) {
#if defined(CHAIN_BYTES)
  if (c->bytes == 2) return run_rows<Halves>(c);
  if (c->bytes == 4) return run_rows<Products<float>>(c);
  return run_rows<Products<double>>(c);
#else
  return 0;
#endif
}
