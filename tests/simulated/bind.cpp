// The simulated accelerator as Python sees it; tests/simulated/device.py builds on it.
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include "sim.h"

namespace sim {

at::Tensor host_view(const at::Tensor& t, bool own);

static std::shared_ptr<py::object> held(py::object f) {
  return {new py::object(std::move(f)), [](py::object* x) {
            if (!Py_IsInitialized()) return;
            py::gil_scoped_acquire gil;
            delete x;
          }};
}

static void enqueue(py::object f) {
  auto kept = held(std::move(f));
  py::gil_scoped_release no_gil;
  Lock lock;
  auto& s = state();
  Key k = here(device());
  if (executing()) {
    py::gil_scoped_acquire gil;
    (*kept)();
    return;
  }
  if (s.fail_launch && --s.fail_launch == 0)
    throw std::runtime_error("sim error: invalid configuration argument");
  ++(capture_of(k) ? s.counters.captured : s.counters.launches);
  push(k, [kept] {
    ++state().counters.executed;
    py::gil_scoped_acquire gil;
    (*kept)();
  });
}

// What torch.cuda.CUDAGraph is.
struct GraphHandle {
  std::shared_ptr<Graph> graph;

  void begin(std::optional<PoolId> id, const std::string& mode) {
    Lock lock;
    auto& s = state();
    Key k = here(device());
    TORCH_CHECK(!executing(), "sim error: a capture within a kernel");
    // as CUDAGraph::capture_begin, which tells the default generator first of all: what
    // fails after that leaves it in a capture that nobody ends
    s.drawing[k.first] = true;
    TORCH_CHECK(
        k.second != 0,
        "sim graphs must be captured on a non-default stream. (However, after capture, "
        "it's ok to replay them on the default stream.)");
    TORCH_CHECK(!capture_of(k), "sim error: the stream is capturing already");
    TORCH_CHECK(
        !graph || (!graph->ready && !graph->capturing),
        "This graph instance already owns a captured graph. To capture a new graph, "
        "create a new instance.");
    Mode allowed = Mode::Global;
    if (mode == "thread_local") allowed = Mode::Thread;
    else if (mode == "relaxed") allowed = Mode::Relaxed;
    else TORCH_CHECK(mode == "global", "unknown capture error mode: ", mode);
    PoolId wanted = id ? *id : PoolId{s.next_pool++, 0};
    auto known = s.pools.find(wanted);
    TORCH_CHECK(
        known == s.pools.end() || known->second.uses > 0,
        "it->second->use_count > 0 INTERNAL ASSERT FAILED: all graphs of this pool are "
        "gone");
    PoolUse& use = s.pools[wanted];
    ++use.uses;
    graph = std::make_shared<Graph>();
    graph->pool = use.memory.lock();
    if (!graph->pool) {
      graph->pool = std::make_shared<Pool>();
      graph->pool->id = wanted;
      use.memory = graph->pool;
    }
    graph->mode = allowed;
    graph->origin = k;
    graph->streams = {k};
    graph->thread = std::this_thread::get_id();
    graph->capturing = true;
    s.streams[k].graph = graph;
    s.capturing.push_back(graph);
  }

  // Returns whether the graph holds no work.
  bool end() {
    Lock lock;
    auto& s = state();
    TORCH_CHECK(graph && graph->capturing, "sim error: no capture is under way");
    Key k = here(device());
    TORCH_CHECK(
        k == graph->origin,
        "Capture must end on the same stream it began on.");
    auto g = graph;
    g->capturing = false;
    for (Key own : g->streams) s.streams[own].graph = nullptr;
    s.capturing.erase(std::find(s.capturing.begin(), s.capturing.end(), g));
    if (g->broken.empty() && !g->unjoined.empty())
      g->broken = "capturing stream has unjoined work";
    if (!g->broken.empty()) {
      std::string why = g->broken;
      graph = nullptr;
      TORCH_CHECK(
          false, "sim error: operation failed due to a previous error during capture (",
          why, ")");
    }
    g->ready = true;
    s.drawing[k.first] = false;
    ++s.counters.captures;
    return g->ops.empty();
  }

  void replay() {
    Lock lock;
    TORCH_CHECK(
        graph && graph->ready,
        "Called replay without a preceding successful capture.");
    Key k = {graph->origin.first, current(graph->origin.first)};
    if (auto g = capture_of(k)) {
      break_capture(g, "a graph replayed in a capture");
      TORCH_CHECK(
          false, "sim error: operation not permitted when stream is capturing (replay)");
    }
    ++state().counters.replays;
    push(k, [g = graph] {
      for (auto& op : g->ops) op();
    });
  }

  void reset() {
    Lock lock;
    TORCH_CHECK(!graph || !graph->capturing, "sim error: reset within a capture");
    let_go();
  }

  PoolId pool() const {
    TORCH_CHECK(graph, "Called pool() without a preceding successful capture.");
    return graph->pool->id;
  }

  int64_t pool_bytes() const { return graph ? graph->pool->bytes : 0; }

  // Under the lock: blocks go back to the caches.
  ~GraphHandle() {
    if (!graph) return;
    Lock lock;
    let_go();
  }

  // A capture that broke uses its pool for ever, as in torch.
  void let_go() {
    if (graph && graph->ready) --state().pools.at(graph->pool->id).uses;
    graph = nullptr;
  }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_ops_now();
  using gone = py::call_guard<py::gil_scoped_release>;
  m.def("enqueue", &enqueue);
  m.def("host_view", &host_view, py::arg("tensor"), py::arg("own") = true);
  m.def("current_device", [] { return device(); });
  m.def("set_device", [](int d) {
    TORCH_CHECK(d >= 0 && d < DEVICES, "sim error: invalid device ordinal ", d);
    device() = d;
  });
  m.def("is_current_stream_capturing", [] {
    Lock lock;
    return capture_of(here(device())) != nullptr;
  }, gone());
  m.def("new_pool", [] {
    Lock lock;
    return PoolId{0, state().next_pool++};
  });
  m.def("fail_allocation", [](int64_t n) { Lock lock; state().fail_allocation = n; });
  m.def("fail_launch", [](int64_t n) { Lock lock; state().fail_launch = n; });
  m.def("set_available", [](bool x) { state().available = x; });
  m.def("available", [] { return state().available; });
  m.def("memory_allocated", [](int d) { Lock lock; return state().allocated[d]; });
  // (address, bytes) of what kernels may use: all blocks, and what graphs keep.
  m.def("memory", [] {
    Lock lock;
    std::vector<std::pair<uint64_t, uint64_t>> found;
    for (auto& [p, block] : state().blocks)
      found.emplace_back(reinterpret_cast<uint64_t>(p), block.asked);
    for (auto& [id, use] : state().pools)
      if (auto pool = use.memory.lock())
        for (auto& [n, place] : pool->unused)
          found.emplace_back(reinterpret_cast<uint64_t>(place.first), n);
    return found;
  });
  m.def("pending", [] {
    Lock lock;
    size_t n = 0;
    for (auto& [k, s] : state().streams) n += s.queue.size();
    return n;
  });
  m.def("counters", [] {
    Lock lock;
    const Counters& c = state().counters;
    py::dict d;
#define FIELD(name) d[#name] = c.name;
    FIELD(launches) FIELD(executed) FIELD(captured) FIELD(captures) FIELD(replays)
    FIELD(h2d) FIELD(h2d_bytes) FIELD(h2d_blocking) FIELD(d2h) FIELD(d2d)
    FIELD(allocations) FIELD(frees) FIELD(pinned) FIELD(syncs) FIELD(blocked)
#undef FIELD
    d["ops"] = state().ops;
    return d;
  });
  m.def("reset_counters", [] {
    Lock lock;
    state().counters = Counters();
    state().ops.clear();
  });
  m.def("reset", [] {
    // after a test that failed half-way: no capture, no work, no fault to come
    Lock lock;
    auto& s = state();
    for (auto& g : s.capturing) {
      g->capturing = false;
      for (Key own : g->streams) s.streams[own].graph = nullptr;
    }
    s.capturing.clear();
    for (auto& [k, stream] : s.streams) stream.queue.clear();
    s.fail_allocation = s.fail_launch = 0;
    for (bool& drawing : s.drawing) drawing = false;
    device() = 0;
    for (int d = 0; d < DEVICES; ++d) current(d) = 0;
  }, gone());
  py::class_<GraphHandle>(m, "Graph")
      .def(py::init<>())
      .def("begin", &GraphHandle::begin, gone())
      .def("end", &GraphHandle::end, gone())
      .def("replay", &GraphHandle::replay, gone())
      .def("reset", &GraphHandle::reset, gone())
      .def("pool", &GraphHandle::pool)
      .def("pool_bytes", &GraphHandle::pool_bytes);
}

} // namespace sim
