// Functions of Sleef take and return whole vectors.
#ifdef __AVX__
static const int64_t SLEEF_BYTES = 32;
#else
static const int64_t SLEEF_BYTES = 16;
#endif
template <class T> static inline void sleef(const Library* l, int k, T (*plain)(T),
                                            int64_t n, const T* x, T* y) {
#if defined(__AVX__) || defined(__aarch64__)
  typedef T Vector __attribute__((vector_size(SLEEF_BYTES)));
  const int64_t width = SLEEF_BYTES / sizeof(T);
  if (auto function = (Vector (*)(Vector))(l ? l->functions[k] : 0)) {
    for (int64_t i = 0; i < n; i += width) {
      const int64_t count = i + width <= n ? width : n - i;
      Vector v = {0};
      __builtin_memcpy(&v, x + i, count * sizeof(T));
      v = function(v);
      __builtin_memcpy(y + i, &v, count * sizeof(T));
    }
    return;
  }
#endif
  for (int64_t i = 0; i < n; ++i) y[i] = plain(x[i]);
}
// A function of the vendor's library over n elements; else that of the C library.
template <class T> static inline void vendor(const Library* l, int k, T (*plain)(T),
                                             int64_t n, const T* x, T* y) {
  if (l && !l->vendor) return sleef(l, k, plain, n, x, y);
  auto function = (void (*)(int, const T*, T*, long long))(l ? l->functions[k] : 0);
  if (function) return function((int)n, x, y, LIBRARY_MODE);
  for (int64_t i = 0; i < n; ++i) y[i] = plain(x[i]);
}
// Of two arguments; a step of 0 is one number for all elements.
template <class T> static inline void sleef(const Library* l, int k, T (*plain)(T, T),
                                            int64_t n, const T* x, int64_t step_x,
                                            const T* z, int64_t step_z, T* y) {
#if defined(__AVX__) || defined(__aarch64__)
  typedef T Vector __attribute__((vector_size(SLEEF_BYTES)));
  const int64_t width = SLEEF_BYTES / sizeof(T);
  if (auto function = (Vector (*)(Vector, Vector))(l ? l->functions[k] : 0)) {
    for (int64_t i = 0; i < n; i += width) {
      const int64_t count = i + width <= n ? width : n - i;
      Vector v = {0}, w = {0};
      for (int64_t j = 0; j < count; ++j)
        v[j] = x[(i + j) * step_x], w[j] = z[(i + j) * step_z];
      v = function(v, w);
      __builtin_memcpy(y + i, &v, count * sizeof(T));
    }
    return;
  }
#endif
  for (int64_t i = 0; i < n; ++i) y[i] = plain(x[i * step_x], z[i * step_z]);
}
