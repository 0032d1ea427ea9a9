// Runs one recorded launch of a kernel with several numbers of threads, each on a copy of
// its own of the tensors, and compares what it leaves with what was recorded.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Library {
  void (*sqrt_f32)(int, const float*, float*, long long);
  void (*sqrt_f64)(int, const double*, double*, long long);
  int64_t newton;
  void* const* functions;
  int64_t vector;
  int64_t vendor;
};
struct Table {
  void* const* pool;
  const int32_t* position;
  const double* rows;
  const int32_t* row;
  const int64_t* start;
  const int64_t* geometry;
  const int64_t* strided;
  double* values;
  int64_t lanes;
  int64_t threads;
  const Library* library;
  uint64_t* partials;
};
extern "C" void fuseopt_step(Table* tables, int64_t threads);

static FILE* file;
static void take(void* to, size_t n) {
  if (n && fread(to, 1, n, file) != n) { fputs("short file\n", stderr); exit(2); }
}
static int64_t number() { int64_t x; take(&x, 8); return x; }
// An allocation of just n bytes; memory that nobody wrote has a pattern.
static char* block(size_t n) {
  char* made = (char*)malloc(n);
  memset(made, 0xA5, n);
  return made;
}
static char* column() {
  const int64_t n = number();
  char* made = block(n);
  take(made, n);
  return made;
}

int main(int argc, char** argv) {
  file = fopen(argv[1], "rb");
  if (!file) return 2;
  const int runs = argc - 2;
  const int64_t regions = number(), newton = number(), vector = number();
  int64_t* sizes = (int64_t*)block(8 * regions);
  char** before = (char**)block(sizeof(char*) * regions);
  char** after = (char**)block(sizeof(char*) * regions * runs);
  for (int64_t k = 0; k < regions; ++k) {
    sizes[k] = number();
    before[k] = block(sizes[k]);
    take(before[k], sizes[k]);
    for (int r = 0; r < runs; ++r) {
      after[k * runs + r] = block(sizes[k]);
      take(after[k * runs + r], sizes[k]);
    }
  }
  const int64_t places = number();
  int64_t* place = (int64_t*)block(16 * places);
  take(place, 16 * places);
  const int64_t n = number();
  Table* tables = (Table*)block(sizeof(Table) * n);
  int64_t *folds = (int64_t*)block(8 * n), *values = (int64_t*)block(8 * n);
  void** functions = (void**)calloc(64, sizeof(void*));
  const Library library = {0, 0, newton, functions, vector, 0};
  for (int64_t v = 0; v < n; ++v) {
    Table& t = tables[v];
    t.lanes = number(), folds[v] = number(), values[v] = number();
    t.position = (const int32_t*)column();
    t.rows = (const double*)column();
    t.row = (const int32_t*)column();
    t.start = (const int64_t*)column();
    t.geometry = (const int64_t*)column();
    t.strided = (const int64_t*)column();
    t.library = &library;
  }
  int wrong = 0;
  for (int r = 0; r < runs; ++r) {
    const int64_t threads = atoi(argv[2 + r]);
    char** now = (char**)block(sizeof(char*) * regions);
    for (int64_t k = 0; k < regions; ++k)
      now[k] = (char*)memcpy(block(sizes[k]), before[k], sizes[k]);
    void** pool = (void**)block(sizeof(void*) * places);
    for (int64_t k = 0; k < places; ++k)
      pool[k] = place[2 * k] < 0 ? 0 : now[place[2 * k]] + place[2 * k + 1];
    for (int64_t v = 0; v < n; ++v) {
      Table& t = tables[v];
      t.pool = pool;
      t.threads = threads;
      t.values = (double*)block(8 * values[v]);
      t.partials = (uint64_t*)block(8 * t.lanes * threads * folds[v]);
    }
    fuseopt_step(tables, threads);
    for (int64_t k = 0; k < regions; ++k)
      if (memcmp(now[k], after[k * runs + r], sizes[k])) {
        fprintf(stderr, "%ld threads: other bits in region %ld\n", (long)threads, (long)k);
        wrong = 3;
      }
    for (int64_t k = 0; k < regions; ++k) free(now[k]);
    for (int64_t v = 0; v < n; ++v) free(tables[v].values), free(tables[v].partials);
    free(pool), free(now);
    if (!wrong) puts("right");
  }
  return wrong;
}
