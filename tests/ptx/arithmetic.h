// What the instructions without memory compute: by name, a function of registers.
#pragma once
#include <algorithm>
#include <string>
#include <unordered_map>

#include "values.h"

// `to`: where results go; `from`: the operands.
using Compute = void (*)(u64* to, const u64* from);
using Table = std::unordered_map<std::string, Compute>;

#define ONE(T) get<T>(x[0])
#define TWO(T) get<T>(x[1])
#define THREE(T) get<T>(x[2])
#define DOES(...) [](u64* to, const u64* x) { (void)x; __VA_ARGS__; }
#define GIVES(...) DOES(to[0] = put(__VA_ARGS__))

// `F`: in what the arithmetic is done.
template <class T, class F>
static void floats(Table& t, const std::string& name, const std::string& rn) {
  t["add" + rn + name] = GIVES(T(F(ONE(T)) + F(TWO(T))));
  t["sub" + rn + name] = GIVES(T(F(ONE(T)) - F(TWO(T))));
  t["mul" + rn + name] = GIVES(T(F(ONE(T)) * F(TWO(T))));
  t["abs" + name] = GIVES(T(std::fabs(F(ONE(T)))));
  t["neg" + name] = GIVES(T(-F(ONE(T))));
  // without NaN, the other one; of two zeros, minus is the smaller
  t["max" + name] = GIVES(T(ONE(T) == TWO(T) && std::signbit(F(ONE(T)))
                                ? F(TWO(T))
                                : std::fmax(F(ONE(T)), F(TWO(T)))));
  t["min" + name] = GIVES(T(ONE(T) == TWO(T) && std::signbit(F(TWO(T)))
                                ? F(TWO(T))
                                : std::fmin(F(ONE(T)), F(TWO(T)))));
  for (bool greatest : {true, false})
    t[std::string(greatest ? "max" : "min") + ".NaN" + name] =
        greatest ? Compute(GIVES(T(ONE(T) != ONE(T) || TWO(T) != TWO(T)
                                       ? F(NAN)
                                       : std::fmax(F(ONE(T)), F(TWO(T))))))
                 : Compute(GIVES(T(ONE(T) != ONE(T) || TWO(T) != TWO(T)
                                       ? F(NAN)
                                       : std::fmin(F(ONE(T)), F(TWO(T))))));
  t["setp.eq" + name] = GIVES(u8(ONE(T) == TWO(T)));
  t["setp.ne" + name] = GIVES(u8(ONE(T) < TWO(T) || ONE(T) > TWO(T)));
  t["setp.lt" + name] = GIVES(u8(ONE(T) < TWO(T)));
  t["setp.le" + name] = GIVES(u8(ONE(T) <= TWO(T)));
  t["setp.gt" + name] = GIVES(u8(ONE(T) > TWO(T)));
  t["setp.ge" + name] = GIVES(u8(ONE(T) >= TWO(T)));
  t["setp.equ" + name] = GIVES(u8(!(ONE(T) < TWO(T) || ONE(T) > TWO(T))));
  t["setp.neu" + name] = GIVES(u8(!(ONE(T) == TWO(T))));
  t["setp.ltu" + name] = GIVES(u8(!(ONE(T) >= TWO(T))));
  t["setp.leu" + name] = GIVES(u8(!(ONE(T) > TWO(T))));
  t["setp.gtu" + name] = GIVES(u8(!(ONE(T) <= TWO(T))));
  t["setp.geu" + name] = GIVES(u8(!(ONE(T) < TWO(T))));
  t["setp.nan" + name] = GIVES(u8(ONE(T) != ONE(T) || TWO(T) != TWO(T)));
  t["setp.num" + name] = GIVES(u8(ONE(T) == ONE(T) && TWO(T) == TWO(T)));
}

// A root that is off by as much as a GPU's estimate may be, 2**-23 of it: up or down, as
// the last bit of a bfloat16 says.
static float near_root(float x) {
  const float root = std::sqrt(x);
  if (!(root > 0) || std::isinf(root)) return root;
  const bool up = bits<u32>(x) >> 16 & 1;
  return std::nextafter(root, up ? INFINITY : 0.0f);
}

template <class T>
static void wide_floats(Table& t, const std::string& name) {
  t["div.rn" + name] = GIVES(ONE(T) / TWO(T));
  t["sqrt.rn" + name] = GIVES(std::sqrt(ONE(T)));
  t["rcp.rn" + name] = GIVES(1 / ONE(T));
  t["fma.rn" + name] = GIVES(std::fma(ONE(T), TWO(T), THREE(T)));
  t["cvt.rni" + name + name] = GIVES(std::nearbyint(ONE(T)));
  t["cvt.rzi" + name + name] = GIVES(std::trunc(ONE(T)));
  t["cvt.rmi" + name + name] = GIVES(std::floor(ONE(T)));
  t["cvt.rpi" + name + name] = GIVES(std::ceil(ONE(T)));
  t["cvt.rn" + name + ".s32"] = GIVES(T(ONE(s32)));
  t["cvt.rn" + name + ".u32"] = GIVES(T(ONE(u32)));
  t["cvt.rn" + name + ".s64"] = GIVES(T(ONE(s64)));
  t["cvt.rn" + name + ".u64"] = GIVES(T(ONE(u64)));
  t["cvt.rn" + name + ".s16"] = GIVES(T(ONE(s16)));
  t["cvt.rn" + name + ".u16"] = GIVES(T(ONE(u16)));
  t["cvt.rzi.s32" + name] = GIVES(truncated<s32>(ONE(T)));
  t["cvt.rzi.u32" + name] = GIVES(truncated<u32>(ONE(T)));
  t["cvt.rzi.s64" + name] = GIVES(truncated<s64>(ONE(T)));
  t["cvt.rzi.u64" + name] = GIVES(truncated<u64>(ONE(T)));
  t["cvt.rzi.s16" + name] = GIVES(truncated<s16>(ONE(T)));
  t["cvt.rzi.u16" + name] = GIVES(truncated<u16>(ONE(T)));
}

template <class H>
static void halves(Table& t, const std::string& name) {
  floats<H, float>(t, name, ".rn");
  t["cvt.rn" + name + ".f32"] = GIVES(H(ONE(float)));
  t["cvt.f32" + name] = GIVES(float(ONE(H)));
  const std::string two = name + "x2";
  using P = pair<H>;
#define BOTH(OP)                                                                       \
  DOES(auto a = get<P>(x[0]); auto b = get<P>(x[1]);                                   \
       to[0] = put(H(a.low OP b.low)) | put(H(a.high OP b.high)) << 16)
#define BOTH_TRUE(A, OP)                                                               \
  DOES(auto a = get<P>(x[0]); auto b = get<P>(x[1]); to[0] = A(a.low OP b.low);        \
       to[1] = A(a.high OP b.high))
  t["cvt.rn" + two + ".f32"] =
      DOES(to[0] = put(H(ONE(float))) << 16 | put(H(TWO(float))));
  t["add.rn" + two] = BOTH(+);
  t["sub.rn" + two] = BOTH(-);
  t["mul.rn" + two] = BOTH(*);
  t["abs" + two] = GIVES(ONE(u32) & 0x7fff7fffu);
  t["neg" + two] = GIVES(ONE(u32) ^ 0x80008000u);
  t["setp.eq" + two] = BOTH_TRUE(u64, ==);
  t["setp.lt" + two] = BOTH_TRUE(u64, <);
  t["setp.le" + two] = BOTH_TRUE(u64, <=);
  t["setp.gt" + two] = BOTH_TRUE(u64, >);
  t["setp.ge" + two] = BOTH_TRUE(u64, >=);
  t["setp.neu" + two] = BOTH_TRUE(!, ==);
  t["setp.ltu" + two] = BOTH_TRUE(!, >=);
  t["setp.leu" + two] = BOTH_TRUE(!, >);
  t["setp.gtu" + two] = BOTH_TRUE(!, <=);
  t["setp.geu" + two] = BOTH_TRUE(!, <);
}

template <class T>
static void integers(Table& t, const std::string& name) {
  using U = std::make_unsigned_t<T>;
  t["add" + name] = GIVES(T(U(ONE(T)) + U(TWO(T))));
  t["sub" + name] = GIVES(T(U(ONE(T)) - U(TWO(T))));
  t["mul.lo" + name] = GIVES(T(u64(ONE(T)) * u64(TWO(T))));
  t["mad.lo" + name] = GIVES(T(u64(ONE(T)) * u64(TWO(T)) + u64(THREE(T))));
  // by zero, what a GPU gives: all ones, and the operand
  t["div" + name] = GIVES(T(TWO(T) == 0 ? T(~U(0)) : ONE(T) / TWO(T)));
  t["rem" + name] = GIVES(T(TWO(T) == 0 ? ONE(T) : ONE(T) % TWO(T)));
  t["min" + name] = GIVES(std::min(ONE(T), TWO(T)));
  t["max" + name] = GIVES(std::max(ONE(T), TWO(T)));
  t["neg" + name] = GIVES(T(-U(ONE(T))));
  t["abs" + name] = GIVES(T(ONE(T) < 0 ? -U(ONE(T)) : U(ONE(T))));
  t["shr" + name] =
      GIVES(T(TWO(u32) < 8 * sizeof(T) ? ONE(T) >> TWO(u32) : ONE(T) < 0 ? -1 : 0));
  t["setp.lt" + name] = GIVES(u8(ONE(T) < TWO(T)));
  t["setp.le" + name] = GIVES(u8(ONE(T) <= TWO(T)));
  t["setp.gt" + name] = GIVES(u8(ONE(T) > TWO(T)));
  t["setp.ge" + name] = GIVES(u8(ONE(T) >= TWO(T)));
  t["setp.eq" + name] = GIVES(u8(ONE(T) == TWO(T)));
  t["setp.ne" + name] = GIVES(u8(ONE(T) != TWO(T)));
  // to the other integers; T is what is read
  t["cvt.u16" + name] = GIVES(u16(ONE(T)));
  t["cvt.s16" + name] = GIVES(s16(ONE(T)));
  t["cvt.u32" + name] = GIVES(u32(ONE(T)));
  t["cvt.s32" + name] = GIVES(s32(ONE(T)));
  t["cvt.u64" + name] = GIVES(u64(ONE(T)));
  t["cvt.s64" + name] = GIVES(s64(ONE(T)));
  t["cvt.u8" + name] = GIVES(u8(ONE(T)));
  t["cvt.s8" + name] = GIVES(int8_t(ONE(T)));
}

template <class T>
static void words(Table& t, const std::string& name) {
  t["and" + name] = GIVES(T(ONE(T) & TWO(T)));
  t["or" + name] = GIVES(T(ONE(T) | TWO(T)));
  t["xor" + name] = GIVES(T(ONE(T) ^ TWO(T)));
  t["not" + name] = GIVES(T(~ONE(T)));
  t["shl" + name] = GIVES(T(TWO(u32) < 8 * sizeof(T) ? ONE(T) << TWO(u32) : 0));
  t["shr" + name] = GIVES(T(TWO(u32) < 8 * sizeof(T) ? ONE(T) >> TWO(u32) : 0));
  t["setp.eq" + name] = GIVES(u8(ONE(T) == TWO(T)));
  t["setp.ne" + name] = GIVES(u8(ONE(T) != TWO(T)));
}

// Four bytes of two words, each chosen by a digit; its high bit takes the sign alone.
static u32 permuted(u32 a, u32 b, u32 digits) {
  const u64 both = a | u64(b) << 32;
  u32 made = 0;
  for (int k = 0; k < 4; ++k) {
    const u32 digit = digits >> 4 * k & 15;
    u32 byte = u32(both >> 8 * (digit & 7)) & 255;
    if (digit & 8) byte = byte & 128 ? 255 : 0;
    made |= byte << 8 * k;
  }
  return made;
}

static Table table() {
  Table t;
  floats<float, float>(t, ".f32", ".rn");
  floats<double, double>(t, ".f64", ".rn");
  wide_floats<float>(t, ".f32");
  wide_floats<double>(t, ".f64");
  halves<f16>(t, ".f16");
  halves<bf16>(t, ".bf16");
  integers<u16>(t, ".u16");
  integers<s16>(t, ".s16");
  integers<u32>(t, ".u32");
  integers<s32>(t, ".s32");
  integers<u64>(t, ".u64");
  integers<s64>(t, ".s64");
  words<u16>(t, ".b16");
  words<u32>(t, ".b32");
  words<u64>(t, ".b64");
  t["cvt.f64.f32"] = GIVES(double(ONE(float)));
  t["cvt.rn.f32.f64"] = GIVES(float(ONE(double)));
  // estimates of a GPU, exact here; of `div.full`, within two ulp there
  t["div.full.f32"] = t["div.rn.f32"];
  t["rcp.approx.f32"] = t["rcp.approx.ftz.f32"] = t["rcp.rn.f32"];
  t["ex2.approx.f32"] = t["ex2.approx.ftz.f32"] =
      GIVES(float(std::exp2(double(ONE(float)))));
  t["lg2.approx.f32"] = t["lg2.approx.ftz.f32"] =
      GIVES(float(std::log2(double(ONE(float)))));
  t["sqrt.approx.f32"] = GIVES(near_root(ONE(float)));
  t["mul.wide.s32"] = GIVES(s64(ONE(s32)) * TWO(s32));
  t["mul.wide.u32"] = GIVES(u64(ONE(u32)) * TWO(u32));
  t["mul.wide.s16"] = GIVES(s32(ONE(s16)) * TWO(s16));
  t["mul.wide.u16"] = GIVES(u32(ONE(u16)) * TWO(u16));
  t["mad.wide.s32"] = GIVES(u64(s64(ONE(s32)) * TWO(s32)) + THREE(u64));
  t["mad.wide.u32"] = GIVES(u64(ONE(u32)) * TWO(u32) + THREE(u64));
  t["mul.hi.u32"] = GIVES(u32(u64(ONE(u32)) * TWO(u32) >> 32));
  t["mul.hi.s32"] = GIVES(s32(s64(ONE(s32)) * TWO(s32) >> 32));
  t["mul.hi.u64"] = GIVES(u64((unsigned __int128)ONE(u64) * TWO(u64) >> 64));
  t["mul.hi.s64"] = GIVES(s64((__int128)ONE(s64) * TWO(s64) >> 64));
  t["bfe.u32"] = GIVES(u32(TWO(u8) > 31 ? 0
                           : u64(ONE(u32)) >> TWO(u8) & ((1ull << THREE(u8)) - 1)));
  t["and.pred"] = GIVES(u8(ONE(u8) && TWO(u8)));
  t["or.pred"] = GIVES(u8(ONE(u8) || TWO(u8)));
  t["xor.pred"] = GIVES(u8(ONE(u8) != TWO(u8)));
  t["prmt.b32"] = GIVES(permuted(ONE(u32), TWO(u32), THREE(u32)));
  t["not.pred"] = GIVES(u8(!ONE(u8)));
  t["mov.pred"] = GIVES(ONE(u8));
  for (const char* n : {".b16", ".u16", ".s16", ".f16", ".bf16"}) {
    t[std::string("mov") + n] = GIVES(ONE(u16));
    t[std::string("selp") + n] = GIVES(THREE(u8) ? ONE(u16) : TWO(u16));
  }
  for (const char* n : {".b32", ".u32", ".s32", ".f32"}) {
    t[std::string("mov") + n] = GIVES(ONE(u32));
    t[std::string("selp") + n] = GIVES(THREE(u8) ? ONE(u32) : TWO(u32));
  }
  for (const char* n : {".b64", ".u64", ".s64", ".f64"}) {
    t[std::string("mov") + n] = GIVES(ONE(u64));
    t[std::string("selp") + n] = GIVES(THREE(u8) ? ONE(u64) : TWO(u64));
  }
  // {low, high} = word; word = {low, high}: halves of 32 and of 64 bits
  t["split.b32"] = DOES(to[0] = ONE(u16); to[1] = x[0] >> 16 & 0xffff);
  t["split.b64"] = DOES(to[0] = ONE(u32); to[1] = x[0] >> 32);
  t["join.b32"] = GIVES(u32(ONE(u16)) | u32(TWO(u16)) << 16);
  t["join.b64"] = GIVES(u64(ONE(u32)) | u64(TWO(u32)) << 32);
  return t;
}
