// Do launches one after another: those of a block, then those of the next.
extern "C" void fuseopt_blocks(int64_t n, void (*const* entries)(const void*, int64_t),
                               const void* const* tables, int64_t threads) {
  for (int64_t i = 0; i < n; ++i) entries[i](tables[i], threads);
}
