// Products of matrices, one after another, by functions of libtorch. A handle of
// AOTInductor's shim is the address of a word with the address of a TensorImpl.
struct ProductSeries {
  int64_t n;
  const int64_t* kind;  // of each: 0 mm, 1 addmm, 2 bmm, 3 baddbmm
  const int64_t* out;   // its tensors, by their words
  const int64_t* add;
  const int64_t* left;
  const int64_t* right;
  const double* beta;
  const double* alpha;
  void** words;
  int64_t functions[4];
};

// Returns the number of products that were made: fewer than n after an error.
extern "C" int64_t fuseopt_products(const ProductSeries* x) {
  typedef int32_t (*Times)(void*, void*, void*);
  typedef int32_t (*AddTimes)(void*, void*, void*, void*, double, double);
  for (int64_t i = 0; i < x->n; ++i) {
    void** w = x->words;
    void* out = w + x->out[i];
    void* left = w + x->left[i];
    void* right = w + x->right[i];
    int64_t kind = x->kind[i], f = x->functions[kind];
    int32_t error = kind & 1 ? ((AddTimes)f)(out, w + x->add[i], left, right,
                                             x->beta[i], x->alpha[i])
                             : ((Times)f)(out, left, right);
    if (error) return i;
  }
  return x->n;
}
