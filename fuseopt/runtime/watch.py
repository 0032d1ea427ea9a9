"""Do the lanes of an optimizer hold what they held? Asked of all in one C call.

A lane is a parameter and its state, a dict. Between two calls only gradients are other
objects, as a rule; to see that in Python costs more than Dynamo's guards would. The
compiled helper compares what each dict holds by identity, and reads the gradients.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any

#: Goes into the helper.
TEXT = """\
extern "C" {
void* PyObject_GetAttr(void* object, void* name);
void* PyList_GetItem(void* list, intptr_t i);
int PyList_SetItem(void* list, intptr_t i, void* item);
intptr_t PyDict_Size(void* dict);
void Py_DecRef(void* object);
void PyErr_Clear(void);
}

struct Lanes {
  int64_t n;
  const int64_t* counts;  // entries of each lane's state; -1: it has none
  void* const* held;      // of all states: key, value, key, value ...
  void* const* flags;     // of each lane: its requires_grad
  const int64_t* grads;   // of each lane: 1 if it has a gradient
  void* none;
  int64_t type;           // where in an object its type lies
  void* kinds[2];         // types that a gradient may have
};

// 0 if all lanes hold what they held, whose gradients are then in `grads`; else 1.
extern "C" int64_t fuseopt_watch(const Lanes* k, void* params, void* states,
                                 void* grad, void* flag, void* grads) {
  void* const* held = k->held;
  for (int64_t i = 0; i < k->n; ++i) {
    void* param = PyList_GetItem(params, i);
    void* now = PyObject_GetAttr(param, grad);
    if (!now) {
      PyErr_Clear();
      return 1;
    }
    void* kind = *(void**)((char*)now + k->type);
    const bool none = now == k->none;
    PyList_SetItem(grads, i, now);  // takes the reference
    if (none == (k->grads[i] == 1)) return 1;
    if (!none && kind != k->kinds[0] && kind != k->kinds[1]) return 1;
    now = PyObject_GetAttr(param, flag);
    if (!now) {
      PyErr_Clear();
      return 1;
    }
    Py_DecRef(now);  // one of two objects that live for ever
    if (now != k->flags[i]) return 1;
    if (k->counts[i] < 0) continue;
    void *state = PyList_GetItem(states, i), *key, *value;
    if (PyDict_Size(state) != k->counts[i]) return 1;
    for (intptr_t at = 0; PyDict_Next(state, &at, &key, &value); held += 2)
      if (key != held[0] || value != held[1]) return 1;
  }
  return 0;
}
"""


class _Lanes(ctypes.Structure):
    """Mirrors `struct Lanes`."""

    _fields_ = [
        ("n", ctypes.c_int64),
        ("counts", ctypes.c_void_p),
        ("held", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("grads", ctypes.c_void_p),
        ("none", ctypes.c_void_p),
        ("type", ctypes.c_int64),
        ("kinds", ctypes.c_void_p * 2),
    ]


class Watch:
    """What some lanes hold now, in order: parameters, states (None: no state).

    `helper`: helper.PROBE, built. `kinds`: the two types that a gradient may have.
    `look()` returns their gradients, or None if anything but those is another object.
    """

    def __init__(
        self,
        helper: ctypes.PyDLL,
        params: Sequence[Any],
        states: Sequence[dict[str, Any] | None],
        kinds: tuple[type, type],
    ) -> None:
        self._lists = list(params), list(states)
        n = len(params)
        counts = array("q", [-1 if s is None else len(s) for s in states])
        # kept, so that no other object can come to lie where one of these lay
        held = [x for s in states for item in (s or {}).items() for x in item]
        flags = array("Q", [id(p.requires_grad) for p in params])
        grads = array("q", [p.grad is not None for p in params])
        places = array("Q", map(id, held))
        self._keep = held, counts, flags, grads, places, kinds
        self._struct = _Lanes(
            n,
            *(a.buffer_info()[0] for a in (counts, places, flags, grads)),
            id(None),
            # CPython: a count of references, then the type
            object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p),
            (ctypes.c_void_p * 2)(*map(id, kinds)),
        )
        self._none = [None] * n
        call = helper.fuseopt_watch
        call.restype = ctypes.c_int64
        call.argtypes = [ctypes.c_void_p, *(ctypes.py_object,) * 5]
        self._call: Callable[..., int] = call

    def look(self) -> list[Any] | None:
        """The gradients of all lanes, or None; see the class."""
        grads = self._none.copy()
        where = ctypes.addressof(self._struct)
        if self._call(where, *self._lists, "grad", "requires_grad", grads):
            return None
        return grads
