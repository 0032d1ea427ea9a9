// Chains of larger products of bfloat16: the sums of oneDNN on processors that multiply
// pairs of bfloat16. Each result has one sum of float32, which gets the pairs of terms
// in the order of k. A probe compares the bits. Processors with AMX have other sums.
#if defined(CHAIN_BYTES) && defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define CHAIN_PAIRS 1
#include <immintrin.h>

struct Pairs {
  enum { L = 16, HEIGHT = 8, WIDTH = 2 * L };
  typedef Matrix<uint16_t> M;

  // Pairs of terms: `at[i * m + p * k]` is pair p of row i.
  struct Words {
    const uint32_t* at;
    int64_t m, k;
  };

  // How a tile ends: fma(beta, add, alpha * sum), unless `add` is null, or the sum.
  struct End {
    M add;
    float beta, alpha;
    bool scaled;
  };

  // Reads up to 16 numbers of a row, those of `mask`.
  static __m512 widened(const uint16_t* from, int64_t step, __mmask16 mask) {
    __m256i x;
    if (step == 1) {
      x = _mm256_maskz_loadu_epi16(mask, from);
    } else {
      alignas(32) uint16_t each[L] = {};
      for (int j = 0; j < L; ++j)
        if (mask >> j & 1) each[j] = from[j * step];
      x = _mm256_load_si256((const __m256i*)each);
    }
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }

  // Writes R rows and W vectors; `b` is a panel of W * L words a pair.
  template <int R, int W>
  static __attribute__((noinline)) void tile(int64_t pairs, Words a, const uint32_t* b,
                                             M out, const End& end,
                                             const __mmask16* masks) {
    __m512 s[R][W];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) s[r][w] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; ++p) {
      __m512i y[W];
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) y[w] = _mm512_loadu_si512(b + w * L);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        __m512i x = _mm512_set1_epi32((int)a.at[r * a.m]);
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w)
          s[r][w] = _mm512_dpbf16_ps(s[r][w], (__m512bh)x, (__m512bh)y[w]);
      }
      a.at += a.k;
      b += W * L;
    }
    const __m512 beta = _mm512_set1_ps(end.beta), alpha = _mm512_set1_ps(end.alpha);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) {
        __m512 x = s[r][w];
        if (end.scaled) {
          x = _mm512_mul_ps(x, alpha);
          __asm__("" : "+v"(x));  // a rounding before the next sum
        }
        if (end.add.at) {
          const uint16_t* from = end.add.at + r * end.add.m + w * L * end.add.n;
          x = _mm512_fmadd_ps(beta, widened(from, end.add.n, masks[w]), x);
        }
        __m256i narrow = (__m256i)_mm512_cvtneps_pbh(x);
        _mm256_mask_storeu_epi16(out.at + r * out.m + w * L, masks[w], narrow);
      }
  }

  static void move(int64_t r, Words& a, M& out, End& end) {
    a.at += r * a.m;
    out.at += r * out.m;
    if (end.add.at) end.add.at += r * end.add.m;
  }

  template <int R, int W> static int64_t rows(int64_t m, int64_t pairs, Words& a,
                                              const uint32_t* b, M& out, End& end,
                                              const __mmask16* masks) {
    for (; m >= R; m -= R) {
      tile<R, W>(pairs, a, b, out, end, masks);
      move(R, a, out, end);
    }
    return m;
  }

  template <int W> static void column(int64_t m, int64_t pairs, Words a,
                                      const uint32_t* b, M out, End end,
                                      const __mmask16* masks) {
    m = rows<HEIGHT, W>(m, pairs, a, b, out, end, masks);
    m = rows<4, W>(m, pairs, a, b, out, end, masks);
    rows<1, W>(m, pairs, a, b, out, end, masks);
  }

  static uint32_t pair(M b, int64_t p, int64_t j, int64_t k) {
    const uint16_t* at = b.at + 2 * p * b.m + j * b.n;
    return at[0] | (2 * p + 1 < k ? (uint32_t)at[b.m] << 16 : 0);
  }

  // Writes pairs of a k x w matrix as rows of `width` words; the rest is zero.
  static __attribute__((noinline)) void pack(int64_t k, M b, int64_t w, int64_t width,
                                             uint32_t* to) {
    const int64_t pairs = (k + 1) / 2;
    if (b.m == 1 && b.n % 2 == 0 && k % 2 == 0) {  // a pair is a word already
      Products<float>::pack(pairs, {(float*)b.at, 1, b.n / 2}, w, width, (float*)to);
      return;
    }
    for (int64_t p = 0; p < pairs; ++p) {
      int64_t j = 0;
      if (b.n == 1 && 2 * p + 1 < k)
        for (; j + L <= w; j += L) {
          const uint16_t* at = b.at + 2 * p * b.m + j;
          __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
          at += b.m;
          __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
          high = _mm512_slli_epi32(high, 16);
          _mm512_storeu_si512(to + p * width + j, _mm512_or_si512(low, high));
        }
      for (; j < width; ++j) to[p * width + j] = j < w ? pair(b, p, j, k) : 0;
    }
  }

  // One product of one row; `out` has adjacent columns.
  static void one(int64_t m, int64_t n, int64_t k, M out, M left, M right, End end,
                  uint32_t* room) {
    const int64_t pairs = (k + 1) / 2;
    const bool same = !end.add.at && is_gram(m, n, left, right);
    Words a = {(const uint32_t*)left.at, left.m / 2, 1};
    if (left.n != 1 || left.m % 2 || k % 2) {
      const int64_t width = (m + L - 1) / L * L;
      pack(k, {left.at, left.n, left.m}, m, width, room);
      a = {room, 1, width};
      room += pairs * width;
    }
    for (int64_t j = 0; j < n; j += WIDTH) {
      const int64_t w = n - j < WIDTH ? n - j : WIDTH, width = w > L ? WIDTH : L;
      const __mmask16 masks[2] = {(__mmask16)(w < L ? (1 << w) - 1 : -1),
                                  (__mmask16)(w < WIDTH ? (1 << (w & 15)) - 1 : -1)};
      pack(k, {right.at + j * right.n, right.m, right.n}, w, width, room);
      const int64_t high = same && j + WIDTH < m ? j + WIDTH : m;
      const M to = {out.at + j, out.m, 1};
      End last = end;
      if (last.add.at) last.add.at += j * last.add.n;
      if (width == WIDTH) column<2>(high, pairs, a, room, to, last, masks);
      else column<1>(high, pairs, a, room, to, last, masks);
    }
    if (same) copy_half(m, out, WIDTH);
  }

  // Makes the product with these words, see chains.h.
  static void product(const int64_t* w, M out, M add, M left, M right, float beta,
                      float alpha, uint32_t* room) {
    const bool scaled = w[KIND] & ADDED;
    const int64_t m = w[0], n = w[1], k = w[2];
    if (out.n == 1 || n == 1)
      one(m, n, k, out, left, right, {add, beta, alpha, scaled}, room);
    else  // the transposed product has adjacent columns
      one(n, m, k, turned(out), turned(right), turned(left),
          {turned(add), beta, alpha, scaled}, room);
  }
};
#endif
