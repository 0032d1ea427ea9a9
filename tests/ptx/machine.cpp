// A machine for kernels of PTX, which runs them in this process on memory of the host.
//
// With seed 0 programs run in order, and the threads of a warp together: those that are
// furthest behind first, as far as branches allow. With another seed any thread of any
// of some programs may go on at any access of memory. Accesses are ordered by what the
// kernel says (order.h), not by how they came here. Stores are seen at once.
#include <random>
#include <string>
#include <unordered_map>

#include "arithmetic.h"
#include "memory.h"
#include "order.h"

enum Kind : s32 {
  COMPUTE, BRANCH, CHOICE, EXIT, LOAD, STORE, LOAD_SHARED, STORE_SHARED, ATOMIC, SYNC,
  SHUFFLE, REDUX, LOAD_MATRIX, STORE_MATRIX,
};
enum Flag : s32 { ACQUIRE = 1, RELEASE = 2 };
// How what is written of operands makes what is written of results.
enum Shape : s32 { WHOLE, SELECT, COPY, HALVES, JOIN, SPLIT, PACK, PERMUTE, SHIFT };
// Which of a register's four parts of 16 bits are written.
constexpr u8 ALL = 15;

// One instruction, as text.py encodes it. Operands are numbers of registers; a constant
// is a register too. `what`: of COMPUTE, which function; of a shuffle or a reduction,
// which; of a choice, how many targets; of matrices, whether they are transposed.
struct Instr {
  s32 kind, what, guard, negated, results, operands, to[8], from[8];
  s64 offset;
  s32 width, extended, target, flags;
};

struct Task {
  const Instr* code;
  const s32* targets;
  const s32* uses;          // of a load: where what it loads is used, after -1 the next's
  const s32* first_use;     // by instruction
  const u64* initial;       // registers, of which constants are written
  const u8* written;
  Region* regions;
  u64 seed;
  u32 count, registers, tid, ctaid, grid, threads, shared, together, region_count;
};

struct Result {
  Found found[16];
  u64 faults, instructions, atomics, barriers;
};

namespace {

struct Named {
  std::vector<Compute> functions;
  std::unordered_map<std::string, s32> numbers;
  Named() {
    for (auto& [name, function] : table()) {
      numbers[name] = s32(functions.size());
      functions.push_back(function);
    }
  }
};
const Named& named() {
  static const Named made;
  return made;
}

enum State : u8 { READY, AT_BARRIER, IN_WARP, DONE };

struct Thread {
  u32 id = 0, pc = 0, release = 1;
  State state = READY;
  std::vector<u64> registers;
  std::vector<u8> written;
  std::shared_ptr<Clock> own;
};

struct Program {
  u32 id, phase = 1;
  std::vector<Thread> threads;
  std::vector<u8> shared, shared_written;
  View view;
};

u64 shuffled(s32 what, u64 lane, u64 b) {
  switch (what) {
    case 0: return lane ^ b;
    case 1: return b;
    case 2: return lane < b ? lane : lane - b;
    default: return lane + b > 31 ? lane : lane + b;
  }
}

u32 reduced(s32 what, u32 a, u32 b) {
  switch (what) {
    case 0: return a & b;
    case 1: return a | b;
    case 2: return a ^ b;
    case 3: return a + b;
    case 4: return std::min(a, b);
    case 5: return std::max(a, b);
    case 6: return u32(std::min(s32(a), s32(b)));
    default: return u32(std::max(s32(a), s32(b)));
  }
}

u64 combined(s32 what, u64 a, u64 b) {
  switch (what) {
    case 0: return a + b;
    case 1: return a & b;
    case 2: return a | b;
    case 3: return a ^ b;
    case 4: return std::min(a, b);
    case 5: return std::max(a, b);
    default: return b;  // an exchange
  }
}

// A race of a program's threads with each other. What threads read counts only if they
// use it: all threads load a lane's number, and one of them stores the new one.
struct Suspect {
  Found found;
  u32 read;
  Threads readers;
};

class Machine {
 public:
  Machine(const Task& task, Result& result)
      : t_(task), r_(result), memory_(task.regions, task.region_count),
        random_(task.seed), order_(task.grid),
        used_(u64(task.grid) * task.threads * task.count) {
    for (u32 k = 0; k < t_.grid; ++k) order_[k] = k;
    if (t_.seed) std::shuffle(order_.begin(), order_.end(), random_);
  }

  void run() {
    u32 next = 0;
    std::vector<std::unique_ptr<Program>> live;
    while (!stopped_ && (next < t_.grid || !live.empty())) {
      while (next < t_.grid && live.size() < (t_.seed ? t_.together : 1))
        live.push_back(begin(order_[next++]));
      size_t which = t_.seed ? random_() % live.size() : 0;
      Program& p = *live[which];
      bool ran = t_.seed ? some_thread(p) : all_warps(p);
      if (!ran && !unblock(p)) live.erase(live.begin() + which);
    }
    for (const Suspect& s : suspects_)
      if (uses(s)) report(s.found);
  }

 private:
  std::unique_ptr<Program> begin(u32 id) {
    auto p = std::make_unique<Program>();
    p->id = id;
    p->threads.resize(t_.threads);
    p->shared.assign(t_.shared, 0xff);
    p->shared_written.assign(t_.shared, 0);
    auto clock = std::make_shared<Clock>();
    clock->known.assign(t_.grid, 0);
    p->view = clock;
    for (u32 k = 0; k < t_.threads; ++k) {
      Thread& th = p->threads[k];
      th.id = k;
      th.registers.assign(t_.initial, t_.initial + t_.registers);
      th.written.assign(t_.written, t_.written + t_.registers);
      th.registers[t_.tid] = k;
      th.registers[t_.ctaid] = id;
    }
    return p;
  }

  // ------------------------------------------------------------ who goes on

  bool all_warps(Program& p) {
    bool ran = false;
    for (u32 first = 0; first < t_.threads; first += 32)
      while (!stopped_ && together(p, first)) ran = true;
    return ran;
  }

  // One instruction of those threads of a warp that are furthest behind.
  bool together(Program& p, u32 first) {
    u32 pc = ~0u;
    for (u32 k = first; k < first + 32; ++k)
      if (p.threads[k].state == READY) pc = std::min(pc, p.threads[k].pc);
    if (pc == ~0u) return false;
    for (u32 k = first; k < first + 32; ++k) {
      Thread& th = p.threads[k];
      if (th.state == READY && th.pc == pc) step(p, th);
    }
    if (touched_) {
      (t_.code[pc].kind == LOAD ? touched_->loads : touched_->stores) +=
          sectors_.count();
      touched_ = nullptr;
    }
    return true;
  }

  // A thread, up to its next access of memory or a few further.
  bool some_thread(Program& p) {
    u32 first = random_() % t_.threads;
    for (u32 k = 0; k < t_.threads; ++k) {
      Thread& th = p.threads[(first + k) % t_.threads];
      if (th.state != READY) continue;
      while (!stopped_ && th.state == READY) {
        s32 kind = t_.code[th.pc].kind;
        bool memory = kind >= LOAD && kind <= ATOMIC;
        step(p, th);
        if (memory && random_() % 8 == 0) break;
        if (kind == ATOMIC && random_() % 2) break;
      }
      touched_ = nullptr;
      sectors_.count();
      return true;
    }
    return false;
  }

  // Let threads that wait for each other go on; false if all are done.
  bool unblock(Program& p) {
    bool any = false, done = true;
    for (u32 first = 0; first < t_.threads; first += 32) {
      Thread& one = *std::find_if(p.threads.begin() + first, p.threads.begin() + first + 31,
                                  [](Thread& th) { return th.state == IN_WARP; });
      if (one.state != IN_WARP) continue;
      u32 there = 0;
      for (u32 k = first; k < first + 32; ++k)
        there += p.threads[k].state == IN_WARP && p.threads[k].pc == one.pc;
      if (there < 32) {
        fault(WARP, p, one, 0);
        stopped_ = true;
        return false;
      }
      exchange(p, first);
      any = true;
    }
    if (any) return true;
    u32 waiting = 0, pc = ~0u;
    bool elsewhere = false;
    for (Thread& th : p.threads) {
      done &= th.state == DONE;
      if (th.state != AT_BARRIER) continue;
      ++waiting;
      elsewhere |= pc != ~0u && th.pc != pc;
      pc = th.pc;
    }
    if (done) return false;
    if (waiting < t_.threads || elsewhere)
      for (Thread& th : p.threads)
        if (th.state == AT_BARRIER) {
          fault(BARRIER, p, th, 0);
          break;
        }
    barrier(p);
    return true;
  }

  void barrier(Program& p) {
    ++r_.barriers;
    std::shared_ptr<Clock> all;
    for (Thread& th : p.threads) {
      if (th.own) {
        if (!all) all = std::make_shared<Clock>(*p.view);
        all->join(*th.own);
        th.own = nullptr;
      }
      if (th.state == AT_BARRIER) {
        th.state = READY;
        ++th.pc;
      }
    }
    if (all) p.view = all;
    ++p.phase;
  }

  void exchange(Program& p, u32 first) {
    const Instr& i = t_.code[p.threads[first].pc];
    if (i.kind == LOAD_MATRIX || i.kind == STORE_MATRIX) return matrices(p, first, i);
    u32 given[32], all = 0;
    u8 written[32], every = ALL;
    for (u32 k = 0; k < 32; ++k) {
      Thread& th = p.threads[first + k];
      given[k] = u32(th.registers[i.from[0]]);
      written[k] = th.written[i.from[0]];
      every &= written[k];
      all = k && i.kind == REDUX ? reduced(i.what, all, given[k]) : given[k];
    }
    for (u32 k = 0; k < 32; ++k) {
      Thread& th = p.threads[first + k];
      if (i.kind == SHUFFLE) {
        u64 from = shuffled(i.what, k, value(p, th, i.from[1])) & 31;
        set(th, i.to[0], given[from], written[from]);
      } else {
        set(th, i.to[0], all, every);
      }
      th.state = READY;
      ++th.pc;
    }
  }

  // Matrices of 8 x 8 numbers of 16 bits, between registers and shared memory. Lane
  // 8 m + r has the address of row r of matrix m; its numbers 2 j and 2 j + 1 are in
  // lane 4 r + j, or where it is transposed, its numbers c in lane 4 c + r / 2.
  void matrices(Program& p, u32 first, const Instr& i) {
    const bool load = i.kind == LOAD_MATRIX, turned = i.what;
    const u32 width = turned ? 2 : 4, count = load ? i.results : i.operands - 1;
    for (u32 row = 0; row < 8 * count; ++row) {
      const u32 r = row % 8;
      Thread& owner = p.threads[first + row];
      const u64 address = u32(value(p, owner, i.from[0]) + i.offset);
      if (address % 16) fault(MISALIGNED, p, owner, address);
      u8* place = within(p, address, 16);
      if (!place) fault(OUT_OF_RANGE, p, owner, address);
      for (u32 c = 0; place && c < 16 / width; ++c) {
        Thread& th = p.threads[first + (turned ? 4 * c + r / 2 : 4 * r + c)];
        const u32 half = turned ? r % 2 : 0;
        const u64 at = address + c * width;
        const u64 named = 1ull << 63 | u64(p.id) << 32 | at;
        Asker who{p.id, th.id, p.phase, th.release, th.pc, th.own ? &*th.own : &*p.view};
        const u8 bits = turned ? 1 << half : 3;
        u8* written = &p.shared_written[at];
        if (load) {
          race(all_.read(named, width, who), p, th, at, false);
          const s32 to = i.to[row / 8];
          u8* word = reinterpret_cast<u8*>(&th.registers[to]) + 2 * half;
          std::memcpy(word, place + c * width, width);
          const bool whole = std::all_of(written, written + width, [](u8 x) { return x; });
          th.written[to] = (th.written[to] & ~bits) | (ALL & ~3) | (whole ? bits : 0);
          continue;
        }
        const s32 which = i.from[1 + row / 8];
        u8* word = reinterpret_cast<u8*>(&th.registers[which]) + 2 * half;
        const Access* other = all_.write(named, width, who, false);
        if (!copied(other, p, th) || std::memcmp(place + c * width, word, width))
          race(other, p, th, at, true);
        std::memcpy(place + c * width, word, width);
        std::fill_n(written, width, (th.written[which] & bits) == bits);
      }
    }
    for (u32 k = 0; k < 32; ++k) {
      p.threads[first + k].state = READY;
      ++p.threads[first + k].pc;
    }
  }

  // ------------------------------------------------------------ one instruction

  void step(Program& p, Thread& th) {
    if (++r_.instructions > 4'000'000'000ull) {
      fault(ENDLESS, p, th, 0);
      stopped_ = true;
      return;
    }
    const Instr& i = t_.code[th.pc];
    if (i.guard >= 0 && bool(value(p, th, i.guard) & 1) == bool(i.negated)) {
      ++th.pc;
      return;
    }
    used_[place(p.id, th.id, th.pc)] = true;
    switch (i.kind) {
      case COMPUTE: {
        u64 from[8], to[8];
        u8 parts[2];
        written(th, i, parts);
        for (s32 k = 0; k < i.operands; ++k) from[k] = th.registers[i.from[k]];
        named().functions[i.what](to, from);
        for (s32 k = 0; k < i.results; ++k) set(th, i.to[k], to[k], parts[k]);
        break;
      }
      case BRANCH: th.pc = i.target; return;
      case CHOICE: {
        u64 which = value(p, th, i.from[0]);
        if (which >= u64(i.what)) {
          fault(OUT_OF_RANGE, p, th, which);
          stopped_ = true;
          return;
        }
        th.pc = t_.targets[i.target + which];
        return;
      }
      case EXIT: th.state = DONE; return;
      case SYNC: th.state = AT_BARRIER; return;
      case SHUFFLE:
      case REDUX:
      case LOAD_MATRIX:
      case STORE_MATRIX: th.state = IN_WARP; return;
      default: access(p, th, i);
    }
    ++th.pc;
  }

  // What a predicate, an address or memory gets must have been written. What is only
  // computed with need not: of a warp, some lanes may have nothing to add.
  u64 value(Program& p, Thread& th, s32 which) {
    if (th.written[which] != ALL) fault(REGISTER, p, th, which);
    return th.registers[which];
  }

  // Of a result, the parts that come from what is written. Compilers compute with
  // halves of which one has no number.
  static void written(const Thread& th, const Instr& i, u8* to) {
    u8 of[4];
    for (s32 k = 0; k < std::min(i.operands, 4); ++k) of[k] = th.written[i.from[k]];
    const u8 half = i.width / 4, low = (1 << half) - 1;  // of a pair, in parts
    u8 every = ALL;
    for (s32 k = 0; k < i.operands; ++k) every &= of[k];
    switch (i.flags) {
      case SELECT: every = of[2] & (th.registers[i.from[2]] ? of[0] : of[1]); break;
      case JOIN:
        to[0] = (of[0] & low) | (of[1] & low) << half | (i.width == 4 ? 12 : 0);
        return;
      case SPLIT:
        to[0] = (of[0] & low) == low ? ALL : 0;
        to[1] = (of[0] >> half & low) == low ? ALL : 0;
        return;
      case PACK: to[0] = (of[1] ? 1 : 0) | (of[0] ? 2 : 0) | 12; return;
      case PERMUTE:
        to[0] = of[2] == ALL ? ALL : 0;
        for (s32 k = 0; k < 4; ++k) {
          const u64 digit = th.registers[i.from[2]] >> 4 * k;
          if (!(of[digit >> 2 & 1] >> (digit >> 1 & 1) & 1)) to[0] &= ~(1 << k / 2);
        }
        return;
      case HALVES:
        to[0] = every;
        if (i.results == 2) to[0] = every & 1 ? ALL : 0, to[1] = every & 2 ? ALL : 0;
        return;
      case COPY: to[0] = every; return;
      case SHIFT: {  // to the right; what comes in is zeros, or the sign
        const u64 parts = i.width / 2, by = th.registers[i.from[1]];
        to[0] = of[1] == ALL ? ALL : 0;
        for (u64 k = 0; k < parts; ++k) {
          for (u64 bit : {16 * k + by, 16 * k + by + 15}) {
            if (!(of[0] >> std::min(bit / 16, parts - 1) & 1)) to[0] &= ~(1 << k);
          }
        }
        return;
      }
      default: break;
    }
    to[0] = to[1] = every == ALL ? ALL : 0;
  }

  static void set(Thread& th, s32 which, u64 value, u8 written = ALL) {
    th.registers[which] = value;
    th.written[which] = written;
  }

  // ------------------------------------------------------------ memory

  void access(Program& p, Thread& th, const Instr& i) {
    bool shared = i.kind == LOAD_SHARED || i.kind == STORE_SHARED;
    bool load = i.kind == LOAD || i.kind == LOAD_SHARED;
    u64 address = value(p, th, i.from[0]) + i.offset;
    if (shared) address = u32(address);
    u64 parts = load ? i.results : i.kind == ATOMIC ? 1 : i.operands - 1;
    u64 size = parts * i.width;
    u8* place = shared ? within(p, address, size) : anywhere(address, size, i, load);
    if (address % size) fault(MISALIGNED, p, th, address);
    if (!place) {
      fault(OUT_OF_RANGE, p, th, address);
      for (s32 k = 0; k < i.results; ++k) set(th, i.to[k], 0);
      return;
    }
    Asker who{p.id, th.id, p.phase, th.release, th.pc, th.own ? &*th.own : &*p.view};
    u64 named = shared ? 1ull << 63 | u64(p.id) << 32 | address : address;
    if (i.kind == ATOMIC) {
      ++r_.atomics;
      if (i.flags & ACQUIRE) acquire(p, th, address);
      who.clock = th.own ? &*th.own : &*p.view;
      race(all_.write(named, u32(size), who, true), p, th, address, true);
      u64 before = 0;
      std::memcpy(&before, place, size);
      u64 after = combined(i.what, before, value(p, th, i.from[1]));
      std::memcpy(place, &after, size);
      if (i.results) set(th, i.to[0], before);
      if (i.flags & RELEASE) release(p, th, address);
      return;
    }
    if (load) {
      race(all_.read(named, u32(size), who), p, th, address, false);
      for (u64 k = 0; k < parts; ++k) {
        u64 word = 0;
        std::memcpy(&word, place + k * i.width, i.width);
        bool fresh = unwritten(p, address + k * i.width, i.width, word, shared);
        if (fresh && !shared) fault(UNWRITTEN, p, th, address + k * i.width);
        if (i.extended && i.width < 8) {
          u32 rest = 64 - 8 * i.width;
          word = u64(s64(word << rest) >> rest);
        }
        set(th, i.to[k], word, fresh && shared ? 0 : ALL);
      }
      return;
    }
    const Access* other = all_.write(named, u32(size), who, false);
    bool copies = shared && copied(other, p, th);
    for (u64 k = 0; k < parts; ++k) {
      u64 word = th.registers[i.from[k + 1]];
      copies = copies && !std::memcmp(place + k * i.width, &word, i.width);
    }
    if (!copies) race(other, p, th, address, true);
    for (u64 k = 0; k < parts; ++k) {
      s32 which = i.from[k + 1];
      u64 word = th.registers[which], at = k * i.width;
      std::memcpy(place + at, &word, i.width);
      bool whole = true;
      for (s32 part = 0; part < std::max(i.width / 2, 1); ++part)
        whole &= th.written[which] >> part & 1;
      if (shared)
        std::fill_n(p.shared_written.begin() + address + at, i.width, whole);
      else if (!whole)
        fault(REGISTER, p, th, which);
    }
  }

  // Triton's threads that hold the same elements all write them to shared memory.
  static bool copied(const Access* other, const Program& p, const Thread& th) {
    return other && other->writes && other->program == p.id && other->instr == th.pc;
  }

  static u8* within(Program& p, u64 address, u64 size) {
    return address + size <= p.shared.size() ? &p.shared[address] : nullptr;
  }

  u8* anywhere(u64 address, u64 size, const Instr& i, bool load) {
    Region* region = memory_.find(address, size);
    if (!region) return nullptr;
    (load ? region->loaded : region->stored) += size;
    if (i.kind != ATOMIC) {
      touched_ = region;
      sectors_.add(address, size);
    }
    return reinterpret_cast<u8*>(address);
  }

  bool unwritten(Program& p, u64 address, u32 width, u64 word, bool shared) {
    if (shared) {
      for (u32 k = 0; k < width; ++k)
        if (!p.shared_written[address + k]) return true;
      return false;
    }
    u64 ones = width == 8 ? ~0ull : (1ull << 8 * width) - 1;
    return width > 1 && word == ones && !memory_.find(address, width)->words;
  }

  void acquire(Program& p, Thread& th, u64 address) {
    auto found = released_.find(address);
    if (found == released_.end()) return;
    if (!th.own) th.own = std::make_shared<Clock>(*p.view);
    th.own->join(found->second);
  }

  void release(Program& p, Thread& th, u64 address) {
    Clock& c = released_[address];
    if (c.known.empty()) c.known.assign(t_.grid, 0);
    c.join(th.own ? *th.own : *p.view);
    c.known[p.id] = std::max(c.known[p.id], p.phase - 1);
    c.threads[u64(p.id) << 32 | th.id] = th.release++;
  }

  // ------------------------------------------------------------ what is wrong

  void race(const Access* other, Program& p, Thread& th, u64 address, bool writes) {
    if (!other) return;
    Found found{RACE, th.pc, p.id, th.id, other->instr, other->program, address};
    if (other->program != p.id || (writes && other->writes)) return report(found);
    u32 read = writes ? other->instr : th.pc;
    Threads readers = other->threads;
    if (writes) readers.reset(th.id);
    else readers.reset().set(th.id);
    for (Suspect& s : suspects_)
      if (s.read == read && s.found.program == p.id) {
        s.readers |= readers;
        return;
      }
    suspects_.push_back({found, read, readers});
  }

  size_t place(u32 program, u32 thread, u32 pc) {
    return (u64(program) * t_.threads + thread) * t_.count + pc;
  }

  bool uses(const Suspect& s) {
    for (u32 thread = 0; thread < t_.threads; ++thread)
      if (s.readers[thread])
        for (const s32* at = t_.uses + t_.first_use[s.read]; *at >= 0; ++at)
          if (used_[place(s.found.program, thread, *at)]) return true;
    return false;
  }

  void fault(Fault kind, Program& p, Thread& th, u64 address) {
    report({kind, th.pc, p.id, th.id, ~0u, ~0u, address});
  }

  void report(const Found& found) {
    for (u64 k = 0; k < std::min<u64>(r_.faults, 16); ++k)
      if (r_.found[k].kind == found.kind && r_.found[k].instr == found.instr) return;
    if (r_.faults < 16) r_.found[r_.faults] = found;
    ++r_.faults;
  }

  const Task& t_;
  Result& r_;
  Memory memory_;
  std::mt19937_64 random_;
  std::vector<u32> order_;
  Order all_;
  std::unordered_map<u64, Clock> released_;
  std::vector<bool> used_;  // by thread and instruction
  std::vector<Suspect> suspects_;
  Sectors sectors_;
  Region* touched_ = nullptr;
  bool stopped_ = false;
};

}  // namespace

extern "C" {
// The number of what an instruction without memory computes, or -1.
s32 ptx_compute(const char* name) {
  auto found = named().numbers.find(name);
  return found == named().numbers.end() ? -1 : found->second;
}

void ptx_run(const Task* task, Result* result) { Machine(*task, *result).run(); }
}
