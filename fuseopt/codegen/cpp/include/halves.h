static inline float as_float(uint32_t bits) {
  union {
    uint32_t i;
    float f;
  } u = {bits};
  return u.f;
}
static inline uint32_t as_bits(float x) {
  union {
    float f;
    uint32_t i;
  } u = {x};
  return u.i;
}
// A number of lane code; a NaN as bf16 would have it, see calm_bf16.
template <class T> static inline T calmed(T x) { return x != x ? (T)NAN : x; }

static inline float from_bf16(uint16_t x) { return as_float((uint32_t)x << 16); }
// Round to nearest even. NaN have no digits where bf16 has none: so they stay.
static inline float calm_bf16(float x) {
  const uint32_t bits = as_bits(x);
  return as_float((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}
// Of any number; NaN becomes the quiet NaN.
static inline float round_bf16(float x) {
  return x != x ? as_float(0x7fc00000u) : calm_bf16(x);
}
// Of a number that is one.
static inline uint16_t to_bf16(float x) { return (uint16_t)(as_bits(x) >> 16); }

#if defined(__aarch64__) && !defined(__clang__) && __GNUC__ < 13
typedef __fp16 _Float16;  // that GCC has the type in C++ under this name alone
#endif
static inline float from_f16(_Float16 x) { return (float)x; }
static inline float round_f16(float x) { return (float)(_Float16)x; }
static inline _Float16 to_f16(float x) { return (_Float16)x; }

// The same for vectors, where compilers have no conversion of f16; `half`: in its lower
// 16 bits.
static inline float widened_f16(uint32_t half) {
  const uint32_t sign = half << 16 & 0x80000000u, digits = (half & 0x7fffu) << 13;
  const float least = as_float(0x38800000u);  // 2**-14: what is smaller is subnormal
  const uint32_t small = as_bits(as_float(digits + 0x38800000u) - least);
  const uint32_t scaled = digits + (digits < 0x0f800000u ? 0x38000000u : 0x70000000u);
  return as_float((digits < 0x00800000u ? small : scaled) | sign);
}
static inline uint32_t narrowed_f16(float x) {
  const uint32_t sign = as_bits(x) >> 16 & 0x8000u, size = as_bits(x) & 0x7fffffffu;
  const uint32_t small = as_bits(as_float(size) + .5f) & 0xffffu;
  const uint32_t scaled = size - (size < 0x7f800000u ? 0x38000000u : 0x70000000u);
  return (size < 0x38800000u ? small : scaled >> 13) | sign;
}
static inline float vector_f16(float x) {
#ifdef __ASSOCIATIVE_MATH__
  return round_f16(x);
#else
  const uint32_t sign = as_bits(x) & 0x80000000u, size = as_bits(x) & 0x7fffffffu;
  // from 65520 on they are infinite
  const bool over = size - 0x477ff000u <= 0x7f800000u - 0x477ff000u;
  const uint32_t kept = over ? 0x7f800000u : size;
  const uint32_t own = kept & 0x7f800000u;
  // a number whose last digit is the last that f16 has beside this exponent
  const float far = as_float((own > 0x38800000u ? own : 0x38800000u) + 0x06800000u);
  return as_float(as_bits((as_float(kept) + far) - far) | sign);
#endif
}

// Two neighbours in memory.
typedef uint32_t __attribute__((may_alias, aligned(2))) Pair;
static const bool SWAPPED = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__;
static inline float first_bf16(uint32_t w) {
  return as_float(SWAPPED ? w & 0xffff0000u : w << 16);
}
static inline float second_bf16(uint32_t w) {
  return as_float(SWAPPED ? w << 16 : w & 0xffff0000u);
}
static inline uint32_t pair_bf16(float first, float second) {
  const uint32_t low = as_bits(SWAPPED ? second : first);
  const uint32_t high = as_bits(SWAPPED ? first : second);
  return (high & 0xffff0000u) | low >> 16;
}
static inline float first_f16(uint32_t w) { return widened_f16(SWAPPED ? w >> 16 : w); }
static inline float second_f16(uint32_t w) {
  return widened_f16(SWAPPED ? w : w >> 16);
}
static inline uint32_t pair_f16(float first, float second) {
  const uint32_t low = narrowed_f16(SWAPPED ? second : first);
  return narrowed_f16(SWAPPED ? first : second) << 16 | low;
}
