"""Do the lanes of an optimizer hold what they held? Asked of all in one C call.

A lane is a parameter and its state, a dict. Between two calls only gradients are other
objects, as a rule; to see that in Python costs more than Dynamo's guards would. The
compiled helper compares what lists and dicts hold by identity, and reads the gradients.
"""

from __future__ import annotations

import collections
import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from ... import compat

#: Goes into the helper.
TEXT = """\
extern "C" {
void* PyObject_GetAttr(void* object, void* name);
intptr_t PyList_Size(void* list);
int PyList_SetItem(void* list, intptr_t i, void* item);
intptr_t PyDict_Size(void* dict);
void Py_DecRef(void* object);
void PyErr_Clear(void);
}

struct Lanes {
  int64_t n;
  void* const* params;    // of each lane
  void* const* states;    // of each lane: its state, a dict
  const int64_t* counts;  // entries of each lane's state; -1: it has none
  void* const* held;      // of all states: key, value, key, value ...
  const int64_t* flags;   // of each lane: its requires_grad
  const int64_t* grads;   // of each lane: 1 if it has a gradient
  int64_t lists;          // parameters of all groups, list by list
  const int64_t* sizes;
  void* const* members;
  int64_t entries;        // of the optimizer's state: key, value, key, value ...
  void* const* owned;
  void *none, *yes;       // None, True
  void *grad, *flag;      // "grad", "requires_grad"
  int64_t type;           // where in an object its type lies
  void* kinds[2];         // types that a gradient may have
  // How Python reads these two attributes, or null: then as any other.
  void* descriptor;
  void* (*read)(void* descriptor, void* object, void* kind);
  int64_t handle;         // where in a Python tensor its at::Tensor lies
  bool (*required)(const void* tensor);
};

static const int64_t SOON = 8;  // lanes ahead that are fetched

// 0 if the groups have the parameters they had, all lanes hold what they held, and
// their gradients are in `grads`; else 1.
extern "C" int64_t fuseopt_watch(const Lanes* k, void* lists, void* state,
                                 void* grads) {
  void *key, *value, *const* member = k->members;
  for (int64_t l = 0; l < k->lists; ++l) {
    void* list = PyList_GetItem(lists, l);
    if (PyList_Size(list) != k->sizes[l]) return 1;
    for (int64_t i = 0; i < k->sizes[l]; ++i)
      if (PyList_GetItem(list, i) != *member++) return 1;
  }
  if (PyDict_Size(state) != k->entries) return 1;
  void* const* owned = k->owned;
  for (intptr_t at = 0; PyDict_Next(state, &at, &key, &value); owned += 2)
    if (key != owned[0] || value != owned[1]) return 1;

  void* const* held = k->held;
  for (int64_t i = 0; i < k->n; ++i) {
    if (k->required && i + SOON < k->n)
      __builtin_prefetch(*(char**)((char*)k->params[i + SOON] + k->handle));
    void* param = k->params[i];
    void* kind = *(void**)((char*)param + k->type);
    const bool plain = kind == k->kinds[0] || kind == k->kinds[1];
    if (!plain && (k->read || k->required)) return 1;
    void* now = k->read ? k->read(k->descriptor, param, kind)
                        : PyObject_GetAttr(param, k->grad);
    if (!now) {
      PyErr_Clear();
      return 1;
    }
    kind = *(void**)((char*)now + k->type);
    const bool none = now == k->none;
    PyList_SetItem(grads, i, now);  // takes the reference
    if (none == (k->grads[i] == 1)) return 1;
    if (!none && kind != k->kinds[0] && kind != k->kinds[1]) return 1;
    if (k->required) {
      const void* tensor = *(void**)((char*)param + k->handle);
      if (k->required(tensor) != (k->flags[i] == 1)) return 1;
    } else {
      now = PyObject_GetAttr(param, k->flag);
      if (!now) {
        PyErr_Clear();
        return 1;
      }
      Py_DecRef(now);  // one of two objects that live for ever
      if ((now == k->yes) != (k->flags[i] == 1)) return 1;
    }
    if (k->counts[i] < 0) continue;
    void* own = k->states[i];
    if (PyDict_Size(own) != k->counts[i]) return 1;
    for (intptr_t at = 0; PyDict_Next(own, &at, &key, &value); held += 2)
      if (key != held[0] || value != held[1]) return 1;
  }
  return 0;
}
"""


class _Lanes(ctypes.Structure):
    """Mirrors `struct Lanes`."""

    _fields_ = [
        ("n", ctypes.c_int64),
        ("params", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("held", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("grads", ctypes.c_void_p),
        ("lists", ctypes.c_int64),
        ("sizes", ctypes.c_void_p),
        ("members", ctypes.c_void_p),
        ("entries", ctypes.c_int64),
        ("owned", ctypes.c_void_p),
        ("none", ctypes.c_void_p),
        ("yes", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("flag", ctypes.c_void_p),
        ("type", ctypes.c_int64),
        ("kinds", ctypes.c_void_p * 2),
        ("descriptor", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
        ("handle", ctypes.c_int64),
        ("required", ctypes.c_void_p),
    ]


#: Dicts whose entries the helper may go through.
DICTS = (dict, collections.defaultdict)
_GRAD, _FLAG = "grad", "requires_grad"


def _flat(dicts: Sequence[dict[Any, Any] | None]) -> list[Any]:
    """What dicts hold: key, value, key, value ..."""
    return [x for d in dicts for item in (d or {}).items() for x in item]


class Watch:
    """What some lanes hold now, in order: parameters, states (None: no state).

    `lists`: the parameters of each group; `state`: the optimizer's. `helper`:
    helper.PROBE, built. `kinds`: the two types that a parameter or a gradient may have.
    `look(lists, state)` returns the lanes' gradients, or None if anything but those is
    another object than it was.
    """

    def __init__(
        self,
        helper: ctypes.PyDLL,
        params: Sequence[Any],
        states: Sequence[dict[str, Any] | None],
        kinds: tuple[type, type],
        lists: Sequence[Sequence[Any]],
        state: dict[Any, Any],
    ) -> None:
        # kept, so that no other object can come to lie where one of these lay
        objects = [
            list(params),
            list(states),
            _flat(states),
            [p for own in lists for p in own],
            _flat([state]),
        ]
        at = [array("Q", map(id, x)) for x in objects]
        counts = array("q", [-1 if s is None else len(s) for s in states])
        flags = array("q", [p.requires_grad for p in params])
        grads = array("q", [p.grad is not None for p in params])
        sizes = array("q", map(len, lists))
        self._keep = objects, at, counts, flags, grads, sizes, kinds
        get = compat.gradient_getter(kinds)
        asked = compat.requires_grad_function(params)
        plain = all(type(p) in kinds for p in params)
        self._n = len(params)
        struct = self._struct = _Lanes(
            n=self._n,
            lists=len(sizes),
            entries=len(state),
            none=id(None),
            yes=id(True),
            grad=id(_GRAD),
            flag=id(_FLAG),
            # CPython: a count of references, then the type
            type=object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p),
            kinds=(ctypes.c_void_p * 2)(*map(id, kinds)),
        )
        for name, a in zip(
            ("params", "states", "held", "members", "owned"), at, strict=True
        ):
            setattr(struct, name, a.buffer_info()[0])
        struct.counts, struct.flags, struct.grads, struct.sizes = (
            a.buffer_info()[0] for a in (counts, flags, grads, sizes)
        )
        if get is not None and plain:
            struct.descriptor, struct.read = id(get[0]), get[1]
        if asked is not None and plain:
            struct.handle, struct.required = asked
        self._none = [None] * self._n
        self._where = ctypes.addressof(struct)
        call = helper.fuseopt_watch
        call.restype = ctypes.c_int64
        call.argtypes = [ctypes.c_void_p, *(ctypes.py_object,) * 3]
        self._call: Callable[..., int] = call

    def look(self, lists: list[Any], state: Any) -> list[Any] | None:
        """The gradients of all lanes, or None; see the class."""
        if type(state) not in DICTS or len(lists) != self._struct.lists:
            return None
        for own in lists:
            if type(own) is not list:
                return None
        grads = self._none.copy()
        if self._call(self._where, lists, state, grads):
            return None
        return grads
