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
  const void** grads;  // of each parameter: its gradient in a look, an at::Tensor, or 0
  void* none;          // None
  int64_t type;        // offset of an object's type
  void *kind, *plain;  // the types DTensor and Tensor
  int64_t local, spec;  // their offsets in a DTensor
  int64_t handle;       // offset of a Python tensor's at::Tensor
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

// Where a tensor's fields are, from its storage: what has its gradient, its object of
// Python. As VERSION, for prefetches alone.
static const int64_t META = 8, OBJECT = 32;
// The offset in the first of these two of the flag that requires a gradient.
static const int64_t REQUIRED = 128;

// Prefetch the tensor of an object of Python; and, a block later, one of its fields.
static inline const char* tensor_of(const PartRecord* k, const void* object) {
  return (const char*)slot(object, k->handle);
}
static inline void fetch_tensor(const PartRecord* k, const void* object) {
  __builtin_prefetch(tensor_of(k, object) + k->functions->storage);
}
static inline const char* field_of(const PartRecord* k, const void* object,
                                   int64_t field) {
  return (const char*)slot(tensor_of(k, object), k->functions->storage + field);
}

// Are the parts in the state where they were?
static bool state_is_in_place(const PartRecord* k) {
  const uint64_t* at = k->at;
  for (int64_t i = k->n; i < k->all; ++i, at += 2) {
    if (i + NEAR < k->all) {
      __builtin_prefetch((char*)k->locals[i + NEAR] + k->handle);
      const char* tensor = tensor_of(k, k->locals[i + BLOCK]);
      __builtin_prefetch(tensor + k->functions->storage);
      __builtin_prefetch(tensor + offset_at(k->functions));
    }
    const Place now = place_of(k, k->locals[i]);
    if (now.memory != at[0] || now.offset != at[1]) return false;
  }
  return true;
}

static bool parts_are_the_same(const PartRecord* k) {
  if (!fuseopt_holds(k->held)) return false;
  for (int64_t i = 0; i < k->all; ++i) {
    if (i + NEAR < k->all) {
      __builtin_prefetch((char*)k->wholes[i + NEAR] + k->type);
      __builtin_prefetch((char*)k->wholes[i + NEAR] + k->spec);
    }
    const void* whole = k->wholes[i];
    if (slot(whole, k->type) != k->kind || slot(whole, k->local) != k->locals[i] ||
        slot(whole, k->spec) != k->specs[i])
      return false;
  }
  begin(k->known);
  compare(k->functions, k->known, 0, k->n);
  if (finish(k->functions, k->known)) return false;
  for (int64_t i = 0; i < k->n; ++i) {
    if (i + FAR < k->n) {
      fetch_tensor(k, k->wholes[i + FAR]);
      const char* meta = field_of(k, k->wholes[i + NEAR], META);
      __builtin_prefetch(meta);
      __builtin_prefetch(meta + REQUIRED);
    }
    const void* whole = tensor_of(k, k->wholes[i]);
    if (k->required(whole) != (k->flags[i] == 1)) return false;
    k->grads[i] = k->gradient(whole);
    __builtin_prefetch((const char*)slot(k->grads[i], 0) + k->functions->storage);
  }
  return true;
}

// Prefetch what `take_parts` reads of later parameters.
static void fetch_gradients(const PartRecord* k, int64_t i) {
  const int64_t storage = k->functions->storage;
  if (i + FAR >= k->n) return;
  const char* whole = (const char*)slot(slot(k->grads[i + NEXT], 0), storage + OBJECT);
  __builtin_prefetch(whole + k->type);
  __builtin_prefetch(whole + k->spec);
  __builtin_prefetch((char*)k->heres[i + FAR] + k->handle);
  fetch_tensor(k, k->heres[i + NEAR]);
  __builtin_prefetch(field_of(k, k->heres[i + NEXT], VERSION));
}

// Note the versions of parameters `from` to `to`, at most BLOCK, and put the parts of
// their gradients into a list. Add their number to `found`. The result is that of
// `fuseopt_parts`.
static int64_t take_parts(const PartRecord* k, int64_t from, int64_t to, void* grads,
                          int64_t* found) {
  void* parts[BLOCK];
  int64_t verdict = 0;
  for (int64_t i = from; i < to; ++i) {
    fetch_gradients(k, i);
    k->versions[i] = k->version((char*)k->heres[i] + k->handle);
    void* now = k->wrapped(k->grads[i]);
    if (!now) {
      PyErr_Clear();
      return 3;
    }
    void* part = 0;
    if (slot(now, k->type) == k->kind && slot(now, k->spec) == k->spreads[i])
      part = slot(now, k->local);
    if (part) __builtin_prefetch((char*)part + k->type);
    if (!part && now != k->none) verdict = 2;
    if (now == k->none) k->grads[i] = 0;
    parts[i - from] = part;
    Py_DecRef(now);  // the parameter keeps it alive, and it keeps its part
  }
  for (int64_t i = from; i < to; ++i) {
    void*& part = parts[i - from];
    if (part && slot(part, k->type) != k->plain) {
      verdict = 2;
      part = 0;
    }
    if (part) Py_IncRef(part);
  }
  for (int64_t i = from; i < to; ++i) {
    void* part = parts[i - from];
    if (!part) continue;
    ++*found;
    const Functions* f = k->functions;
    __builtin_prefetch(tensor_of(k, part) + f->storage);
    __builtin_prefetch(tensor_of(k, part) + f->first + 8 * f->words - 8);
    PyList_SetItem(grads, i, part);  // takes the reference
    part = i < BLOCK ? k->none : PyList_GetItem(grads, i - BLOCK);
    if (part != k->none) __builtin_prefetch(field_of(k, part, 0) + f->memory);
  }
  return verdict;
}

static int64_t parts_of(const PartRecord* k, void* grads, bool whole_state) {
  try {
    if (k->mode()) return 3;
    if (whole_state && !state_is_in_place(k)) return 1;
    if (!parts_are_the_same(k)) return 1;
    int64_t found = 0;
    for (int64_t i = 0; i < k->n; i += BLOCK) {
      const int64_t end = i + BLOCK < k->n ? i + BLOCK : k->n;
      const int64_t verdict = take_parts(k, i, end, grads, &found);
      if (verdict) return verdict;
    }
    return found ? 0 : 2;
  } catch (...) { return 3; }
}

// Returns 0 if nothing changed, there is a gradient, and `grads` has the parts of all
// gradients. Returns 1 if anything but gradients changed, 2 if Python must compare
// gradients alone, 3 if it must compare everything.
extern "C" int64_t fuseopt_parts(const PartRecord* k, void* grads) {
  return parts_of(k, grads, true);
}
// The same before a step that compares the tensors of the state itself.
extern "C" int64_t fuseopt_parts_but_state(const PartRecord* k, void* grads) {
  return parts_of(k, grads, false);
}

// Increment the versions of DTensors whose parts' versions differ from those of the
// last look. Returns -1 if a tensor has no version counter.
extern "C" int64_t fuseopt_parts_bump(const PartRecord* k) {
  try {
    for (int64_t i = 0; i < k->n; ++i) {
      if (i + FAR < k->n) {
        fetch_tensor(k, k->heres[i + FAR]);
        fetch_tensor(k, k->wholes[i + FAR]);
        __builtin_prefetch(field_of(k, k->heres[i + NEAR], VERSION));
        __builtin_prefetch(field_of(k, k->wholes[i + NEAR], VERSION), 1);
      }
      if (k->version((char*)k->heres[i] + k->handle) != k->versions[i])
        k->bump((char*)k->wholes[i] + k->handle);
    }
  } catch (...) { return -1; }
  return 0;
}

// Increment the versions of the gradients of the last look, as the function before.
extern "C" int64_t fuseopt_parts_bump_gradients(const PartRecord* k) {
  try {
    for (int64_t i = 0; i < k->n; ++i)
      if (k->grads[i]) k->bump((void*)k->grads[i]);
  } catch (...) { return -1; }
  return 0;
}
