// What torch calls: the guard, the hooks, and ATen's ops on device "sim".
//
// An op that is not written here runs on a CPU tensor over the same memory, after all
// that its stream holds. In a capture it is recorded, with results of its own memory.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cmath>
#include <unordered_map>

#include "sim.h"

namespace sim {

using at::Tensor;
using c10::IValue;
constexpr auto SIM = c10::kPrivateUse1;

// -------------------------------------------------------------------- guard

static c10::Stream stream_of(Key k) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(SIM, k.first), k.second);
}
static Key key_of(const c10::Stream& s) { return {s.device_index(), s.id()}; }
using EventPtr = std::shared_ptr<EventState>;

static void set_device(int d) {
  TORCH_CHECK(d >= 0 && d < DEVICES, "sim error: invalid device ordinal ", d);
  device() = d;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(c10::Device d) { return d.has_index() ? d.index() : device(); }
  c10::DeviceType type() const override { return SIM; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return {SIM, (c10::DeviceIndex)device()}; }
  void setDevice(c10::Device d) const override { set_device(index(d)); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { device() = index(d); }
  c10::Stream getStream(c10::Device d) const override { return stream_of(here(index(d))); }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return stream_of({index(d), 0});
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    Lock lock;
    return stream_of({index(d), state().next_stream[index(d)]++});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return getNewStream(d, 0);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    current(s.device_index()) = s.id();
    return old;
  }
  void destroyEvent(void* e, c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(e);
  }
  void record(
      void** e, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*e) *e = new EventPtr(std::make_shared<EventState>());
    sim::record(*static_cast<EventPtr*>(*e), key_of(s));
  }
  void block(void* e, const c10::Stream& s) const override {
    if (e) sim::block(*static_cast<EventPtr*>(e), key_of(s));
  }
  bool queryEvent(void* e) const override {
    return !e || query(*static_cast<EventPtr*>(e));
  }
  void synchronizeEvent(void* e) const override {
    if (e) sync_event(*static_cast<EventPtr*>(e));
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0.0; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  bool queryStream(const c10::Stream& s) const override {
    Lock lock;
    bool done = state().streams[key_of(s)].queue.empty();
    if (!done) advance(key_of(s));
    return done;
  }
  // torch 2.11 does not ask it, and has no such method
  bool isStreamCapturing(const c10::Stream& s) const {
    Lock lock;
    return capture_of(key_of(s)) != nullptr;
  }
  void synchronizeStream(const c10::Stream& s) const override { sync_stream(key_of(s)); }
  void synchronizeDevice(c10::DeviceIndex d) const override { sync_device(d); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    // what that stream holds when the memory is given back must be done before it is
    // used again
    Lock lock;
    auto found = state().blocks.find(p.get());
    if (found == state().blocks.end() || found->second.stream == key_of(s)) return;
    found->second.users.insert(key_of(s));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return state().available; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto old = device();
    if (d >= 0) set_device(d);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return exchangeDevice(d);
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override {
    return {SIM, (c10::DeviceIndex)device()};
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override;
};

static void resize_storage(c10::StorageImpl* s, size_t n) {
  c10::DeviceGuard guard(s->device());
  Lock lock;
  auto fresh = allocator()->allocate(n);
  const void* from = s->data();
  void* to = fresh.get();
  size_t kept = std::min(n, s->nbytes());
  if (kept)
    push(here(s->device().index()), [=] { std::memcpy(to, from, kept); });
  s->set_data_ptr_noswap(std::move(fresh));
  s->set_nbytes(n);
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const {
  resize_storage(s.unsafeGetStorageImpl(), n);
}

void register_ops_now() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(SIM, allocator());
}

// ---------------------------------------------------------------- factories

static c10::DeviceGuard on(std::optional<c10::Device> d) {
  return c10::DeviceGuard(
      c10::Device(SIM, d && d->has_index() ? d->index() : (c10::DeviceIndex)device()));
}

static Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> d, std::optional<bool> pin,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin || !*pin, "only memory of the host can be pinned");
  auto guard = on(d);
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> d, std::optional<bool> pin) {
  TORCH_CHECK(!pin || !*pin, "only memory of the host can be pinned");
  auto guard = on(d);
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

static void grow(const Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  if (impl->numel() == 0) return;
  int64_t last = impl->storage_offset();
  for (int64_t i = 0; i < impl->dim(); ++i) last += (impl->size(i) - 1) * impl->stride(i);
  size_t need = (last + 1) * impl->itemsize();
  auto* s = impl->unsafe_storage().unsafeGetStorageImpl();
  if (need > s->nbytes()) resize_storage(s, need);
}

static const Tensor& resize_(
    const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != size) impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(*format);
  grow(self);
  return self;
}

static Tensor& set_storage(
    Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device() == self.device(), "set_: a storage of another device");
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.size() == size.size())
    impl->set_sizes_and_strides(size, stride, offset);
  else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  grow(self);
  return self;
}

static Tensor& set_whole(Tensor& self, at::Storage source) {
  int64_t n = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {n}, {1});
}

static Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

static Tensor& set_nothing(Tensor& self) {
  auto guard = on(self.device());
  auto fresh = empty({0}, self.scalar_type(), {}, self.device(), {}, {});
  return set_storage(self, fresh.storage(), 0, {0}, {1});
}

// ------------------------------------------------------------------ aliases

static at::Storage host_storage(const at::Storage& s, bool own) {
  c10::DataPtr data;
  if (own) {
    auto* kept = new at::Storage(s);
    data = {const_cast<void*>(s.data()), kept,
            [](void* x) { delete static_cast<at::Storage*>(x); }, c10::Device(c10::kCPU)};
  } else {
    data = {const_cast<void*>(s.data()), c10::Device(c10::kCPU)};
  }
  return at::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), s.nbytes(), std::move(data), nullptr, false));
}

static Tensor alias_on(const Tensor& t, at::Storage s, c10::DispatchKey key) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(s), c10::DispatchKeySet(key), t.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  impl->_set_conj(t.is_conj());
  impl->_set_neg(t.is_neg());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

Tensor host_view(const Tensor& t, bool own) {
  if (t.device().type() != SIM) return t;
  return alias_on(t, host_storage(t.storage(), own), c10::DispatchKey::CPU);
}

// ------------------------------------------------------------------- copies

static bool dense_alike(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.scalar_type() == b.scalar_type() && a.is_non_overlapping_and_dense() &&
      a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

static Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  auto& s = state();
  bool to_sim = to.device().type() == SIM, from_sim = from.device().type() == SIM;
  Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (to.numel() == 0) return to;
  int d = (to_sim ? to : from).device().index();
  Lock lock;
  Key k = here(d);
  if (executing()) {
    auto host = host_view(to, false);
    host.copy_(host_view(source, false));
    return to;
  }
  if (to_sim && from_sim) {
    ++s.counters.d2d;
    Tensor a = host_view(to, false), b = host_view(source, false);
    Key src = here(from.device().index());
    auto before = std::make_shared<EventState>(), after = std::make_shared<EventState>();
    if (src != k) {
      // the source's stream copies, and each waits for the other
      record(before, k);
      block(before, src);
    }
    push(src, [a, b]() mutable { a.copy_(b); });
    if (src != k) {
      record(after, src);
      block(after, k);
    }
    return to;
  }
  if (to_sim) {
    size_t bytes = to.numel() * to.element_size();
    bool pinned = is_pinned(source.storage().data());
    bool direct = dense_alike(to, source);
    if (capture_of(k) && !(pinned && direct && non_blocking)) {
      break_capture(capture_of(k), "a copy that waits for the host's memory");
      TORCH_CHECK(
          false, "sim error: operation not permitted when stream is capturing (a copy ",
          non_blocking ? "from memory that is not pinned)" : "that the host waits for)");
    }
    ++s.counters.h2d;
    s.counters.h2d_bytes += bytes;
    Tensor a = host_view(to, false);
    if (pinned && direct && non_blocking) {
      // the memory is read when the copy is carried out; it is not given to another
      // before, unless a graph holds the copy
      void* out = a.data_ptr();
      const void* in = source.data_ptr();
      if (capture_of(k)) {
        push(k, [=] { std::memcpy(out, in, bytes); });
      } else {
        push(k, [=, keep = source.storage()] { std::memcpy(out, in, bytes); });
      }
      return to;
    }
    if (!non_blocking) {
      ++s.counters.h2d_blocking;
      host_waits("a copy from the host", &k);
    }
    Tensor b = source.clone();
    push(k, [a, b]() mutable { a.copy_(b); });
    if (!non_blocking) {
      drain(k);
    }
    return to;
  }
  ++s.counters.d2h;
  bool direct = dense_alike(to, source);
  if (non_blocking && direct && is_pinned(to.storage().data())) {
    void* out = to.data_ptr();
    const void* in = source.storage().data();
    in = static_cast<const char*>(in) + source.storage_offset() * source.element_size();
    size_t bytes = to.numel() * to.element_size();
    if (capture_of(k))
      push(k, [=] { std::memcpy(out, in, bytes); });
    else
      push(k, [=, keep = to.storage()] { std::memcpy(out, in, bytes); });
    return to;
  }
  host_waits("a copy to the host", &k);
  if (!s.streams[k].queue.empty()) ++s.counters.blocked;
  drain(k);
  to.copy_(host_view(source, false));
  return to;
}

static Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor out = to;
  return copy_(out, from, non_blocking);
}

static Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.device().type() == SIM)
    resize_(to, from.sizes(), {});
  Tensor out = to;
  return copy_(out, from, false);
}

static at::Scalar local_scalar(const Tensor& t) {
  Lock lock;
  Key k = here(t.device().index());
  host_waits("a tensor's value", &k);
  if (!state().streams[k].queue.empty()) ++state().counters.blocked;
  drain(k);
  return host_view(t, false).item();
}

// ----------------------------------------------------------------- fallback

// CPU tensors over the memory of a call's arguments, and the way back.
struct Seen {
  bool own, clone;
  std::unordered_map<c10::StorageImpl*, at::Storage> host;
  std::unordered_map<c10::TensorImpl*, Tensor> tensor;    // sim -> CPU
  std::unordered_map<c10::TensorImpl*, Tensor> back;      // CPU -> sim
  std::unordered_map<c10::StorageImpl*, at::Storage> real; // CPU -> sim
  std::vector<std::pair<Tensor, Tensor>> writes;          // sim, CPU
  int device = -1;

  Tensor take(const Tensor& t) {
    if (!t.defined() || t.device().type() != SIM) return t;
    auto known = tensor.find(t.unsafeGetTensorImpl());
    if (known != tensor.end()) return known->second;
    auto* s = t.storage().unsafeGetStorageImpl();
    if (!host.count(s)) {
      host.emplace(s, host_storage(t.storage(), own));
      real.emplace(host.at(s).unsafeGetStorageImpl(), t.storage());
    }
    Tensor made = alias_on(t, host.at(s), c10::DispatchKey::CPU);
    if (clone) made = made.clone();
    tensor.emplace(t.unsafeGetTensorImpl(), made);
    back.emplace(made.unsafeGetTensorImpl(), t);
    return made;
  }

  IValue take_value(const IValue& v) {
    if (v.isTensor()) return take(v.toTensor());
    if (v.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& t : v.toTensorVector()) made.push_back(take(t));
      return made;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const auto& x : v.toOptionalTensorVector())
        made.push_back(x ? std::optional<Tensor>(take(*x)) : x);
      return made;
    }
    if (v.isDevice()) return c10::Device(c10::kCPU);
    return v;
  }
};

template <class F>
static void each_tensor(const IValue& v, F f) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) f(v.toTensor());
  } else if (v.isTensorList()) {
    for (const Tensor& t : v.toTensorVector()) f(t);
  } else if (v.isOptionalTensorList()) {
    for (const auto& x : v.toOptionalTensorVector())
      if (x && x->defined()) f(*x);
  }
}

static bool is_write(const c10::Argument& a) {
  return a.alias_info() && a.alias_info()->isWrite();
}

// All on one device, but for numbers in tensors of the CPU that are only read.
static int check_devices(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> args) {
  int found = -1;
  std::string name = schema.name();
  bool indexes = name.find("index") != std::string::npos;
  for (const auto& v : args) {
    if (v.isDevice() && v.toDevice().type() == SIM)
      found = v.toDevice().has_index() ? v.toDevice().index() : device();
    each_tensor(v, [&](const Tensor& t) {
      if (t.device().type() != SIM) return;
      TORCH_CHECK(
          found < 0 || found == t.device().index(),
          "Expected all tensors to be on the same device, but found at least two "
          "devices, sim:", found, " and ", t.device(), "! (", name, ")");
      found = t.device().index();
    });
  }
  for (size_t i = 0; i < args.size(); ++i)
    each_tensor(args[i], [&](const Tensor& t) {
      if (t.device().type() == SIM || found < 0) return;
      bool number = t.dim() == 0 && !is_write(schema.arguments()[i]);
      TORCH_CHECK(
          number || indexes,
          "Expected all tensors to be on the same device, but found at least two "
          "devices, sim:", found, " and ", t.device(), "! (", name, ")");
    });
  return found < 0 ? device() : found;
}

static Tensor to_sim(const Tensor& t, int d, bool fill) {
  auto guard = on(c10::Device(SIM, d));
  Tensor made = empty_strided(t.sizes(), t.strides(), t.scalar_type(), {}, {}, {});
  if (fill && t.numel()) host_view(made, false).copy_(t);
  return made;
}

static void call_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  Execution guard;
  op.callBoxed(&stack);
}

static const std::set<std::string>& waiting_ops() {
  static const std::set<std::string> names = {
      "aten::nonzero", "aten::equal", "aten::masked_select", "aten::is_nonzero",
      "aten::_unique2", "aten::unique_dim", "aten::repeat_interleave"};
  return names;
}

// As CUDAGeneratorImpl: who draws within a capture that did not tell the generator, or
// outside of one while a capture that broke never ended for it, is refused.
static void check_generator(int d, bool capturing) {
  bool told = state().drawing[d];
  TORCH_CHECK(
      told || !capturing,
      "Attempt to increase offset for a sim generator not in capture mode.");
  TORCH_CHECK(
      capturing || !told,
      "Offset increment outside graph capture encountered unexpectedly.");
}

static void fallback(
    const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t n = schema.arguments().size();
  auto args = std::vector<IValue>(stack->end() - n, stack->end());
  bool view = false;
  for (const auto& r : schema.returns())
    view |= r.alias_info() && !r.alias_info()->isWrite();
  Lock lock;
  int d = check_devices(schema, args);
  Key k = here(d);
  bool capturing = !view && capture_of(k);
  Seen seen{true, capturing, {}, {}, {}, {}, {}, -1};
  if (!view) {
    if (!executing() && op.hasTag(at::Tag::nondeterministic_seeded))
      check_generator(d, capture_of(k) != nullptr);
    ++state().ops[schema.name()];
    if (waiting_ops().count(schema.name()))
      host_waits("an op whose result the host reads", &k);
    if (!capturing) drain(k);
  }
  torch::jit::Stack inner;
  std::vector<std::pair<Tensor, Tensor>> resized;
  for (size_t i = 0; i < n; ++i) {
    IValue made = seen.take_value(args[i]);
    if (is_write(schema.arguments()[i]) && args[i].isTensor() &&
        args[i].toTensor().defined() && args[i].toTensor().device().type() == SIM) {
      Tensor real = args[i].toTensor();
      if (real.numel() == 0) {
        // an `out` that takes its shape from the result
        Tensor fresh = alias_on(
            real, at::Storage(c10::make_intrusive<c10::StorageImpl>(
                      c10::StorageImpl::use_byte_size_t(), 0,
                      c10::GetAllocator(c10::kCPU), true)),
            c10::DispatchKey::CPU);
        seen.back.emplace(fresh.unsafeGetTensorImpl(), real);
        resized.emplace_back(real, fresh);
        made = fresh;
      }
    }
    inner.push_back(std::move(made));
  }
  call_on_cpu(op, inner);
  for (auto& [real, fresh] : resized) {
    if (fresh.numel() == 0) continue;
    resize_(real, fresh.sizes(), {});
    real.unsafeGetTensorImpl()->set_sizes_and_strides(
        fresh.sizes(), fresh.strides(), real.storage_offset());
    host_view(real, false).copy_(fresh);
  }
  std::vector<Tensor> made; // results with memory of their own, in order
  auto give = [&](const Tensor& t) -> Tensor {
    if (!t.defined()) return t;
    auto known = seen.back.find(t.unsafeGetTensorImpl());
    if (known != seen.back.end()) return known->second;
    auto base = seen.real.find(t.storage().unsafeGetStorageImpl());
    if (base != seen.real.end() && !capturing)
      return alias_on(t, base->second, c10::DispatchKey::PrivateUse1);
    made.push_back(to_sim(t, d, !capturing));
    return made.back();
  };
  stack->erase(stack->end() - n, stack->end());
  for (const IValue& v : inner) {
    if (v.isTensor()) {
      stack->emplace_back(give(v.toTensor()));
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(give(t));
      stack->emplace_back(list);
    } else {
      stack->push_back(v);
    }
  }
  if (!capturing) return;
  // at a replay the call reads and writes what lies at these addresses then
  Seen raw{false, false, {}, {}, {}, {}, {}, -1};
  torch::jit::Stack again;
  for (const auto& v : args) again.push_back(raw.take_value(v));
  std::vector<Tensor> outs;
  for (const Tensor& t : made) outs.push_back(host_view(t, false));
  auto aliases = std::make_shared<std::set<c10::TensorImpl*>>();
  for (auto& [impl, t] : raw.back) aliases->insert(impl);
  push(k, [op, again, outs, aliases]() mutable {
    torch::jit::Stack run = again;
    op.callBoxed(&run);
    size_t i = 0;
    for (const IValue& v : run)
      each_tensor(v, [&](const Tensor& t) {
        if (!aliases->count(t.unsafeGetTensorImpl())) outs.at(i++).copy_(t);
      });
  });
}

// The vector library of the CPU rounds some roots down; a device does not.
static Tensor& sqrt_out(const Tensor& x, Tensor& out) {
  Lock lock;
  if (!at::isFloatingType(out.scalar_type()) || x.is_complex()) {
    torch::jit::Stack stack = {x, out};
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::sqrt", "out");
    fallback(op, {}, &stack);
    return out;
  }
  if (out.numel() == 0 && x.numel() != 0) resize_(out, x.sizes(), {});
  Key k = here(out.device().index());
  ++state().ops["aten::sqrt"];
  Tensor from = host_view(x, false), to = host_view(out, false);
  push(k, [from, to] {
    // a copy, also of what is double already: it is computed in place
    auto wide = from.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true).contiguous();
    double* p = wide.mutable_data_ptr<double>();
    for (int64_t i = 0; i < wide.numel(); ++i) p[i] = std::sqrt(p[i]);
    // a root in float is that of the double, rounded; narrower ones come from float
    auto made = to.scalar_type() == at::kDouble ? wide : wide.to(at::kFloat);
    to.copy_(made);
  });
  if (!capture_of(k)) drain(k);
  return out;
}

// As for CUDA: `p.data = p.data.cpu()` is allowed.
static bool compatible(const Tensor&, const Tensor&) { return true; }

static void record_stream(Tensor& t, c10::Stream s) {
  Guard().recordDataPtrOnStream(t.storage().data_ptr(), s);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("sqrt.out", &sqrt_out);
  m.impl("_has_compatible_shallow_copy_type", &compatible);
  m.impl("record_stream", &record_stream);
}

} // namespace sim
