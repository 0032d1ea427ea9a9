// Compares facts that a call depends on; see compat/facts.py.
extern "C" {
void* PyDict_GetItem(void* dict, void* key);
intptr_t PyObject_Size(void* container);
void* PyObject_Call(void* function, void* args, void* keywords);
}

struct FactRecord {
  int64_t kind;
  void* of;
  void* key;       // of an entry; of a call the arguments, a tuple
  int64_t number;  // an index, or a length
  void* value;     // null: a dict has no such entry
};
// Kinds of facts, as in compat/facts.py.
static const int64_t ENTRY = 0, ENTRY_OTHER = 1, ITEM = 2, LENGTH = 3;

static bool is_true(const FactRecord* f) {
  if (f->kind == ENTRY) return PyDict_GetItem(f->of, f->key) == f->value;
  if (f->kind == ENTRY_OTHER) {
    const void* now = PyDict_GetItem(f->of, f->key);
    return now && now != f->value;
  }
  if (f->kind == LENGTH || f->kind == ITEM) {
    const intptr_t n = PyObject_Size(f->of);
    if (n < 0) PyErr_Clear();
    if (f->kind == LENGTH) return n == f->number;
    return f->number < n && PyList_GetItem(f->of, f->number) == f->value;
  }
  void* now = PyObject_Call(f->of, f->key, 0);
  if (now) Py_DecRef(now);  // without a result, ctypes raises the error
  return now == f->value;
}

// Returns 0 if all facts hold, else the number of the first other one, from 1 on.
extern "C" int64_t fuseopt_facts(int64_t n, const FactRecord* facts) {
  for (int64_t i = 0; i < n; ++i)
    if (!is_true(facts + i)) return i + 1;
  return 0;
}
