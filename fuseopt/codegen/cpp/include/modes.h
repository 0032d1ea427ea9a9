// How a thread treats floats: whether denormals are zeros, and how it rounds. Eager
// computes small tensors in the thread that calls. A thread of OpenMP keeps the mode of
// its creation, which may be another one. So it gets the caller's mode while it works.
#include <stdint.h>

#if defined(__x86_64__)
static const uint64_t RAISED = 0x3f;  // exceptions that occurred, which are no mode
static inline uint64_t float_mode() {
  uint32_t x;
  __asm__ volatile("stmxcsr %0" : "=m"(x));
  return x & ~RAISED;
}
static inline void set_float_mode(uint64_t mode) {
  uint32_t x = (uint32_t)mode;
  __asm__ volatile("ldmxcsr %0" : : "m"(x) : "memory");
}
#elif defined(__aarch64__)
static inline uint64_t float_mode() {
  uint64_t x;
  __asm__ volatile("mrs %0, fpcr" : "=r"(x));
  return x;
}
static inline void set_float_mode(uint64_t mode) {
  __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}
#else
static inline uint64_t float_mode() { return 0; }
static inline void set_float_mode(uint64_t) {}
#endif

// Gives this thread a mode, and at the end of the block the one that it had.
struct InMode {
  uint64_t before, mode;
  explicit InMode(uint64_t wanted) : before(float_mode()), mode(wanted) {
    if (before != mode) set_float_mode(mode);
  }
  ~InMode() {
    if (before != mode) set_float_mode(before);
  }
};
