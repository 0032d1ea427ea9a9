extern "C" {
void* PyObject_GetAttr(void* object, void* name);
intptr_t PyList_Size(void* list);
int PyList_SetItem(void* list, intptr_t i, void* item);
intptr_t PyDict_Size(void* dict);
void* PyFunction_GetCode(void* function);
void Py_IncRef(void* object);
void Py_DecRef(void* object);
void PyErr_Clear(void);
}

// The contents of dicts and lists. The first of them is an argument of each look.
struct ContainerRecord {
  int64_t n;  // containers; 0: nothing is recorded
  void* const* containers;
  const int64_t* sizes;  // entries of a dict; of a list -1 - items
  void* const* items;    // of a dict its keys, then its values; of a list its items
  // The offset of a dict's version (PEP 509), which is unique to a state of a dict; 0:
  // there is none. Of each the version at which its contents last matched; 0: unknown.
  int64_t version;
  uint64_t* versions;
};

struct LaneRecord {
  int64_t n;
  void* const* params;    // of each lane
  void* const* states;    // of each lane: its state, a dict
  const int64_t* counts;  // entries of each lane's state; -1: it has none
  void* const* held;      // of all states: key, value, key, value ...
  const int64_t* flags;   // of each lane: its requires_grad
  // Of each lane, 1 if: it has a gradient in the record; it may lack one; it has one
  // now.
  const uint8_t *had, *may_lack;
  uint8_t* has;
  int64_t lists;  // parameters of all groups, list by list
  const int64_t* sizes;
  void* const* members;
  int64_t entries;  // of the optimizer's state: key, value, key, value ...
  void* const* owned;
  void *none, *yes;   // None, True
  void *grad, *flag;  // "grad", "requires_grad"
  int64_t type;       // offset of an object's type
  void* kinds[2];     // types that a gradient may have
  void* integer;      // the type of counters; in `held` these are null
  // The counters of all lanes, a list; and how many each lane has.
  void* counters;
  const int64_t* counted;
  // The descriptor of both attributes, and its read function; null: by
  // PyObject_GetAttr.
  void* descriptor;
  void* (*read)(void* descriptor, void* object, void* kind);
  int64_t handle;  // offset of a Python tensor's at::Tensor
  bool (*required)(const void* tensor);
  // Return the gradient of the at::Tensor, and its object of Python; or null. Not used
  // while a mode intercepts functions.
  const void* (*gradient)(const void* tensor);
  void* (*wrapped)(const void* gradient);
  bool (*mode)(void);
  // As in ContainerRecord: of the optimizer's state, then of each lane's.
  int64_t version;
  uint64_t* versions;
  // The tensors of a step that this compares too, or null. Then `gradients` has the
  // index of each lane's gradient among them. `held_in` has `ranges` of the indices of
  // tensors in lanes' states.
  const Functions* functions;
  TensorRecord* known;
  const int64_t* gradients;
  void* const* stand_ins;  // of each lane: compared in place of a missing gradient
  int64_t ranges;
  const int64_t* held_in;       // from, to, from, to ...
  const ContainerRecord* rest;  // the optimizer's contents besides its lanes, or null
  // Of each lane the index of its gradient in `from`, see below; -1: it is param.grad.
  const int64_t* given;
};

static const int64_t SOON = 8;  // distance of prefetches, in lanes

// Has a dict the version `seen`? Then its entries need no comparison. `at` is the
// offset of its version, 0 if it has none.
static inline bool unchanged(int64_t at, const void* dict, const uint64_t* seen) {
  return at && *(uint64_t*)((char*)dict + at) == *seen;
}
static inline void remember_version(int64_t at, const void* dict, uint64_t* seen) {
  if (at) *seen = *(uint64_t*)((char*)dict + at);
}

static bool holds_the_same(const ContainerRecord* h, void* first) {
  void *key, *value, *const *item = h->items;
  for (int64_t c = 0; c < h->n; ++c) {
    void* container = c ? h->containers[c] : first;
    const int64_t size = h->sizes[c];
    if (size < 0) {
      if (PyList_Size(container) != -1 - size) return false;
      for (int64_t i = 0; i < -1 - size; ++i)
        if (PyList_GetItem(container, i) != *item++) return false;
      continue;
    }
    // the entries of the first, attributes of an object, are few: compare them all
    if (c && unchanged(h->version, container, h->versions + c)) {
      item += 2 * size;
      continue;
    }
    if (PyDict_Size(container) != size) return false;
    for (intptr_t at = 0; PyDict_Next(container, &at, &key, &value); ++item)
      if (key != item[0] || value != item[size]) return false;
    item += size;
    remember_version(h->version, container, h->versions + c);
  }
  return h->n > 0;
}

// Returns 1 if dicts and lists have the contents recorded in `h`, else 0.
extern "C" int64_t fuseopt_holds(const ContainerRecord* h) {
  return h->n && holds_the_same(h, h->containers[0]);
}

// Returns 1 if `n` functions of Python have these codes, else 0.
extern "C" int64_t fuseopt_codes(int64_t n, void* const* functions,
                                 void* const* codes) {
  for (int64_t i = 0; i < n; ++i)
    if (PyFunction_GetCode(functions[i]) != codes[i]) return 0;
  return 1;
}

// Returns 0 if the parameters of all groups and the states of all lanes are the
// recorded objects and `grads` has their gradients. Else returns 1. Returns 2 instead
// of 0 if `attributes`, the optimizer's, or its other contents differ from the record.
// Tensors are compared in the same pass. `from` is None, or a list of gradients that
// lanes will get. With a list it also returns 1 if a tensor is not compared, or if more
// than its address changed.
extern "C" int64_t fuseopt_lanes(const LaneRecord* k, void* attributes, void* lists,
                                 void* state, void* grads, void* from) {
  void *key, *value, *const *member = k->members;
  for (int64_t l = 0; l < k->lists; ++l) {
    void* list = PyList_GetItem(lists, l);
    if (PyList_Size(list) != k->sizes[l]) return 1;
    for (int64_t i = 0; i < k->sizes[l]; ++i)
      if (PyList_GetItem(list, i) != *member++) return 1;
  }
  if (!unchanged(k->version, state, k->versions)) {
    if (PyDict_Size(state) != k->entries) return 1;
    void* const* owned = k->owned;
    for (intptr_t at = 0; PyDict_Next(state, &at, &key, &value); owned += 2)
      if (key != owned[0] || value != owned[1]) return 1;
    remember_version(k->version, state, k->versions);
  }

  const bool direct = k->gradient && !k->mode();
  if (k->known) begin(k->known);
  void* const* entry = k->held;
  int64_t counter = 0;
  for (int64_t i = 0; i < k->n; ++i) {
    if (k->required && i + SOON < k->n)
      __builtin_prefetch(*(char**)((char*)k->params[i + SOON] + k->handle));
    void* param = k->params[i];
    void* kind = *(void**)((char*)param + k->type);
    const bool plain = kind == k->kinds[0] || kind == k->kinds[1];
    if (!plain && (k->read || k->required)) return 1;
    const int64_t item = from == k->none ? -1 : k->given[i];
    void* now = item >= 0 ? PyList_GetItem(from, item)
                : direct  ? k->wrapped(k->gradient(*(void**)((char*)param + k->handle)))
                : k->read ? k->read(k->descriptor, param, kind)
                          : PyObject_GetAttr(param, k->grad);
    if (item >= 0 && now) Py_IncRef(now);
    if (!now) {
      PyErr_Clear();
      return 1;
    }
    kind = *(void**)((char*)now + k->type);
    const bool none = now == k->none;
    PyList_SetItem(grads, i, now);  // takes the reference
    k->has[i] = !none;
    if (!k->may_lack[i] && none == (k->had[i] == 1)) return 1;
    if (!none && kind != k->kinds[0] && kind != k->kinds[1]) return 1;
    const int64_t place = k->known ? k->gradients[i] : -1;
    if (item >= 0 && !none && place < 0) return 1;  // it has no record
    if (none && place >= 0) now = k->stand_ins[i];
    if (place >= 0 && !now) k->known->found |= UNASKED;  // no tensor to compare
    if (place >= 0 && now) {
      k->known->tensors[place] = (char*)now + k->functions->handle;
      if (!k->known->found) note(k->functions, k->known, place);
    }
    if (k->required) {
      const void* tensor = *(void**)((char*)param + k->handle);
      if (k->required(tensor) != (k->flags[i] == 1)) return 1;
    } else {
      now = PyObject_GetAttr(param, k->flag);
      if (!now) {
        PyErr_Clear();
        return 1;
      }
      Py_DecRef(now);  // True or False, which stay alive
      if ((now == k->yes) != (k->flags[i] == 1)) return 1;
    }
    if (k->counts[i] < 0) continue;
    void* entries = k->states[i];
    void* const* first = entry;
    entry += 2 * k->counts[i];
    int64_t next = counter;
    counter += k->counted[i];
    if (unchanged(k->version, entries, k->versions + i + 1)) continue;
    if (PyDict_Size(entries) != k->counts[i]) return 1;
    for (intptr_t at = 0; PyDict_Next(entries, &at, &key, &value); first += 2) {
      if (key != first[0]) return 1;
      if (value == first[1]) continue;
      if (first[1] || *(void**)((char*)value + k->type) != k->integer) return 1;
      Py_IncRef(value);
      PyList_SetItem(k->counters, next++, value);  // takes the reference
    }
    remember_version(k->version, entries, k->versions + i + 1);
  }
  if (k->known)
    for (const int64_t* r = k->held_in; r < k->held_in + 2 * k->ranges; r += 2)
      compare(k->functions, k->known, r[0], r[1]);
  if (from != k->none && (!k->known || k->known->found)) return 1;
  return k->rest && holds_the_same(k->rest, attributes) ? 0 : 2;
}

// Returns 0 if two arrays have the same bytes, else 1.
extern "C" int64_t fuseopt_bytes(int64_t n, const uint8_t* a, const uint8_t* b) {
  uint8_t differ = 0;
  for (int64_t i = 0; i < n; ++i) differ |= a[i] ^ b[i];
  return differ != 0;
}
