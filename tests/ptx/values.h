// Numbers in registers: a register is 64 bits, of which a type takes the lowest.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

template <class To, class From>
static inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// A number of 16 bits is computed with as a float: for sums, differences and products
// the second rounding then changes nothing, since 24 >= 2 * 11 + 2 digits.
struct bf16 {
  u16 word;
  bf16() = default;
  explicit bf16(float f) {
    u32 x = bits<u32>(f);
    word = f != f ? 0x7fff : u16((x + 0x7fff + ((x >> 16) & 1)) >> 16);
  }
  operator float() const { return bits<float>(u32(word) << 16); }
};

struct f16 {
  u16 word;
  f16() = default;
  explicit f16(float f) {
    u16 sign = bits<u32>(f) >> 31 << 15;
    double a = std::fabs(double(f));
    if (f != f) {
      word = 0x7fff;
    } else if (a >= 65520.0) { // the middle between the largest and what would follow
      word = sign | 0x7c00;
    } else if (a < 0x1p-14) { // in units of the smallest; 1024 of them are 2**-14
      word = sign | u16(std::nearbyint(a * 0x1p24));
    } else {
      int e;
      double m = std::frexp(a, &e);             // 0.5 <= m < 1
      int digits = int(std::nearbyint(m * 2048)); // 1024 to 2048
      word = sign | u16(((e + 14) << 10) + (digits - 1024));
    }
  }
  operator float() const {
    int e = word >> 10 & 31, m = word & 1023;
    float a = e == 31  ? (m ? NAN : INFINITY)
              : e == 0 ? std::ldexp(float(m), -24)
                       : std::ldexp(float(m + 1024), e - 25);
    return word >> 15 ? -a : a;
  }
};

// Two numbers of 16 bits.
template <class H>
struct pair {
  H low, high;
};

template <class T>
static inline T get(u64 word) {
  T x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}
// Signed integers are extended by their sign: a register may be wider than what is
// loaded into it.
template <class T>
static inline u64 put(T x) {
  u64 word = 0;
  std::memcpy(&word, &x, sizeof x);
  if constexpr (std::numeric_limits<T>::is_integer && std::numeric_limits<T>::is_signed)
    word = u64(s64(x));
  return word;
}
// What a GPU makes where a result is no number.
template <>
inline u64 put<float>(float x) {
  return x != x ? 0x7fffffff : bits<u32>(x);
}
template <>
inline u64 put<bf16>(bf16 x) { return x.word; }
template <>
inline u64 put<f16>(f16 x) {
  return (x.word & 0x7fff) > 0x7c00 ? 0x7fff : x.word;
}

// To an integer, toward zero; what lies outside becomes the nearest, no number zero.
template <class I, class F>
static inline I truncated(F x) {
  if (x != x) return 0;
  if (x >= std::ldexp(F(1), std::numeric_limits<I>::digits))
    return std::numeric_limits<I>::max();
  if (x <= F(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
  return I(x);
}
