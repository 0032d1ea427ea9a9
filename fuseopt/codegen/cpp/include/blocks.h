// The numbers that the elements of a block have in common. Of n elements, one or more;
// NaN wins.
static const int64_t SIDE_BY_SIDE = 16;  // a compiler makes vectors of them
template <class T> struct Largest {
  static T of(T a, T b) { return larger(a, b); }
};
template <class T> struct Least {
  static T of(T a, T b) { return smaller(a, b); }
};
template <class F> static inline float of_block(const float* x, int64_t n) {
  float found[SIDE_BY_SIDE], result = x[0];
  for (int64_t j = 0; j < SIDE_BY_SIDE; ++j) found[j] = x[0];
  int64_t i = 0;
  for (; i + SIDE_BY_SIDE <= n; i += SIDE_BY_SIDE)
    for (int64_t j = 0; j < SIDE_BY_SIDE; ++j) found[j] = F::of(x[i + j], found[j]);
  for (; i < n; ++i) result = F::of(x[i], result);
  for (int64_t j = 0; j < SIDE_BY_SIDE; ++j) result = F::of(found[j], result);
  return result;
}
static inline float block_largest(const float* x, int64_t n) {
  return of_block<Largest<float>>(x, n);
}
static inline float block_least(const float* x, int64_t n) {
  return of_block<Least<float>>(x, n);
}
// The first element of the first block that begins at or after an element: a chunk has
// the blocks that begin in it.
static inline int64_t block_from(int64_t e, int64_t size) {
  return (e + size - 1) / size * size;
}
