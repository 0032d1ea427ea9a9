// Compares addresses and metadata of a call's tensors with a record of them.
#include <stdint.h>
extern "C" {
int PyDict_Next(void* dict, intptr_t* at, void** key, void** value);
intptr_t PyTuple_Size(void* tuple);
void* PyTuple_GetItem(void* tuple, intptr_t i);
void* PyList_GetItem(void* list, intptr_t i);
}

struct Functions {
  int64_t handle;  // offset of a Python tensor's at::Tensor
  // properties of an at::Tensor through torch's C shim; a result other than 0: failed
  int32_t (*data)(void*, void**);
  int32_t (*dims)(void*, int64_t*);
  int32_t (*dtype)(void*, int32_t*);
  int32_t (*device)(void*, int32_t*);
  int32_t (*device_index)(void*, int32_t*);
  int32_t (*sizes)(void*, int64_t**);
  int32_t (*strides)(void*, int64_t**);
  int32_t (*bytes)(void*, int64_t*);  // of its storage
  void (*bump)(void*);  // version counter of an at::Tensor; may throw, or be null
  int64_t storage;      // offset of a TensorImpl's storage
  int64_t first,
      words;        // the bytes before the compared fields, and their words; 0: none
  int64_t kind;     // the word of those that has dtype and device, and gaps
  int64_t inlined;  // largest number of dims whose sizes and strides lie in the fields
  int64_t memory;   // offset of a storage's memory and owner
};
struct TensorRecord {
  int64_t n;
  uint64_t* addresses;
  uint64_t* now;
  const int64_t* metadata;  // of each: dtype, device, index, dims, sizes, strides
  const int64_t* begins;    // of each: the index in `metadata` at which its part begins
  uint64_t* seen;           // memory of each when it was last found unchanged
  uint64_t* fields;    // n records of fields shared by kin, which never change, then
                       // n of single tensors; all ones: none yet
  int64_t* like;       // of each: the record that it matched then
  const int64_t* kin;  // of each: the first tensor with the same metadata
  char** tensors;      // the at::Tensor of each in the last call
  int64_t* moved;      // those of which only the address changed in this call
  int64_t n_moved;
  int64_t found;  // changes that this call has found so far: OTHER, UNASKED
  // the moves that need no Python; null `loose`: none
  const uint8_t* loose;   // of each: FREELY or ALONE, or 0 if it may not move
  const uint64_t* reach;  // of each: bytes from its first element to behind its last
  int64_t spans;  // written memory that does not move: sorted, from starts to ends
  const uint64_t *starts, *ends;
  int64_t stays;  // all memory that does not move, in the same way
  const uint64_t *stay_starts, *stay_ends;
  int64_t mobile;  // where some may move ALONE: the number of all that may move, and
  int64_t* order;  // their indices, in the order of their addresses in the last check
  uint64_t* pool;  // of each its address, then those of the views
  int64_t n_views;
  const int64_t* views;  // place in the pool, place of its base, distance
};

static const int64_t OWNER = 3;  // words: the memory, what owns it, what frees it
static const int64_t WIDE = 8;   // words compared at a time
static const int64_t DIMS = 3;   // where in a tensor's metadata its dims are
typedef uint64_t Words __attribute__((vector_size(64), aligned(8), may_alias));
// Tensors that are compared at once; where one differs, each is compared alone.
static const int64_t BLOCK = 8;
// Offset of a tensor's version from its storage. A wrong offset would only prefetch
// useless memory.
static const int64_t VERSION = 24;
// Distances of prefetches: Python's object, the tensor, its storage.
static const int64_t FAR = 3 * BLOCK, NEAR = 2 * BLOCK, NEXT = BLOCK;

// Bits by which a tensor's data pointer, its context and its deleter differ from
// `seen`.
static inline uint64_t memory_but_seen(const Functions* f, const char* impl,
                                       const uint64_t* seen) {
  const char* storage = *(char**)(impl + f->storage);
  if (!storage) return 1;
  const uint64_t* owner = (const uint64_t*)(storage + f->memory);
  uint64_t other = 0;
  for (int64_t i = 0; i < OWNER; ++i) other |= owner[i] ^ seen[i];
  return other;
}
// Bits by which the fields of its TensorImpl differ from `seen`.
static inline Words fields_but_seen(const Functions* f, const char* impl,
                                    const uint64_t* seen) {
  const uint64_t* fields = (const uint64_t*)(impl + f->first);
  // the last eight words may overlap those before
  Words differ = {0};
  for (int64_t i = 0; i < f->words; i += WIDE) {
    const int64_t at = i + WIDE <= f->words ? i : f->words - WIDE;
    differ |= *(const Words*)(fields + at) ^ *(const Words*)(seen + at);
  }
  return differ;
}
static inline bool none(Words differ) {
  uint64_t other = 0;
  for (int64_t i = 0; i < WIDE; ++i) other |= differ[i];
  return other == 0;
}
// Record the memory and the fields of a tensor whose metadata are unchanged. Most
// tensors share the record of their kin, so that the records stay in the caches.
static void see(const Functions* f, const TensorRecord* k, int64_t i) {
  if (!f->words) return;
  const char* impl = *(char**)k->tensors[i];
  const char* storage = *(char**)(impl + f->storage);
  const uint64_t* fields = (const uint64_t*)(impl + f->first);
  // sizes and strides of more dims lie outside of the TensorImpl
  if (!storage || fields[0] > (uint64_t)f->inlined) return;
  const uint64_t* owner = (const uint64_t*)(storage + f->memory);
  for (int64_t w = 0; w < OWNER; ++w) k->seen[i * OWNER + w] = owner[w];
  const uint64_t* last = k->fields + k->like[i] * f->words;
  if (none(fields_but_seen(f, impl, last))) return;
  uint64_t* record = k->fields + k->kin[i] * f->words;
  k->like[i] = k->kin[i];
  if (none(fields_but_seen(f, impl, record))) return;
  if (record[f->words - 1] != ~0ull) {  // its kin have other fields
    k->like[i] = k->n + i;
    record = k->fields + (k->n + i) * f->words;
  }
  for (int64_t w = 0; w < f->words; ++w) record[w] = fields[w];
}
// Is a tensor with changed fields of the same kind? Fields of different tensors may
// differ in their gaps.
static bool same_kind(const Functions* f, void* tensor, const int64_t* metadata,
                      const uint64_t* seen) {
  int32_t dtype = 0, device = 0, index = 0;
  if (f->dtype(tensor, &dtype) | f->device(tensor, &device) |
      f->device_index(tensor, &index))
    return false;
  if (dtype != metadata[0] || device != metadata[1] || index != metadata[2])
    return false;
  const uint64_t* fields = (const uint64_t*)(*(char**)tensor + f->first);
  const uint64_t last = f->words ? seen[f->words - 1] : ~0ull;
  if (last != ~0ull) {
    if (fields[f->words - 1] != last) return false;  // keys
    bool same = true;
    for (int64_t i = 0; i < f->words; ++i) same &= i == f->kind || fields[i] == seen[i];
    if (same) return true;
  }
  int64_t dims = 0, *sizes = 0, *strides = 0;
  if (f->dims(tensor, &dims) | f->sizes(tensor, &sizes) | f->strides(tensor, &strides))
    return false;
  const int64_t* expected = metadata + DIMS + 1;
  if (dims != metadata[DIMS]) return false;
  for (int64_t d = 0; d < dims; ++d)
    if (expected[d] != sizes[d] || expected[dims + d] != strides[d]) return false;
  return true;
}
// Moves of a tensor: FREELY to memory that the step does not write, ALONE to memory
// that no other tensor of the step has.
static const uint8_t FREELY = 1, ALONE = 2;

// Is some memory disjoint from all of sorted spans?
static bool beside(uint64_t low, uint64_t high, int64_t spans, const uint64_t* starts,
                   const uint64_t* ends) {
  if (low == high) return true;
  int64_t after = 0, end = spans;  // the first that starts behind `low`
  while (after < end) {
    const int64_t middle = (after + end) / 2;
    if (starts[middle] > low) end = middle;
    else after = middle + 1;
  }
  if (after > 0 && ends[after - 1] > low) return false;
  return after == spans || starts[after] >= high;
}
// Is a tensor's new memory disjoint from that of the tensors that do not move?
static bool may_move(const TensorRecord* k, int64_t i) {
  const uint64_t low = k->now[i], high = low + k->reach[i];
  if (k->loose[i] == FREELY) return beside(low, high, k->spans, k->starts, k->ends);
  return k->loose[i] == ALONE &&
         beside(low, high, k->stays, k->stay_starts, k->stay_ends);
}
// Are the tensors that may move disjoint from one another, where they must be?
static bool alone(const TensorRecord* k) {
  // mostly nearly sorted: allocators reuse the same blocks
  for (int64_t gap = k->mobile; gap > 1;) {
    gap = gap > 4 ? 4 * gap / 9 : 1;
    for (int64_t m = gap; m < k->mobile; ++m) {
      const int64_t i = k->order[m];
      int64_t at = m;
      for (; at >= gap && k->now[k->order[at - gap]] > k->now[i]; at -= gap)
        k->order[at] = k->order[at - gap];
      k->order[at] = i;
    }
  }
  uint64_t end = 0, end_alone = 0;  // the end of memory so far: of all, of those ALONE
  for (int64_t m = 0; m < k->mobile; ++m) {
    const int64_t i = k->order[m];
    const uint64_t low = k->now[i], high = low + k->reach[i];
    const bool is_alone = k->loose[i] == ALONE;
    if (low == high) continue;
    if (low < end_alone || (is_alone && low < end)) return false;
    if (high > end) end = high;
    if (is_alone && high > end_alone) end_alone = high;
  }
  return true;
}
// Follow tensors that moved, where all of them may.
static bool follow(const Functions* f, const TensorRecord* k, int64_t moved) {
  if (!k->loose) return false;
  for (int64_t m = 0; m < moved; ++m)
    if (!may_move(k, k->moved[m])) return false;
  if (k->mobile && !alone(k)) return false;
  for (int64_t m = 0; m < moved; ++m) {
    const int64_t i = k->moved[m];
    k->pool[i] = k->addresses[i] = k->now[i];
    see(f, k, i);
  }
  for (const int64_t* v = k->views; v < k->views + 3 * k->n_views; v += 3)
    k->pool[v[0]] = k->pool[v[1]] + v[2];
  return true;
}

// Has a tensor elements, but no memory for them? A wrapper has no memory. A view of
// freed memory has an address, but no memory.
static bool nowhere(const Functions* f, char* tensor, const void* address,
                    const int64_t* metadata) {
  bool held = address;
  if (held && f->words) {
    const char* storage = *(char**)(*(char**)tensor + f->storage);
    held = !storage || *(const uint64_t*)(storage + f->memory);
  } else if (held) {
    int64_t bytes = 0;
    held = f->bytes(tensor, &bytes) || bytes;
  }
  if (held) return false;
  for (int64_t d = 0; d < metadata[DIMS]; ++d)
    if (metadata[DIMS + 1 + d] == 0) return false;
  return true;
}

static const int64_t MOVED = 1, OTHER = 2, UNASKED = 4;

// Compare one tensor with its record: 0 if unchanged, else one of the above.
static int64_t compare_one(const Functions* f, const TensorRecord* k, int64_t i) {
  uint64_t* seen = k->seen + i * OWNER;
  const uint64_t* fields = k->fields + k->like[i] * f->words;
  char* tensor = k->tensors[i];
  const char* impl = *(char**)tensor;
  const bool alike = f->words && none(fields_but_seen(f, impl, fields));
  k->now[i] = k->addresses[i];
  if (alike && !memory_but_seen(f, impl, seen)) return 0;
  seen[0] = ~0ull;  // an impossible address, until the tensor is found unchanged
  if (!alike && !same_kind(f, tensor, k->metadata + k->begins[i], fields)) return OTHER;
  void* address = 0;
  if (f->data(tensor, &address)) return UNASKED;
  if (nowhere(f, tensor, address, k->metadata + k->begins[i])) return UNASKED;
  k->now[i] = (uint64_t)address;
  if (k->now[i] != k->addresses[i]) return MOVED;
  see(f, k, i);
  return 0;
}
static void note(const Functions* f, TensorRecord* k, int64_t i) {
  const int64_t change = compare_one(f, k, i);
  if (change == MOVED) k->moved[k->n_moved++] = i;
  else k->found |= change;
}
// Compare tensors `from` to `to`, up to the first that is OTHER or UNASKED.
static void compare(const Functions* f, TensorRecord* k, int64_t from, int64_t to) {
  for (int64_t b = from; b < to && !k->found; b += BLOCK) {
    const int64_t end = b + BLOCK < to ? b + BLOCK : to;
    if (f->words) {
      if (end + FAR < to)
        for (int64_t i = b; i < end; ++i) {
          __builtin_prefetch(k->tensors[i + FAR]);
          const char* impl = *(char**)k->tensors[i + NEAR];
          __builtin_prefetch(impl + f->storage);
          __builtin_prefetch(impl + f->first + 8 * f->words - 8);
          impl = *(char**)k->tensors[i + NEXT];
          __builtin_prefetch(*(char**)(impl + f->storage) + f->memory);
        }
      Words differ = {0};
      uint64_t other = 0;
      for (int64_t i = b; i < end; ++i) {
        const char* impl = *(char**)k->tensors[i];
        differ |= fields_but_seen(f, impl, k->fields + k->like[i] * f->words);
        other |= memory_but_seen(f, impl, k->seen + i * OWNER);
      }
      if (none(differ) && !other) {
        for (int64_t i = b; i < end; ++i) k->now[i] = k->addresses[i];
        continue;
      }
    }
    for (int64_t i = b; i < end; ++i) note(f, k, i);
  }
}
static void begin(TensorRecord* k) { k->n_moved = k->found = 0; }
// The result for all tensors. It is also 0 if all moved tensors may move.
static int64_t finish(const Functions* f, const TensorRecord* k) {
  if (k->found & UNASKED) return UNASKED;
  if (k->found) return OTHER | (k->n_moved != 0);
  return k->n_moved && !follow(f, k, k->n_moved);
}

// Compare the values of two dicts, then those of a tuple. Return MOVED if an address
// differs, plus OTHER if another property does. Return UNASKED if a property cannot be
// read.
extern "C" int64_t fuseopt_tensors(const Functions* f, TensorRecord* k, void* buffers,
                                   void* parameters, void* args) {
  int64_t count = 0;
  void *dicts[2] = {buffers, parameters}, *key, *value;
  begin(k);
  for (int d = 0; d < 2; ++d)
    for (intptr_t at = 0; PyDict_Next(dicts[d], &at, &key, &value);)
      if (count++ < k->n) k->tensors[count - 1] = (char*)value + f->handle;
  const int64_t n_args = PyTuple_Size(args);
  if (count + n_args != k->n) return UNASKED;
  for (int64_t i = 0; i < n_args; ++i)
    k->tensors[count + i] = (char*)PyTuple_GetItem(args, i) + f->handle;
  compare(f, k, 0, k->n);
  return finish(f, k);
}

// Compare the tensors of a list alone, after `fuseopt_lanes` has compared all other
// ones. `places` has the index of each of these among all tensors.
extern "C" int64_t fuseopt_others(const Functions* f, TensorRecord* k, void* list,
                                  const int64_t* places, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    k->tensors[places[i]] = (char*)PyList_GetItem(list, i) + f->handle;
  for (int64_t i = 0; i < n && !k->found; ++i) note(f, k, places[i]);
  return finish(f, k);
}

// A step whose first `n` tensors are among those of another step, `other`.
struct LinkedRecord {
  const Functions* functions;
  TensorRecord *known, *other;
  int64_t n;
  const int64_t* from;   // of each: its index among the other step's
  int64_t own, fresh;    // the first tensor of this step alone, and their number
  int64_t rest, others;  // the first of the last tensors, and their number
};

// Do the work of `fuseopt_tensors`, after the other step has compared its tensors in
// this call. It found them unchanged, or moved as they may. `list` has the `fresh`
// tensors, then the `others`.
extern "C" int64_t fuseopt_follow(const LinkedRecord* w, void* list) {
  const Functions* f = w->functions;
  TensorRecord *k = w->known, *other = w->other;
  begin(k);
  for (int64_t i = 0; i < w->n; ++i) {
    const uint64_t now = other->addresses[w->from[i]];
    k->tensors[i] = other->tensors[w->from[i]];
    k->now[i] = now;
    if (now == k->addresses[i]) continue;
    k->seen[i * OWNER] = ~0ull;  // unknown until the next comparison
    k->pool[i] = k->addresses[i] = now;
  }
  bool failed = false;
  for (int64_t i = w->own, at = 0; at < w->fresh; ++i, ++at) {
    void* address = 0;
    k->tensors[i] = (char*)PyList_GetItem(list, at) + f->handle;
    if (f->data(k->tensors[i], &address)) failed = true;
    k->seen[i * OWNER] = ~0ull;
    k->pool[i] = k->addresses[i] = k->now[i] = (uint64_t)address;
  }
  for (const int64_t* v = k->views; v < k->views + 3 * k->n_views; v += 3)
    k->pool[v[0]] = k->pool[v[1]] + v[2];
  if (failed) return UNASKED;  // addresses and those of views agree
  for (int64_t i = 0; i < w->others; ++i)
    k->tensors[w->rest + i] = (char*)PyList_GetItem(list, w->fresh + i) + f->handle;
  for (int64_t i = 0; i < w->others && !k->found; ++i) note(f, k, w->rest + i);
  return finish(f, k);
}

// Record the tensors of the last call, which must have compared all of them.
extern "C" void fuseopt_accept(const Functions* f, const TensorRecord* k) {
  for (int64_t i = 0; i < k->n; ++i) {
    k->addresses[i] = k->now[i];
    see(f, k, i);
  }
}

// Increment the version counters of some tensors of the last call. Returns -1 if a
// tensor has none.
extern "C" int64_t fuseopt_bump(const Functions* f, const TensorRecord* k,
                                const int64_t* which, int64_t n) {
  try {
    for (int64_t i = 0; i < n; ++i) {
      if (f->words && i + FAR < n) {
        const char* impl = *(char**)k->tensors[which[i + FAR]];
        __builtin_prefetch(impl + f->storage + VERSION);
        impl = *(char**)k->tensors[which[i + NEAR]];
        __builtin_prefetch(*(char**)(impl + f->storage + VERSION), 1);
      }
      f->bump(k->tensors[which[i]]);
    }
  } catch (...) { return -1; }
  return 0;
}
