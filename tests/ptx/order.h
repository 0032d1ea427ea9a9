// Which accesses come one before another, whatever the order in which threads ran: by
// program order, by barriers within a program, by atomics that release and acquire.
// Two accesses of the same bytes, one of them a write, that no such chain orders are a
// race, though this run had its numbers right.
#pragma once
#include <algorithm>
#include <bitset>
#include <memory>
#include <unordered_map>
#include <vector>

#include "values.h"

// Threads of a program.
using Threads = std::bitset<256>;

// What a thread knows of others. `known`: by program the last phase (between barriers)
// of which all accesses come before. `threads`: by thread, its accesses up to its n-th
// release.
struct Clock {
  std::vector<u32> known;
  std::unordered_map<u64, u32> threads;

  void join(const Clock& other) {
    for (size_t i = 0; i < known.size(); ++i)
      known[i] = std::max(known[i], other.known[i]);
    for (auto& [thread, n] : other.threads)
      threads[thread] = std::max(threads[thread], n);
  }
};
using View = std::shared_ptr<const Clock>;

// An access of a program in its last phase with such: by `threads`, of which `thread`
// was the first. `older`: the last phase before, in which it did the same.
struct Access {
  u32 program, thread, phase, release, instr, older;
  bool writes;
  Threads threads;
};

// Who asks. `own`: what a thread has acquired since its program's last barrier.
struct Asker {
  u32 program, thread, phase, release, instr;
  const Clock* clock;
};

class Order {
 public:
  // The access that races with a read or a write, or null.
  const Access* read(u64 address, u32 size, const Asker& who) {
    const Access* found = nullptr;
    for (u64 at = address / GRAIN; at <= (address + size - 1) / GRAIN; ++at) {
      Cell& cell = cells_[at];
      for (const Access& w : cell.writes)
        if (!before(w, who)) found = kept(w);
      note(cell.reads, who, false);
    }
    return found;
  }

  const Access* write(u64 address, u32 size, const Asker& who, bool atomic) {
    const Access* found = nullptr;
    for (u64 at = address / GRAIN; at <= (address + size - 1) / GRAIN; ++at) {
      Cell& cell = cells_[at];
      if (!(atomic && cell.atomic))
        for (const Access& w : cell.writes)
          if (!before(w, who)) found = kept(w);
      for (const Access& r : cell.reads)
        if (!before(r, who)) found = kept(r);
      cell.reads.clear();
      if (!(atomic && cell.atomic)) cell.writes.clear();
      cell.atomic = atomic;
      note(cell.writes, who, true);
    }
    return found;
  }

  void clear() { cells_.clear(); }

 private:
  static constexpr u64 GRAIN = 1;  // bytes of the smallest elements
  struct Cell {
    std::vector<Access> writes, reads;  // one of each program
    bool atomic = false;
  };

  static bool before(const Access& a, const Asker& who) {
    const Clock& c = *who.clock;
    if (a.program == who.program) {
      if (a.phase < who.phase) return true;
      if (a.threads.count() == 1 && a.thread == who.thread) return true;
    } else if (c.known[a.program] >= a.phase) {
      return true;
    }
    if (c.threads.empty() || a.threads.count() > 1) return false;
    auto seen = c.threads.find(u64(a.program) << 32 | a.thread);
    if (seen == c.threads.end() || seen->second < a.release) return false;
    return a.program == who.program || c.known[a.program] >= a.older;
  }

  static void note(std::vector<Access>& list, const Asker& who, bool writes) {
    Access now{who.program, who.thread, who.phase, who.release, who.instr, 0, writes, {}};
    now.threads.set(who.thread);
    for (Access& a : list) {
      if (a.program != who.program) continue;
      if (a.phase < who.phase) {
        now.older = a.phase;
        a = now;
      } else {
        a.threads.set(who.thread);
        a.release = std::max(a.release, who.release);
      }
      return;
    }
    list.push_back(now);
  }

  const Access* kept(const Access& a) { return &(last_ = a); }

  std::unordered_map<u64, Cell> cells_;
  Access last_;
};
