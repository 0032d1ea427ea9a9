// DTensors of an optimizer: parameters first, then those in its state. The local part
// and the spec of each are compared by identity, read from slots of the object.
struct PartRecord {
  int64_t n;             // parameters
  int64_t all;           // parameters and tensors of the state
  void* const* wholes;   // DTensors
  void* const* locals;   // their local parts
  void* const* specs;    // and their specs
  const int64_t* flags;  // of each parameter: its requires_grad
  void* const* spreads;  // of each parameter: the spec that its gradient has
  void* const* heres;    // of each parameter: the tensor that the step gets instead
  int64_t* versions;     // of those, in the last look
  const void** grads;    // of each parameter: its gradient in a look, an at::Tensor
  void* none;            // None
  int64_t type;          // offset of an object's type
  void *kind, *plain;    // the types DTensor and Tensor
  int64_t local, spec;   // their offsets in a DTensor
  int64_t handle;        // offset of a Python tensor's at::Tensor
  // As in LaneRecord; none is null.
  bool (*required)(const void* tensor);
  const void* (*gradient)(const void* tensor);
  void* (*wrapped)(const void* gradient);
  bool (*mode)(void);
  // Read and increment the version counter of an at::Tensor.
  int64_t (*version)(const void* tensor);
  void (*bump)(void* tensor);
  const Functions* functions;
  // The parts of parameters, in order. `at` has the data pointer and the storage offset
  // of each part in the state. The step of the parts compares its dtype, sizes and
  // strides.
  TensorRecord* known;
  uint64_t* at;
  const ContainerRecord* held;  // lists of parameters and dicts of state
};

static inline void* slot(const void* object, int64_t at) {
  return *(void**)((char*)object + at);
}

// The offset in a TensorImpl of its storage offset, which follows the strides.
static inline int64_t offset_at(const Functions* f) {
  return f->first + 8 * (1 + 2 * f->inlined);
}

// The data pointer of a tensor's storage, and the storage offset.
struct Place {
  uint64_t memory, offset;
};
static inline Place place_of(const PartRecord* k, const void* part) {
  const Functions* f = k->functions;
  const char* tensor = (char*)slot(part, k->handle);
  const void* storage = slot(tensor, f->storage);
  return {storage ? (uint64_t)slot(storage, f->memory) : 0,
          (uint64_t)slot(tensor, offset_at(f))};
}

// Record the places of the parts in the state.
extern "C" void fuseopt_parts_note(const PartRecord* k) {
  uint64_t* at = k->at;
  for (int64_t i = k->n; i < k->all; ++i, at += 2) {
    const Place now = place_of(k, k->locals[i]);
    at[0] = now.memory;
    at[1] = now.offset;
  }
}

static bool parts_are_the_same(const PartRecord* k) {
  if (!fuseopt_holds(k->held)) return false;
  for (int64_t i = 0; i < k->all; ++i) {
    if (i + SOON < k->all) {
      __builtin_prefetch((char*)k->wholes[i + SOON] + k->type);
      __builtin_prefetch((char*)k->wholes[i + SOON] + k->spec);
    }
    const void* whole = k->wholes[i];
    if (slot(whole, k->type) != k->kind || slot(whole, k->local) != k->locals[i] ||
        slot(whole, k->spec) != k->specs[i])
      return false;
  }
  const uint64_t* at = k->at;
  for (int64_t i = k->n; i < k->all; ++i, at += 2) {
    if (i + NEAR < k->all) {
      __builtin_prefetch((char*)k->locals[i + NEAR] + k->handle);
      const char* tensor = (char*)slot(k->locals[i + BLOCK], k->handle);
      __builtin_prefetch(tensor + k->functions->storage);
      __builtin_prefetch(tensor + offset_at(k->functions));
    }
    const Place now = place_of(k, k->locals[i]);
    if (now.memory != at[0] || now.offset != at[1]) return false;
  }
  begin(k->known);
  compare(k->functions, k->known, 0, k->n);
  if (finish(k->functions, k->known)) return false;
  for (int64_t i = 0; i < k->n; ++i) {
    if (i + SOON < k->n) __builtin_prefetch(slot(k->wholes[i + SOON], k->handle));
    const void* whole = slot(k->wholes[i], k->handle);
    if (k->required(whole) != (k->flags[i] == 1)) return false;
    k->grads[i] = k->gradient(whole);
  }
  return true;
}

// Returns 0 if nothing changed, there is a gradient, and `grads` has the parts of all
// gradients. Returns 1 if anything but gradients changed, 2 if Python must compare
// gradients alone, 3 if it must compare everything.
extern "C" int64_t fuseopt_parts(const PartRecord* k, void* grads) {
  int64_t verdict = 3;
  try {
    if (k->mode()) return 3;
    if (!parts_are_the_same(k)) return 1;
    verdict = 2;
    for (int64_t i = 0; i < k->n; ++i) {
      if (i + SOON < k->n) {
        __builtin_prefetch(*(void**)k->grads[i + SOON]);
        __builtin_prefetch(slot(k->heres[i + SOON], k->handle));
      }
      k->versions[i] = k->version((char*)k->heres[i] + k->handle);
      void* now = k->wrapped(k->grads[i]);
      if (!now) {
        PyErr_Clear();
        return 3;
      }
      void* part = 0;
      if (slot(now, k->type) == k->kind && slot(now, k->spec) == k->spreads[i])
        part = slot(now, k->local);
      const bool is_plain = part && slot(part, k->type) == k->plain;
      if (is_plain) {
        Py_IncRef(part);
        PyList_SetItem(grads, i, part);  // takes the reference
        verdict = 0;
      }
      Py_DecRef(now);  // None too, which stays alive
      if (!is_plain && now != k->none) return 2;
    }
  } catch (...) { return 3; }
  return verdict;
}

// Increment the versions of DTensors whose parts' versions differ from those of the
// last look. Returns -1 if a tensor has no version counter.
extern "C" int64_t fuseopt_parts_bump(const PartRecord* k) {
  try {
    for (int64_t i = 0; i < k->n; ++i)
      if (k->version((char*)k->heres[i] + k->handle) != k->versions[i])
        k->bump((char*)k->wholes[i] + k->handle);
  } catch (...) { return -1; }
  return 0;
}
