// What the table of a kernel on a device is told before a launch: where its tensors
// lie, and the numbers of the CPU that it reads.
struct Addresses {
  int64_t n;                // of slots, of all lanes
  const int64_t* words;     // of each: the word it goes to
  const int64_t* position;  // its place in the pool
  const int64_t* cell;      // the cell that it is in, or -1
  const int64_t* owner;     // the lane whose elements it is the first of, or -1
  int64_t lanes;
  const int64_t* layouts;  // of each lane: the word that says which path may take it
  const int64_t* strided;  // what that is if it has a geometry, or -1
  int64_t* odd;            // of each lane: is one of its addresses off 16 bytes?
  int64_t flat, aligned;   // what the word is then, and otherwise
  int64_t low, high;       // which words this call changed; both 0 for none
};
struct Numbers {
  int64_t n;                // of numbers that lie elsewhere
  const int64_t* position;  // of each: its place in the pool
  const int64_t* cell;      // the word it goes to
  const int64_t* bytes;     // how many it has
  int64_t cells;            // words in all, some of which others write
  uint64_t *words, *seen;   // as they are, and as they were at the last call
};
// All tables of a step on one device.
struct Told {
  int64_t n;                    // of tables
  Addresses* const* addresses;  // of each
  Numbers* const* numbers;      // of each, or null
  int64_t* const* lanes;        // the words of its lanes
  const uint64_t* first_cell;   // where its cells lie on the device
  const int64_t* lanes_at;      // the word of the arena that its lanes begin at
  const int64_t* cells_at;      // and its cells
  int64_t words;                // of the pool of addresses
  const uint64_t* pool;         // as it is
  uint64_t* known;              // as it was at the last call
  int64_t stale;                // write all addresses?
  int64_t* range;               // which words of the arena the device lacks: from, to
};
// Memory of the CPU that a step writes before its last launch on a device.
struct Saved {
  int64_t n;                // of tensors
  const int64_t* position;  // of each: the place of its address in the pool
  const int64_t* bytes;     // how many it has
  char* memory;             // room for all of them
};

static inline void put(Addresses* a, int64_t* lanes, int64_t at, int64_t value) {
  if (lanes[at] == value) return;
  lanes[at] = value;
  if (a->high == 0 || at < a->low) a->low = at;
  if (at >= a->high) a->high = at + 1;
}

// Writes addresses into the words of lanes; `cells`: the address of the first cell.
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

// Reads numbers as they are now; has a cell changed since the last call?
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

static inline void lacks(Told* x, int64_t low, int64_t high) {
  if (low == high) return;
  const int64_t none = x->range[0] == x->range[1];
  if (none || low < x->range[0]) x->range[0] = low;
  if (none || high > x->range[1]) x->range[1] = high;
}

// Brings the arena's words up to date; how many words does the device lack then?
extern "C" int64_t fuseopt_told(Told* x) {
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

// Copies tensors to `memory`; `back`: from there.
extern "C" void fuseopt_saved(const Saved* x, const uint64_t* pool, int64_t back) {
  char* kept = x->memory;
  for (int64_t i = 0; i < x->n; kept += x->bytes[i++]) {
    char* at = (char*)pool[x->position[i]];
    __builtin_memcpy(back ? at : kept, back ? kept : at, (uint64_t)x->bytes[i]);
  }
}
