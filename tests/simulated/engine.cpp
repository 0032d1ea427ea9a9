// Streams, events, memory and graphs of the simulated accelerator.
//
// Work is carried out as late as the rules allow: a stream stands still until somebody
// waits for it, and then no other stream moves that it does not wait for. What a real
// device may reorder, this one does, the same way each time.
#include "sim.h"

namespace sim {

State& state() {
  static State* s = new State(); // never destroyed: Python's objects lie in it
  return *s;
}

int& device() {
  static thread_local int d = 0;
  return d;
}

int64_t& current(int d) {
  static thread_local int64_t streams[DEVICES] = {0, 0};
  return streams[d];
}

int& executing() {
  static thread_local int depth = 0;
  return depth;
}

Lock::Lock() {
  auto& m = state().mutex;
  if (m.try_lock()) return;
  if (Py_IsInitialized() && PyGILState_Check()) {
    PyThreadState* saved = PyEval_SaveThread();
    m.lock();
    PyEval_RestoreThread(saved);
  } else {
    m.lock();
  }
}

Lock::~Lock() { state().mutex.unlock(); }

Execution::Execution()
    : python(c10::python_ks), autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView) {
  ++executing();
}

Execution::~Execution() { --executing(); }

// ------------------------------------------------------------------ streams

void later(Key k, std::function<void()> run) {
  auto& s = state().streams[k];
  if (executing()) {
    run();
    return;
  }
  s.queue.push_back({std::move(run), nullptr, nullptr, 0});
}

void push(Key k, std::function<void()> run) {
  if (auto g = executing() ? nullptr : state().streams[k].graph) {
    g->ops.push_back(std::move(run));
    if (k != g->origin) g->unjoined.insert(k);
    return;
  }
  later(k, std::move(run));
}

void advance(Key k) {
  auto& queue = state().streams[k].queue;
  if (queue.empty()) return;
  Op op = std::move(queue.front());
  queue.pop_front();
  if (op.wait) finish(op.wait, op.version);
  if (op.record) op.record->done = std::max(op.record->done, op.version);
  if (op.run) {
    Execution guard;
    op.run();
  }
}

void drain(Key k) {
  if (executing()) return;
  while (!state().streams[k].queue.empty()) advance(k);
}

void finish(const std::shared_ptr<EventState>& e, int64_t version) {
  while (e->done < version && !state().streams[e->stream].queue.empty())
    advance(e->stream);
}

std::shared_ptr<Graph> capture_of(Key k) {
  return executing() ? nullptr : state().streams[k].graph;
}

void break_capture(const std::shared_ptr<Graph>& g, const std::string& why) {
  if (g->broken.empty()) g->broken = why;
}

void host_waits(const char* what, const Key* k) {
  if (executing()) return;
  for (auto& g : state().capturing) {
    bool own = k && g->streams.count(*k);
    bool hit = own || g->mode == Mode::Global ||
        (g->mode == Mode::Thread && g->thread == std::this_thread::get_id());
    if (!hit) continue;
    break_capture(g, what);
    TORCH_CHECK(
        false, "sim error: operation not permitted when stream is capturing (", what, ")");
  }
  ++state().counters.syncs;
}

void sync_stream(Key k) {
  Lock lock;
  if (executing()) return;
  host_waits("a wait for a stream", &k);
  if (!state().streams[k].queue.empty()) ++state().counters.blocked;
  drain(k);
}

void sync_device(int d) {
  Lock lock;
  if (executing()) return;
  Key origin = here(d);
  for (auto& [k, s] : state().streams)
    if (k.first == d && s.graph) origin = k;
  host_waits("a wait for a device", &origin);
  bool busy = false;
  // the youngest stream first: no order among streams is promised
  for (auto it = state().streams.rbegin(); it != state().streams.rend(); ++it)
    if (it->first.first == d) {
      busy |= !it->second.queue.empty();
      drain(it->first);
    }
  state().counters.blocked += busy;
}

// ------------------------------------------------------------------- events

void record(const std::shared_ptr<EventState>& e, Key k) {
  Lock lock;
  if (executing()) return;
  e->graph = capture_of(k);
  e->stream = k;
  if (!e->graph.expired()) return;
  ++e->version;
  auto& queue = state().streams[k].queue;
  if (queue.empty())
    e->done = e->version;
  else
    queue.push_back({nullptr, e, nullptr, e->version});
}

void block(const std::shared_ptr<EventState>& e, Key k) {
  Lock lock;
  if (executing()) return;
  auto own = capture_of(k);
  auto g = e->graph.lock();
  if (g && g->capturing) {
    TORCH_CHECK(!own || own == g, "sim error: two captures cannot be merged");
    if (k == g->origin)
      g->unjoined.erase(e->stream);
    else
      g->unjoined.insert(k);
    g->streams.insert(k);
    state().streams[k].graph = g;
    return;
  }
  if (own) {
    break_capture(own, "a wait for work outside of the capture");
    TORCH_CHECK(
        false, "sim error: dependency created on uncaptured work in another stream");
  }
  if (e->done < e->version)
    state().streams[k].queue.push_back({nullptr, nullptr, e, e->version});
}

bool query(const std::shared_ptr<EventState>& e) {
  Lock lock;
  host_waits("a query of an event", nullptr);
  --state().counters.syncs; // it does not wait
  if (e->done >= e->version) return true;
  advance(e->stream); // who asks again and again gets there
  return false;
}

void sync_event(const std::shared_ptr<EventState>& e) {
  Lock lock;
  if (executing()) return;
  host_waits("a wait for an event", &e->stream);
  TORCH_CHECK(e->graph.expired(), "sim error: the event was recorded in a capture");
  if (e->done >= e->version) return;
  ++state().counters.blocked;
  finish(e, e->version);
}

// ------------------------------------------------------------------- memory
//
// Memory goes back to a cache of its stream and size, as with the allocators of torch,
// and never to the system: a stale address reads junk and does not crash. Free memory
// is overwritten in the order of its stream.

static void poison(void* p, size_t n) { std::memset(p, 0xff, n); }

void* allocate(size_t n) {
  Lock lock;
  auto& s = state();
  if (n == 0) return nullptr;
  ++s.counters.allocations;
  if (s.fail_allocation && --s.fail_allocation == 0)
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "sim out of memory. Tried to allocate ", n, " bytes.");
  Key k = here(device());
  size_t asked = n;
  n = (n + 511) / 512 * 512;
  auto g = capture_of(k);
  void* p = nullptr;
  Block block{n, asked, k, {}, false};
  if (g) {
    auto found = g->pool->unused.find(n);
    block.pool = g->pool;
    block.pooled = true;
    if (found != g->pool->unused.end()) {
      p = found->second.first;
      g->pool->unused.erase(found);
    } else {
      g->pool->bytes += n;
    }
  } else {
    auto& free = s.cache[{k, n}];
    if (!free.empty()) {
      p = free.back();
      free.pop_back();
    }
  }
  if (!p) {
    p = std::aligned_alloc(512, n);
    TORCH_CHECK_WITH(OutOfMemoryError, p, "the host is out of memory");
    poison(p, n);
  }
  s.allocated[k.first] += n;
  s.blocks[p] = block;
  return p;
}

static void to_cache(void* p, size_t n, Key k) {
  auto& s = state();
  if (executing()) {
    // Python collects garbage inside a kernel, which may be reading this very memory
    s.streams[k].queue.push_back({[p, n, k] {
                                    poison(p, n);
                                    state().cache[{k, n}].push_back(p);
                                  },
                                  nullptr, nullptr, 0});
    return;
  }
  if (!s.streams[k].queue.empty())
    later(k, [p, n] { poison(p, n); });
  else
    poison(p, n);
  s.cache[{k, n}].push_back(p);
}

void release(void* p) {
  if (!p) return;
  Lock lock;
  auto& s = state();
  auto found = s.blocks.find(p);
  if (found == s.blocks.end()) return;
  Block block = found->second;
  s.blocks.erase(found);
  ++s.counters.frees;
  s.allocated[block.stream.first] -= block.size;
  if (auto pool = block.pool.lock())
    pool->unused.emplace(block.size, std::make_pair(p, block.stream));
  else if (block.users.empty())
    to_cache(p, block.size, block.stream);
  else {
    auto left = std::make_shared<size_t>(block.users.size());
    for (Key user : block.users)
      s.streams[user].queue.push_back(
          {[=] {
             if (--*left == 0) to_cache(p, block.size, block.stream);
           },
           nullptr, nullptr, 0});
  }
}

Pool::~Pool() {
  for (auto& [n, place] : unused) to_cache(place.first, n, place.second);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = sim::allocate(n);
    return {p, p, &release, c10::Device(c10::kPrivateUse1, device())};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    Lock lock;
    push(here(device()), [=] { std::memcpy(to, from, n); });
  }
};

c10::Allocator* allocator() {
  static DeviceAllocator a;
  return &a;
}

static void release_pinned(void* p) {
  if (!p) return;
  Lock lock;
  auto found = state().pinned.find(p);
  poison(p, found->second);
  state().pinned_cache.emplace(found->second, p);
  state().pinned.erase(found);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    Lock lock;
    // cudaHostAlloc is a call that no capture in that mode allows
    host_waits("pinned memory is made", nullptr);
    if (!executing()) --state().counters.syncs; // it does not wait
    auto& s = state();
    n = (std::max<size_t>(n, 1) + 511) / 512 * 512;
    ++s.counters.pinned;
    auto found = s.pinned_cache.find(n);
    void* p;
    if (found != s.pinned_cache.end()) {
      p = found->second;
      s.pinned_cache.erase(found);
    } else {
      p = std::aligned_alloc(512, n);
      poison(p, n);
    }
    s.pinned[p] = n;
    return {p, p, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    std::memcpy(to, from, n);
  }
};

c10::Allocator* pinned_allocator() {
  static PinnedAllocator a;
  return &a;
}

bool is_pinned(const void* p) {
  Lock lock;
  auto& pinned = state().pinned;
  auto after = pinned.upper_bound(const_cast<void*>(p));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(p) <
      static_cast<const char*>(after->first) + after->second;
}

} // namespace sim
