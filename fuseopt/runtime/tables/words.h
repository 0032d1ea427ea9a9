// Updates to the table of a kernel on a device before a launch. They are the addresses
// of its tensors, and the numbers of the CPU that it reads.
struct Addresses {
  int64_t n;                // slots of all lanes
  const int64_t* words;     // of each: the word that gets its address
  const int64_t* position;  // its place in the pool
  const int64_t* cell;      // its cell, or -1
  const int64_t* owner;     // the lane whose first element it points to, or -1
  int64_t lanes;
  const int64_t* layouts;  // of each lane: the word that chooses its path
  const int64_t* strided;  // the word's value if it has a geometry, or -1
  int64_t* odd;            // of each lane: not 0 if an address is off 16 bytes
  int64_t flat, aligned;   // the word's value then, and otherwise
  int64_t low, high;       // range of the words that this call changed; both 0: none
};
struct Numbers {
  int64_t n;                // numbers outside of the cells
  const int64_t* position;  // of each: its place in the pool
  const int64_t* cell;      // its word
  const int64_t* bytes;     // its size
  int64_t cells;            // words in all; some have other writers
  uint64_t *words, *seen;   // the present ones, and those of the last call
};
// All tables of a step on one device.
struct DeviceTables {
  int64_t n;                    // tables
  Addresses* const* addresses;  // of each
  Numbers* const* numbers;      // of each, or null
  int64_t* const* lanes;        // the words of its lanes
  const uint64_t* first_cell;   // address of its cells on the device
  const int64_t* lanes_at;      // first word of its lanes in the arena
  const int64_t* cells_at;      // first word of its cells
  int64_t words;                // of the pool of addresses
  const uint64_t* pool;         // at present
  uint64_t* known;              // at the last call
  int64_t stale;                // not 0: write all addresses
  int64_t* range;               // words of the arena that the device lacks: from, to
};
// Memory of the CPU that a step writes before its last launch on a device.
struct SavedMemory {
  int64_t n;                // tensors
  const int64_t* position;  // of each: the place of its address in the pool
  const int64_t* bytes;     // its size
  char* memory;             // room for all of them
};

static inline void put(Addresses* a, int64_t* lanes, int64_t at, int64_t value) {
  if (lanes[at] == value) return;
  lanes[at] = value;
  if (a->high == 0 || at < a->low) a->low = at;
  if (at >= a->high) a->high = at + 1;
}

// Writes addresses into the words of lanes; `cells` is the address of the first cell.
extern "C" void fuseopt_addresses(Addresses* a, int64_t* lanes, const uint64_t* pool,
                                  uint64_t cells) {
  a->low = a->high = 0;
  for (int64_t i = 0; i < a->lanes; ++i) a->odd[i] = 0;
  for (int64_t i = 0; i < a->n; ++i) {
    const uint64_t at =
        a->cell[i] < 0 ? pool[a->position[i]] : cells + 8 * (uint64_t)a->cell[i];
    if (a->owner[i] >= 0) a->odd[a->owner[i]] |= (int64_t)(at & 15);
    put(a, lanes, a->words[i], (int64_t)at);
  }
  for (int64_t i = 0; i < a->lanes; ++i) {
    const int64_t flat = a->odd[i] ? a->flat : a->aligned;
    put(a, lanes, a->layouts[i], a->strided[i] < 0 ? flat : a->strided[i]);
  }
}

// Reads the present numbers. Returns 1 if a cell changed since the last call.
extern "C" int64_t fuseopt_numbers(Numbers* x, const uint64_t* pool) {
  for (int64_t i = 0; i < x->n; ++i)
    __builtin_memcpy(x->words + x->cell[i], (const void*)pool[x->position[i]],
                     (uint64_t)x->bytes[i]);
  int64_t changed = 0;
  for (int64_t i = 0; i < x->cells; ++i) {
    changed |= x->words[i] != x->seen[i];
    x->seen[i] = x->words[i];
  }
  return changed;
}

static inline void lacks(DeviceTables* x, int64_t low, int64_t high) {
  if (low == high) return;
  const int64_t none = x->range[0] == x->range[1];
  if (none || low < x->range[0]) x->range[0] = low;
  if (none || high > x->range[1]) x->range[1] = high;
}

// Updates the arena's words. Returns how many words the device then lacks.
extern "C" int64_t fuseopt_update_arena(DeviceTables* x) {
  const uint64_t bytes = (uint64_t)x->words * 8;
  if (x->stale || __builtin_memcmp(x->pool, x->known, bytes) != 0) {
    for (int64_t i = 0; i < x->n; ++i) {
      Addresses* a = x->addresses[i];
      fuseopt_addresses(a, x->lanes[i], x->pool, x->first_cell[i]);
      lacks(x, x->lanes_at[i] + a->low, x->lanes_at[i] + a->high);
    }
    __builtin_memcpy(x->known, x->pool, bytes);
    x->stale = 0;
  }
  for (int64_t i = 0; i < x->n; ++i) {
    Numbers* numbers = x->numbers[i];
    if (numbers && fuseopt_numbers(numbers, x->pool))
      lacks(x, x->cells_at[i], x->cells_at[i] + numbers->cells);
  }
  return x->range[1] - x->range[0];
}

// Copies tensors to `memory`, with `back` from there.
extern "C" void fuseopt_saved(const SavedMemory* x, const uint64_t* pool,
                              int64_t back) {
  char* kept = x->memory;
  for (int64_t i = 0; i < x->n; kept += x->bytes[i++]) {
    char* at = (char*)pool[x->position[i]];
    __builtin_memcpy(back ? at : kept, back ? kept : at, (uint64_t)x->bytes[i]);
  }
}
