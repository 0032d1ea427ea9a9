// What a step writes in the CPU's memory before something that may fail.
struct Saved {
  int64_t n;
  const int64_t* position;  // of each: its address in the pool
  const int64_t* bytes;
};

// Copy all of it, one after another.
extern "C" void fuseopt_save(const Saved* s, const uint64_t* pool, char* copy) {
  for (int64_t i = 0; i < s->n; copy += s->bytes[i++])
    __builtin_memcpy(copy, reinterpret_cast<const void*>(pool[s->position[i]]),
                     s->bytes[i]);
}

// Write back what was copied.
extern "C" void fuseopt_put_back(const Saved* s, const uint64_t* pool,
                                 const char* copy) {
  for (int64_t i = 0; i < s->n; copy += s->bytes[i++])
    __builtin_memcpy(reinterpret_cast<void*>(pool[s->position[i]]), copy, s->bytes[i]);
}
