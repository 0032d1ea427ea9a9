"""Have the tensors of a call moved or changed? Asked of all of them in one C call.

Parameters, gradients and state may be swapped, moved or given other strides between two
calls, and Dynamo guards none of that. Asking 1,500 tensors from Python costs more than
a small step; this asks them in about 10 ns each, through the C functions that torch
exports for ahead-of-time compiled code. Where those are missing it asks from Python.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from .. import compat
from ..codegen import Source

MOVED, CHANGED = 1, 2

PROBE = Source(
    "cpp",
    """\
// Compares addresses and metadata of a list of tensors with what is known of them.
#include <stdint.h>
extern "C" {
void* PyList_GetItem(void* list, intptr_t i);
typedef int32_t (*GetPointer)(void*, void**);
typedef int32_t (*GetNumber)(void*, int64_t*);
typedef int32_t (*GetCode)(void*, int32_t*);
typedef int32_t (*GetNumbers)(void*, int64_t**);

struct Functions {
  int64_t handle;  // where in a Python tensor its at::Tensor lies
  GetPointer data;
  GetNumber dims;
  GetCode dtype;
  GetNumbers sizes, strides;
};

// known: n addresses; now: n addresses, written. metadata: dtype, dims, sizes, strides
// of each. Returns 1 if an address differs, plus 2 if something else does.
int64_t fuseopt_probe(const Functions* f, void* list, int64_t n, const uint64_t* known,
                      uint64_t* now, const int64_t* metadata) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    void* tensor = (char*)PyList_GetItem(list, i) + f->handle;
    void* address = 0;
    int64_t dims = 0, *sizes = 0, *strides = 0;
    int32_t dtype = 0;
    int32_t error = f->data(tensor, &address) | f->dims(tensor, &dims) |
                    f->dtype(tensor, &dtype) | f->sizes(tensor, &sizes) |
                    f->strides(tensor, &strides);
    if (error) return 4;
    now[i] = (uint64_t)address;
    found |= now[i] != known[i];
    if (metadata[0] != dtype || metadata[1] != dims) return found | 2;
    metadata += 2;
    for (int64_t d = 0; d < dims; ++d)
      if (metadata[d] != sizes[d] || metadata[dims + d] != strides[d]) return found | 2;
    metadata += 2 * dims;
  }
  return found;
}
}
""",
    "fuseopt_probe",
    (),
)


class Probe:
    """What is known of a call's tensors. `look(tensors)` compares and remembers.

    `helper`: PROBE, built, or None to ask from Python. After `look` returned with MOVED
    set, `addresses` holds the new ones.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        helper: ctypes.PyDLL | None,
    ) -> None:
        n = self.n = len(tensors)
        self.addresses = array("Q", bytes(8 * n))
        self._now = array("Q", bytes(8 * n))
        self._call: Any = None
        functions = (
            compat.tensor_functions(tensors) if helper is not None and n else None
        )
        if functions is not None and helper is not None:
            metadata = array("q")
            for t in tensors:
                metadata.extend(
                    (compat.dtype_code(t.dtype), t.dim(), *t.shape, *t.stride())
                )
            call = getattr(helper, PROBE.entry)
            call.restype = ctypes.c_int64
            call.argtypes = [
                ctypes.c_void_p,
                ctypes.py_object,
                ctypes.c_int64,
                *(ctypes.c_void_p,) * 3,
            ]
            self._keep = (functions, metadata)
            self._args = (
                n,
                self.addresses.buffer_info()[0],
                self._now.buffer_info()[0],
                metadata.buffer_info()[0],
            )
            self._functions = ctypes.addressof(functions)
            if call(self._functions, list(tensors), *self._args) & ~MOVED == 0:
                self._call = call
        if self._call is None:
            self._guard = compat.metadata_guard(tensors)

    def look(self, tensors: list[Any]) -> int:
        """0, or MOVED and CHANGED."""
        if self._call is not None:
            found = self._call(self._functions, tensors, *self._args)
            return int(found) if found < 4 else CHANGED | MOVED
        if not self._guard(*tensors):
            return CHANGED | MOVED
        self._now[:] = array("Q", map(torch.Tensor.data_ptr, tensors))
        return MOVED * (self._now != self.addresses)

    def accept(self) -> None:
        """Take the addresses of the last look as known."""
        self.addresses[:] = self._now
