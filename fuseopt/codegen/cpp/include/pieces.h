static inline uint64_t pack(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
template <class T> static inline uint64_t pack(T x) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &x, sizeof x);
  return bits;
}
template <class T> static inline T unpack(uint64_t bits) {
  T x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
