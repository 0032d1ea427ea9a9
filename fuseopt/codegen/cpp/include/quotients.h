// Quotients by a number that elements share, as products: a divider takes one vector
// after the other, and multipliers two in each cycle. The bits are those of x / y, for
// zeros and for numbers far from the ends of the range. A loop that meets others runs
// again, and divides.
#if (defined(__FMA__) || defined(__aarch64__)) && !defined(__ASSOCIATIVE_MATH__)
static const bool MULTIPLIES = true;
#else
static const bool MULTIPLIES = false;
#endif
static volatile float HALF_A_DIGIT = 0x1p-26f;
// Does this thread round to the nearest? (To read its mode waits for all arithmetic.)
static inline bool rounds_to_nearest() {
  const float x = HALF_A_DIGIT;
  return 1.0f + x == 1.0f && 1.0f - x == 1.0f;
}
static inline uint32_t size_bits(float x) {
  union {
    float f;
    uint32_t i;
  } u = {x};
  return u.i & 0x7fffffffu;
}
// A number y by which a loop divides. `plain`: the loop may multiply.
struct Divisor {
  float inverse, large, back;  // 1 / y; by powers of two: y, -1 / y
  uint32_t least, most;  // quotients of numbers of these sizes have the bits of x / y
  bool fits;             // there are such numbers
  Divisor(float y, bool plain)
      : inverse(1.0f), large(1.0f), back(1.0f), least(0), most(0) {
    fits = plain && y >= 0x1p-70f && y <= 0x1p70f;
    if (!fits) return;
    inverse = 1.0f / y, large = y * 0x1p48f, back = inverse * -0x1p-48f;
    // only normal quotients, of numbers that may be scaled; in floats, those bounds may
    // be denormal, which takes a processor a hundred cycles
    const uint32_t size = size_bits(y), digits = 23;
    const uint32_t low = 124u << digits, high = 126u << digits;
    least = size > low + size_bits(0x1p-126f) ? size - low : size_bits(0x1p-126f);
    most = size + high < size_bits(0x1p78f) ? size + high : size_bits(0x1p78f);
  }
  // The remainder is exact, as it is scaled. So the last sum rounds as a division does
  // (Markstein). That of a zero has the sign with which the sum keeps the zero's own.
  // Nothing is negated: a compiler joins a minus to a fused product and sum.
  float divide(float x) const {
    const float q = x * inverse, excess = __builtin_fmaf(q, large, x * -0x1p48f);
    return __builtin_fmaf(excess, back, q);
  }
  // Sizes up to `top`, zeros, and sizes from 0 - `low` on?
  bool has(uint32_t top, uint32_t low) const {
    return top <= most && low <= 0u - least;
  }
};
