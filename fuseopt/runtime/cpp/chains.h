// Chains of products of small matrices on the CPU. All products of a row are made in
// turn, so that the cache has what one product makes when the next one reads it.
//
// A sum has the order that BLAS has for float numbers: blocks of TERMS terms, each in
// the order of k. A block is added up from zero by fused multiplications and additions.
// The blocks are then added. A probe compares the bits with those of BLAS.
#include <stdint.h>

#if defined(__AVX512F__)
#define CHAIN_BYTES 64
#define CHAIN_HEIGHT 8
#elif defined(__AVX2__) && defined(__FMA__)
#define CHAIN_BYTES 32
#define CHAIN_HEIGHT 6
#elif defined(__aarch64__)
#define CHAIN_BYTES 16
#define CHAIN_HEIGHT 8
#endif

// A right matrix is copied to a panel if so many bytes lie between its rows, and if the
// product has so many rows.
#define CHAIN_FAR 1024
#define CHAIN_ROWS 32

// Words of one place. First its address, or the offset in the room of a thread, or the
// index of its first row's position. Then the bytes from one row of the batch to the
// next, -1 in that room, -2 for rows whose addresses the pool has. Then its strides.
enum {
  IN_ROOM = -1,
  IN_POOL = -2,
  PLACE = 4,
  KIND = 3,
  TERMS = 4,
  OUT = 5,
  ADD = 9,
  LEFT = 13,
  RIGHT = 17,
  CHAIN_WORDS = 21
};

// Products. `words` of each: m, n, k, its kind, TERMS, then the places of out, add (0
// without one), left and right. `scales` of each: beta, alpha.
// Of kind SCALED out = beta * add + (alpha * left) @ right, with a rounding for each.
// Of kind ADDED, which is BLAS's, fma(beta, add, alpha * sum) of the first block of
// terms; of each later one alpha * sum is added. Of kind TIMES_RIGHT, which is BLAS's
// on other processors, beta * add, to which the sums of left @ (alpha * right) are
// added. ZEROED: where BLAS adds nothing else, it adds the first sum to zero, which
// changes the sign of a zero.
// A kind of bfloat16 also has the number of its sums, times COUNT, and TREE: see
// half_chains.h. Or it is IN_PAIRS: see pair_chains.h.
enum {
  SCALED = 0,
  ADDED = 1,
  TIMES_RIGHT = 2,
  ZEROED = 4,
  TREE = 2,
  COUNT = 4,
  MOST_SUMS = 8,
  IN_PAIRS = 256
};

struct ProductChain {
  int64_t rows, count, bytes, threads;
  int64_t local;         // bytes for what the chain alone reads, of each thread
  int64_t room;          // bytes of each thread in all; the rest is for copied operands
  char* memory;          // the room of all threads
  const uint64_t* pool;  // addresses of the caller's tensors
  const int64_t* positions;
  const int64_t* words;
  const double* scales;
};

#if defined(CHAIN_BYTES)
#if defined(__clang__)
#define CHAIN_FMA(a, b, c) __builtin_elementwise_fma(a, b, c)
#else
#define CHAIN_FMA(a, b, c) ((a) * (b) + (c))
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif

template <int Size> struct ChainInt {
  typedef int64_t I;
};
template <> struct ChainInt<4> {
  typedef int32_t I;
};

template <class T> struct Matrix {
  T* at;
  int64_t m, n;  // strides in elements
};

template <class T> static Matrix<T> turned(Matrix<T> x) { return {x.at, x.n, x.m}; }

// Returns whether left @ right, of m x n, is X X^T. Half of that is copied: sums of
// x * y and of y * x are the same.
template <class T>
static bool is_gram(int64_t m, int64_t n, Matrix<T> left, Matrix<T> right) {
  return left.at == right.at && m == n && left.m == right.n && left.n == right.m;
}

// Copies what lies left of the panels of `width` columns on the diagonal.
template <class T> static void copy_half(int64_t m, Matrix<T> out, int64_t width) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < i / width * width; ++j)
      out.at[i * out.m + j] = out.at[j * out.m + i];
}

// The matrix of a row of the batch; `local`: the room of a thread.
template <class T> static Matrix<T> place_in(const ProductChain* c, const int64_t* w,
                                             int64_t row, char* local) {
  char* at = (char*)w[0] + row * w[1];
  if (w[1] == IN_ROOM) at = local + w[0];
  if (w[1] == IN_POOL) at = (char*)c->pool[c->positions[w[0] + row]];
  return {w[0] || w[1] ? (T*)at : 0, w[2], w[3]};
}

template <class T> struct Products {
  enum { L = CHAIN_BYTES / sizeof(T) };
  typedef T V __attribute__((vector_size(CHAIN_BYTES)));
  typedef T U __attribute__((vector_size(CHAIN_BYTES), aligned(sizeof(T)), may_alias));

  // How a tile ends. Sums of a later block are added to what `out` has (`more`), those
  // of the first one to zero (`zeroed`). One block adds beta times `add`, unless that
  // is null: `fused`, or in two roundings.
  struct End {
    bool more, zeroed, fused;
    const T* add;
    int64_t add_m, add_n;
    T beta, alpha;
  };

  // Writes R rows and W vectors of a product with a panel `b`, whose columns are
  // adjacent.
  template <int R, int W>
  static __attribute__((noinline)) void tile(int64_t k, const T* a, int64_t am,
                                             int64_t ak, const T* b, int64_t bk, T* out,
                                             int64_t om, const End& end) {
    V s[R][W];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) s[r][w] = V{};
    for (int64_t i = 0; i < k; ++i) {
      V y[W];
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) y[w] = *(const U*)(b + w * L);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        V x = a[r * am] - V{};  // minus zero changes no bit; plus zero would
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) s[r][w] = CHAIN_FMA(x, y[w], s[r][w]);
      }
      a += ak;
      b += bk;
    }
    for (int r = 0; r < R; ++r)
      for (int w = 0; w < W; ++w) {
        U* to = (U*)(out + r * om + w * L);
        V x = s[r][w];
        if (end.fused) {
          x = x * end.alpha;
          __asm__("" : "+m"(x));  // a rounding before the next sum
        }
        if (end.more) x = *to + x;
        if (end.zeroed) x = x + V{};
        if (end.add) {
          const T* from = end.add + r * end.add_m + w * L * end.add_n;
          V y;
          if (end.add_n == 1) {
            y = *(const U*)from;
          } else {
            for (int j = 0; j < L; ++j) y[j] = from[j * end.add_n];
          }
          if (end.fused) {
            V b = end.beta - V{};
            __asm__("" : "+m"(y));  // not the product of the other branch
            *to = CHAIN_FMA(b, y, x);
          } else {
            y = y * end.beta;
            __asm__("" : "+m"(y));  // two roundings, as eager has
            *to = y + x;
          }
        } else {
          *to = x;
        }
      }
  }

  static void move(const T*& a, int64_t am, T*& out, int64_t om, End& end, int r) {
    a += r * am, out += r * om;
    if (end.add) end.add += r * end.add_m;
  }

  // Writes m rows of W vectors.
  template <int W> static void column(int64_t m, int64_t k, const T* a, int64_t am,
                                      int64_t ak, const T* b, int64_t bk, T* out,
                                      int64_t om, End end) {
    for (; m >= CHAIN_HEIGHT; m -= CHAIN_HEIGHT) {
      tile<CHAIN_HEIGHT, W>(k, a, am, ak, b, bk, out, om, end);
      move(a, am, out, om, end, CHAIN_HEIGHT);
    }
    for (; m >= 4; m -= 4) {
      tile<4, W>(k, a, am, ak, b, bk, out, om, end);
      move(a, am, out, om, end, 4);
    }
    for (; m > 0; --m) {
      tile<1, W>(k, a, am, ak, b, bk, out, om, end);
      move(a, am, out, om, end, 1);
    }
  }

  // Writes a k x width panel whose columns are adjacent; columns from w on are zero.
  static __attribute__((noinline)) void pack(int64_t k, Matrix<T> b, int64_t w,
                                             int64_t width, T* to) {
    int64_t i = 0;
    if (b.n == 1 && w == width)
      for (; i < k; ++i)
        for (int64_t h = 0; h < width; h += L)
          *(U*)(to + i * width + h) = *(const U*)(b.at + i * b.m + h);
#if !defined(__clang__)
    if (b.m == 1 && w == width) {
      typedef typename ChainInt<sizeof(T)>::I I;
      typedef I M __attribute__((vector_size(CHAIN_BYTES)));
      for (; i + L <= k; i += L)
        for (int64_t h = 0; h < width; h += L) {
          V v[L];
#pragma GCC unroll 16
          for (int j = 0; j < L; ++j) v[j] = *(const U*)(b.at + i + (h + j) * b.n);
#pragma GCC unroll 4
          for (int d = 1; d < L; d *= 2) {
            M low, high;
#pragma GCC unroll 16
            for (int j = 0; j < L; ++j) {
              low[j] = j & d ? L + j - d : j;
              high[j] = j & d ? L + j : j + d;
            }
#pragma GCC unroll 16
            for (int j = 0; j < L; ++j)
              if (!(j & d)) {
                V x = v[j], y = v[j + d];
                v[j] = __builtin_shuffle(x, y, low);
                v[j + d] = __builtin_shuffle(x, y, high);
              }
          }
#pragma GCC unroll 16
          for (int j = 0; j < L; ++j) *(U*)(to + (i + j) * width + h) = v[j];
        }
    }
#endif
    for (; i < k; ++i)
      for (int64_t j = 0; j < width; ++j)
        to[i * width + j] = j < w ? b.at[i * b.m + j * b.n] : T(0);
  }

  // The columns from j on, as many as W vectors have.
  template <int W> static void columns(int64_t j, int64_t m, int64_t n, int64_t k,
                                       const T* a, int64_t am, int64_t ak, Matrix<T> b,
                                       Matrix<T> out, End end, int64_t block, T* room) {
    const int64_t width = W * L, w = n - j < width ? n - j : width;
    b.at += j * b.n;
    if (end.add) end.add += j * end.add_n;
    // rows far apart fall on few lines of the cache
    bool far = b.m * int64_t(sizeof(T)) >= CHAIN_FAR && m >= CHAIN_ROWS;
    if (b.n != 1 || w < width || far) {
      pack(k, b, w, width, room);
      b.at = room, b.m = width;
    }
    if (w == width) {
      column<W>(m, k, a, am, ak, b.at, b.m, out.at + j, out.m, end);
      return;
    }
    // a narrow panel is computed beside, with what it adds
    T* narrow = room + block * 2 * L;
    T* added = narrow + m * width;
    for (int64_t i = 0; i < m; ++i)
      for (int64_t x = 0; x < width; ++x) {
        bool in = x < w;
        narrow[i * width + x] = in && end.more ? out.at[i * out.m + j + x] : T(0);
        if (end.add)
          added[i * width + x] = in ? end.add[i * end.add_m + x * end.add_n] : T(0);
      }
    if (end.add) end.add = added, end.add_m = width, end.add_n = 1;
    column<W>(m, k, a, am, ak, b.at, b.m, narrow, width, end);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t x = 0; x < w; ++x) out.at[i * out.m + j + x] = narrow[i * width + x];
  }

  // One product of one row; `out` has adjacent columns.
  static void one(int64_t m, int64_t n, int64_t k, Matrix<T> out, Matrix<T> add,
                  Matrix<T> left, Matrix<T> right, int64_t kind, T beta, T alpha,
                  int64_t block, T* room) {
    bool same = !add.at && is_gram(m, n, left, right);
    for (int64_t from = 0; from < k; from += block) {
      int64_t part = k - from < block ? k - from : block;
      const T* a = left.at + from * left.n;
      Matrix<T> b = {right.at + from * right.m, right.m, right.n};
      // BLAS adds to its first block, eager to the whole product
      const bool first = from == 0, blas = kind & (ADDED | TIMES_RIGHT);
      const T* adds = (blas ? first : from + part == k) ? add.at : 0;
      const bool zeroed = first && kind & ZEROED && !(blas && adds);
      End end = {!first, zeroed, bool(kind & ADDED), adds, add.m, add.n, beta, alpha};
      for (int64_t j = 0; j < n;) {
        bool two = n - j > L && (n >= 2 * L || k > block);
        int64_t width = two ? 2 * L : L;
        // the last columns are computed with those before them, if no sum is added
        if (j + width > n && n >= width && k <= block) j = n - width;
        int64_t end_of = (j + width + 2 * L - 1) / (2 * L) * (2 * L);
        int64_t high = same && end_of < m ? end_of : m;
        if (two) {
          columns<2>(j, high, n, part, a, left.m, left.n, b, out, end, block, room);
        } else {
          columns<1>(j, high, n, part, a, left.m, left.n, b, out, end, block, room);
        }
        j += width;
      }
    }
    if (same) copy_half(m, out, 2 * L);
  }

  // A copy of a matrix, times a number.
  static Matrix<T> times(Matrix<T> x, int64_t m, int64_t n, T number, T* to) {
    if (x.m == 1 && x.n != 1) return turned(times(turned(x), n, m, number, to));
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) to[i * n + j] = x.at[i * x.m + j * x.n] * number;
    return {to, n, 1};
  }

  static void row(const ProductChain* c, int64_t row, char* memory) {
    T* room = (T*)(memory + c->local);
    for (int64_t i = 0; i < c->count; ++i) {
      const int64_t* w = c->words + i * CHAIN_WORDS;
      int64_t m = w[0], n = w[1], k = w[2];
      Matrix<T> out = place_in<T>(c, w + OUT, row, memory);
      Matrix<T> add = place_in<T>(c, w + ADD, row, memory);
      Matrix<T> left = place_in<T>(c, w + LEFT, row, memory);
      Matrix<T> right = place_in<T>(c, w + RIGHT, row, memory);
      T beta = c->scales[2 * i], alpha = c->scales[2 * i + 1];
      const int64_t kind = w[KIND];
      const bool times_right = kind & TIMES_RIGHT;
      if (kind & (ADDED | TIMES_RIGHT) && beta == T(0)) add.at = 0;
      T* rest = room;
      if (!(kind & ADDED) && alpha != T(1)) {
        if (times_right) right = times(right, k, n, alpha, room);
        else left = times(left, m, k, alpha, room);
        rest += ((times_right ? n : m) * k + 15) / 16 * 16;
      }
      if (out.n == 1 || n == 1)
        one(m, n, k, out, add, left, right, kind, beta, alpha, w[TERMS], rest);
      else  // the transposed product has adjacent columns
        one(n, m, k, turned(out), turned(add), turned(right), turned(left), kind, beta,
            alpha, w[TERMS], rest);
    }
  }
};

#if !defined(__clang__)
#pragma GCC pop_options
#endif
#endif
