// The numbers that the elements of a block have in common. Of n elements, one or more;
// NaN wins. Bits without the sign order sizes, and NaN comes last. Comparisons of
// integers are one instruction; those of floats that let NaN win are three.
static const int32_t SIZE_BITS = 0x7fffffff, INFINITE = 0x7f800000;
static inline int32_t bits_of(float x) {
  union {
    float f;
    int32_t i;
  } u = {x};
  return u.i;
}
static inline float float_of(int32_t bits) {
  union {
    int32_t i;
    float f;
  } u = {bits};
  return u.f;
}
static inline float block_largest_size(const float* x, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t size = bits_of(x[i]) & SIZE_BITS;
    most = size > most ? size : most;
  }
  return float_of(most);
}
// Bits that order floats as integers: below zero, larger sizes are smaller.
static inline int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & SIZE_BITS); }
static inline float block_largest(const float* x, int64_t n) {
  int32_t most = INT32_MIN, size = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t bits = bits_of(x[i]), own = bits & SIZE_BITS, key = ordered(bits);
    size = own > size ? own : size;
    most = key > most ? key : most;
  }
  return float_of(size > INFINITE ? size : ordered(most));
}
static inline float block_least(const float* x, int64_t n) {
  int32_t least = INT32_MAX, size = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t bits = bits_of(x[i]), own = bits & SIZE_BITS, key = ordered(bits);
    size = own > size ? own : size;
    least = key < least ? key : least;
  }
  return float_of(size > INFINITE ? size : ordered(least));
}
// The first element of the first block that begins at or after an element: a chunk has
// the blocks that begin in it.
static inline int64_t block_from(int64_t e, int64_t size) {
  return (e + size - 1) / size * size;
}
