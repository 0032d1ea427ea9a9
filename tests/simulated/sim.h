// The state of the simulated accelerator: streams, events, memory, graphs.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace sim {

namespace py = pybind11;
using Key = std::pair<int, int64_t>; // device, stream
using PoolId = std::pair<int64_t, int64_t>;
constexpr int DEVICES = 2;

// One mutex for everything. Who waits for it lets go of Python's lock, so that work
// that runs under it may take that.
struct Lock {
  Lock();
  ~Lock();
};

struct Counters {
  int64_t launches = 0;      // by the host, outside of a capture
  int64_t executed = 0;      // kernels carried out, those of a replay too
  int64_t captured = 0;      // launches that a capture recorded
  int64_t captures = 0;      // captures that ended well
  int64_t replays = 0;
  int64_t h2d = 0;           // copies from the host
  int64_t h2d_bytes = 0;
  int64_t h2d_blocking = 0;  // those of them that the host waits for
  int64_t d2h = 0;
  int64_t d2d = 0;
  int64_t allocations = 0;
  int64_t frees = 0;
  int64_t pinned = 0;        // allocations of pinned memory
  int64_t syncs = 0;         // waits of the host: streams, events, .item(), copies
  int64_t blocked = 0;       // those that found unfinished work
};

struct Pool;
struct Graph;

struct Block {
  size_t size = 0, asked = 0;
  Key stream;
  std::weak_ptr<Pool> pool;
  bool pooled = false;
  std::set<Key> users{}; // other streams that it was recorded on
};

struct Pool {
  PoolId id;
  int64_t bytes = 0;
  std::multimap<size_t, std::pair<void*, Key>> unused;
  ~Pool();
};

// How many captures and graphs use a pool. One that none uses any more is not used again
// (torch's allocators keep its id until their caches are emptied).
struct PoolUse {
  std::weak_ptr<Pool> memory;
  int64_t uses = 0;
};

struct EventState {
  int64_t version = 0; // of the last record
  int64_t done = 0;
  Key stream;
  std::weak_ptr<Graph> graph; // where the last record was captured
};

struct Op {
  std::function<void()> run;                // work, or nothing
  std::shared_ptr<EventState> record, wait; // a mark, or an event to wait for
  int64_t version = 0;
};

struct StreamState {
  std::deque<Op> queue;
  std::shared_ptr<Graph> graph; // into which it captures
};

enum class Mode { Global, Thread, Relaxed };

struct Graph {
  std::vector<std::function<void()>> ops;
  std::shared_ptr<Pool> pool;
  Key origin;
  std::set<Key> streams;   // that capture into it
  std::set<Key> unjoined;  // whose work the origin has not waited for
  Mode mode = Mode::Global;
  std::thread::id thread;
  std::string broken;      // what made the capture invalid
  bool capturing = false, ready = false;
};

struct State {
  std::recursive_mutex mutex;
  Counters counters;
  std::map<std::string, int64_t> ops; // fallback ops by name
  std::map<Key, StreamState> streams;
  int64_t next_stream[DEVICES] = {1, 1};
  std::map<void*, Block> blocks;
  std::map<std::pair<Key, size_t>, std::vector<void*>> cache;
  std::map<void*, size_t> pinned;
  std::multimap<size_t, void*> pinned_cache;
  int64_t allocated[DEVICES] = {0, 0};
  std::map<PoolId, PoolUse> pools;
  int64_t next_pool = 1;
  std::vector<std::shared_ptr<Graph>> capturing;
  bool drawing[DEVICES] = {false, false}; // is the default generator in a capture?
  int64_t fail_allocation = 0, fail_launch = 0;
  bool available = true;
};

State& state();
int& device();             // of this thread
int64_t& current(int d);   // the stream of this thread on device d
inline Key here(int d) { return {d, current(d)}; }

// Is this thread carrying out queued work? What it calls then runs at once.
int& executing();

// Work that no mode of the caller's thread may see.
struct Execution {
  Execution();
  ~Execution();
  c10::impl::ExcludeDispatchKeyGuard python, autograd;
};

void push(Key k, std::function<void()> run); // to a stream, or to its capture
void later(Key k, std::function<void()> run); // to a stream, past any capture
void advance(Key k);        // carries out the next op of a stream
void drain(Key k);          // carries out all
void finish(const std::shared_ptr<EventState>& e, int64_t version);
std::shared_ptr<Graph> capture_of(Key k);
// A wait of the host: forbidden in a capture, and counted.
void host_waits(const char* what, const Key* k);
void break_capture(const std::shared_ptr<Graph>& g, const std::string& why);

void record(const std::shared_ptr<EventState>& e, Key k);
void block(const std::shared_ptr<EventState>& e, Key k);
bool query(const std::shared_ptr<EventState>& e);
void sync_stream(Key k);
void sync_device(int d);
void sync_event(const std::shared_ptr<EventState>& e);

void* allocate(size_t n);
void release(void* p);
void empty_cache();
c10::Allocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* p);

void register_ops_now();

} // namespace sim
