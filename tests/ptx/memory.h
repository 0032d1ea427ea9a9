// The memory that a kernel may use: regions of the host, and what became of them.
#pragma once
#include <algorithm>
#include <vector>

#include "values.h"

enum Fault : u32 {
  OUT_OF_RANGE,
  MISALIGNED,
  UNWRITTEN,
  RACE,
  BARRIER,
  WARP,
  REGISTER,
  ENDLESS,
};

struct Found {
  u32 kind, instr, program, thread, other, by;
  u64 address;
};

// `words`: words of it may be all ones, which otherwise is what fresh memory holds.
struct Region {
  u64 base, size, words;
  u64 loaded, stored, loads, stores;  // bytes; sectors that warps' accesses touch
};

class Memory {
 public:
  Memory(Region* regions, u32 n) : regions_(regions), n_(n) {}

  // The region of an access, or null.
  Region* find(u64 address, u64 size) {
    if (last_ && inside(*last_, address, size)) return last_;
    Region* end = regions_ + n_;
    Region* after = std::upper_bound(
        regions_, end, address, [](u64 a, const Region& r) { return a < r.base; });
    if (after == regions_ || !inside(after[-1], address, size)) return nullptr;
    return last_ = after - 1;
  }

 private:
  static bool inside(const Region& r, u64 address, u64 size) {
    return address >= r.base && address + size <= r.base + r.size;
  }

  Region* regions_;
  u32 n_;
  Region* last_ = nullptr;
};

// A warp's access: 32-byte sectors that it touches, counted once each.
class Sectors {
 public:
  static constexpr u64 BYTES = 32;

  void add(u64 address, u64 size) {
    for (u64 s = address / BYTES; s <= (address + size - 1) / BYTES; ++s)
      touched_.push_back(s);
  }

  u64 count() {
    std::sort(touched_.begin(), touched_.end());
    u64 n = std::unique(touched_.begin(), touched_.end()) - touched_.begin();
    touched_.clear();
    return n;
  }

 private:
  std::vector<u64> touched_;
};
