// The lanes of a kernel's table that take part in a launch.
struct Rows {
  int64_t n;                // lanes of the table
  const int64_t* owner;     // of each: its index in the argument of the function
  int64_t slots;            // positions of each lane
  const int32_t* position;  // of all lanes; a launch reads `to_position`
  const int32_t* row;
  const int64_t* counts;  // elements of each lane; `to_start` has their sums
  const int64_t* strided;
  int32_t *to_position, *to_row;
  int64_t *to_start, *to_strided;
  int64_t* lanes;  // the number that a launch reads
};

// Keep only lanes whose owner has a 1 in `taking`, from now on. Null keeps all lanes.
extern "C" void fuseopt_rows(const Rows* r, const uint8_t* taking) {
  int64_t m = 0;
  for (int64_t i = 0; i < r->n; ++i) {
    if (taking && !taking[r->owner[i]]) continue;
    for (int64_t s = 0; s < r->slots; ++s)
      r->to_position[m * r->slots + s] = r->position[i * r->slots + s];
    r->to_row[m] = r->row[i];
    r->to_strided[m] = r->strided[i];
    r->to_start[m + 1] = r->to_start[m] + r->counts[i];
    ++m;
  }
  *r->lanes = m;
}
