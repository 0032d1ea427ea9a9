"""Have the tensors of a call moved or changed? Asked of all of them in one C call.

Parameters, gradients and state may be swapped, moved or given other strides between two
calls, and Dynamo guards none of that. Asking 1,500 tensors from Python costs more than
a small step. A compiled helper finds them in the graph module's dicts and the call's
arguments and compares the fields that lie in each with those it saw last, in about 5 ns
each. A tensor whose fields differ is asked through the C functions that torch exports
for ahead-of-time compiled code. Where those are missing, all are asked from Python.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import compat
from ..codegen import Source
from . import watch

MOVED, CHANGED = 1, 2
#: What the helper says of tensors that cannot be asked.
UNKNOWN = 4

PROBE = Source(
    "cpp",
    """\
// Compares addresses and metadata of a call's tensors with what is known of them.
#include <stdint.h>
extern "C" {
int PyDict_Next(void* dict, intptr_t* at, void** key, void** value);
intptr_t PyTuple_Size(void* tuple);
void* PyTuple_GetItem(void* tuple, intptr_t i);
}

struct Functions {
  int64_t handle;  // where in a Python tensor its at::Tensor lies
  int32_t (*data)(void*, void**);
  int32_t (*dims)(void*, int64_t*);
  int32_t (*dtype)(void*, int32_t*);
  int32_t (*sizes)(void*, int64_t**);
  int32_t (*strides)(void*, int64_t**);
  void (*bump)(void*);  // version counter of an at::Tensor; may throw, or be null
  int64_t storage;      // where in a TensorImpl its storage lies
  int64_t first, words; // and what it is of that; no words: not known
  int64_t inlined;      // most dims that are kept there
  int64_t memory;       // where in a storage its memory and its owner lie
};
struct Known {
  int64_t n;
  const uint64_t* addresses;
  uint64_t* now;
  const int64_t* metadata;  // dtype, dims, sizes, strides of each
  uint64_t* seen;           // fields of each when it was last found unchanged
  char** tensors;           // Python's tensors of the last call
};

static const int64_t OWNER = 3;  // words: the memory, what owns it, what frees it
static const int64_t WIDE = 8;   // words compared at a time
typedef uint64_t Words __attribute__((vector_size(64), aligned(8), may_alias));
// Tensors ahead that are fetched: Python's object, the tensor, its storage.
static const int64_t FAR = 24, NEAR = 16, NEXT = 8;

static inline char* impl_of(const Functions* f, const char* tensor) {
  return *(char**)(tensor + f->handle);
}
static bool as_seen(const Functions* f, const char* impl, const uint64_t* seen) {
  const char* storage = *(char**)(impl + f->storage);
  if (!storage) return false;
  const uint64_t* own = (const uint64_t*)(impl + f->first);
  const uint64_t* owner = (const uint64_t*)(storage + f->memory);
  uint64_t other = 0;
  for (int64_t i = 0; i < OWNER; ++i) other |= owner[i] ^ seen[i];
  seen += OWNER;
  // words of which the last eight may overlap those before
  Words differ = {0};
  for (int64_t i = 0; i < f->words; i += WIDE) {
    const int64_t at = i + WIDE <= f->words ? i : f->words - WIDE;
    differ |= *(const Words*)(own + at) ^ *(const Words*)(seen + at);
  }
  for (int64_t i = 0; i < WIDE; ++i) other |= differ[i];
  return other == 0;
}
static void see(const Functions* f, const char* impl, uint64_t* seen) {
  const char* storage = *(char**)(impl + f->storage);
  const uint64_t* own = (const uint64_t*)(impl + f->first);
  // what more dims are is kept elsewhere
  if (!storage || own[0] > (uint64_t)f->inlined) return;
  const uint64_t* owner = (const uint64_t*)(storage + f->memory);
  for (int64_t i = 0; i < OWNER; ++i) seen[i] = owner[i];
  for (int64_t i = 0; i < f->words; ++i) seen[OWNER + i] = own[i];
}

// 1 if an address differs, plus 2 if something else does; 4 if one cannot be asked.
extern "C" int64_t fuseopt_probe(const Functions* f, const Known* k, void* buffers,
                                 void* parameters, void* args) {
  int64_t count = 0;
  void *dicts[2] = {buffers, parameters}, *key, *value;
  for (int d = 0; d < 2; ++d)
    for (intptr_t at = 0; PyDict_Next(dicts[d], &at, &key, &value);)
      if (count++ < k->n) k->tensors[count - 1] = (char*)value;
  const int64_t given = PyTuple_Size(args);
  if (count + given != k->n) return 4;
  for (int64_t i = 0; i < given; ++i)
    k->tensors[count + i] = (char*)PyTuple_GetItem(args, i);

  const int64_t each = f->words + OWNER;
  const int64_t* metadata = k->metadata;
  int64_t found = 0;
  for (int64_t i = 0; i < k->n; ++i) {
    if (i + FAR < k->n) __builtin_prefetch(k->tensors[i + FAR] + f->handle);
    if (f->words && i + NEAR < k->n) {
      const char* impl = impl_of(f, k->tensors[i + NEAR]);
      __builtin_prefetch(impl + f->storage);
      __builtin_prefetch(impl + f->first + 8 * f->words - 8);
      impl = i + NEXT < k->n ? impl_of(f, k->tensors[i + NEXT]) : 0;
      if (impl) __builtin_prefetch(*(char**)(impl + f->storage) + f->memory);
    }
    const int64_t dims = metadata[1], *known = metadata + 2;
    const int32_t dtype = (int32_t)metadata[0];
    metadata = known + 2 * dims;
    uint64_t* seen = k->seen + i * each;
    void* tensor = k->tensors[i] + f->handle;
    const char* impl = impl_of(f, k->tensors[i]);
    if (f->words && as_seen(f, impl, seen)) {
      k->now[i] = k->addresses[i];
      continue;
    }
    seen[0] = ~0ull;  // no address is that: not known until it is found the same
    void* address = 0;
    int64_t own_dims = 0, *sizes = 0, *strides = 0;
    int32_t own_dtype = 0;
    if (f->data(tensor, &address) | f->dims(tensor, &own_dims) |
        f->dtype(tensor, &own_dtype) | f->sizes(tensor, &sizes) |
        f->strides(tensor, &strides))
      return 4;
    k->now[i] = (uint64_t)address;
    if (dtype != own_dtype || dims != own_dims) return found | 2;
    for (int64_t d = 0; d < dims; ++d)
      if (known[d] != sizes[d] || known[dims + d] != strides[d]) return found | 2;
    if (k->now[i] != k->addresses[i]) found |= 1;
    else if (f->words) see(f, impl, seen);
  }
  return found;
}

// Bump the version counters of some tensors of the last call; 1 if one has none.
extern "C" int64_t fuseopt_bump(const Functions* f, const Known* k,
                                const int64_t* which, int64_t n) {
  try {
    for (int64_t i = 0; i < n; ++i) f->bump(k->tensors[which[i]] + f->handle);
  } catch (...) {
    return 1;
  }
  return 0;
}

"""
    + watch.TEXT,
    "fuseopt_probe",
    (),
    throws=True,
)


class _Known(ctypes.Structure):
    """Mirrors `struct Known`."""

    _fields_ = [
        ("n", ctypes.c_int64),
        ("addresses", ctypes.c_void_p),
        ("now", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("tensors", ctypes.c_void_p),
    ]


def _address(a: array[int]) -> int:
    return a.buffer_info()[0]


class Probe:
    """What is known of a call's tensors. `look(...)` compares and remembers.

    `helper`: PROBE, built, or None to ask from Python. After `look` returned with MOVED
    set, `accept()` takes the new addresses as known. `mutated`: tensors whose version
    counters `bump` counts up.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        helper: ctypes.PyDLL | None,
        mutated: Sequence[int] = (),
    ) -> None:
        n = self.n = len(tensors)
        self.mutated = mutated
        self.addresses = array("Q", bytes(8 * n))
        self._now = array("Q", bytes(8 * n))
        self._call: Any = None
        self._bump: Any = None
        functions = (
            compat.tensor_functions(tensors) if helper is not None and n else None
        )
        if functions is not None and helper is not None:
            self._ask_helper(helper, functions, tensors)
        if self._call is None:
            self._guard = compat.metadata_guard(tensors)

    def _ask_helper(
        self,
        helper: ctypes.PyDLL,
        functions: compat.TensorFunctions,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Use the helper, if it finds that the tensors are what they are."""
        metadata = array("q")
        for t in tensors:
            metadata.extend(
                (compat.dtype_code(t.dtype), t.dim(), *t.shape, *t.stride())
            )
        # all ones: nothing was seen yet
        seen = array("Q", b"\xff" * (8 * self.n * (functions.words + 3)))
        known = array("Q", bytes(8 * self.n))
        which = array("q", self.mutated)
        struct = _Known(
            self.n,
            *map(_address, (self.addresses, self._now, metadata, seen, known)),
        )
        self._keep = (functions, struct, metadata, seen, known, which)
        self._args = (ctypes.addressof(functions), ctypes.addressof(struct))
        call = helper.fuseopt_probe
        call.restype = ctypes.c_int64
        call.argtypes = [*(ctypes.c_void_p,) * 2, *(ctypes.py_object,) * 3]
        if call(*self._args, {}, {}, tuple(tensors)) & ~MOVED == 0:
            self._call = call
            if functions.bump and self.mutated:
                bump = helper.fuseopt_bump
                bump.restype = ctypes.c_int64
                bump.argtypes = [*(ctypes.c_void_p,) * 3, ctypes.c_int64]
                self._bump = bump
                self._which = (_address(which), len(which))

    def look(
        self,
        buffers: Mapping[str, Any],
        parameters: Mapping[str, Any],
        given: tuple[Any, ...],
    ) -> int:
        """0, or MOVED and CHANGED: of the values of two dicts and of arguments."""
        if self._call is not None:
            found = self._call(*self._args, buffers, parameters, given)
            return int(found) if found < UNKNOWN else CHANGED | MOVED
        tensors = [*buffers.values(), *parameters.values(), *given]
        if not self._guard(*tensors):
            return CHANGED | MOVED
        self._now[:] = array("Q", map(torch.Tensor.data_ptr, tensors))
        return MOVED * (self._now != self.addresses)

    def found(self) -> list[int]:
        """The addresses of the last look, if it found nothing but those changed."""
        return self._now.tolist()

    def moved(self) -> list[int]:
        """Tensors whose addresses the last look found changed."""
        both = zip(self._now, self.addresses, strict=True)
        return [i for i, (now, known) in enumerate(both) if now != known]

    def accept(self) -> None:
        """Take the addresses of the last look as known."""
        self.addresses[:] = self._now

    def bump(self) -> bool:
        """Count up the version counters of `mutated`, as an ATen call would.

        Their tensors are those of the last look and still alive. False if the helper
        cannot.
        """
        if self._bump is None:
            return not self.mutated
        return not self._bump(*self._args, *self._which)
