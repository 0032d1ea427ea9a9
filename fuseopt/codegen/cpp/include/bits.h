template <class To, class From> static inline To bits(From x) {
  To y;
  static_assert(sizeof x == sizeof y, "of one size");
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}
