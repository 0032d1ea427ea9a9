"""Tensors as a compiled helper sees them: C functions, and where their fields lie.

What the helper reads of a tensor's memory is looked for in tensors made for that, and
tried on others; nothing of its layout is assumed. Where it is not found, C functions
that torch exports for ahead-of-time compiled code are asked instead, and where those
are missing, Python.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import BaseTorchFunctionMode

from .libraries import torch_library


class TensorFunctions(NamedTuple):
    """How to ask a tensor: where in a Python one its handle lies, addresses of C
    functions that take a handle, and the places of its fields in bytes. `bump` is 0
    where there is none, `words` where no fields were found.
    """

    handle: int
    data: int
    dims: int
    dtype: int
    device: int
    device_index: int
    sizes: int
    strides: int
    bump: int
    storage: int
    first: int
    words: int
    kind: int
    inlined: int
    memory: int


class Fields(NamedTuple):
    """Where fields lie, in words of 8 bytes; `words` is 0 where they were not found.

    `storage`: in a TensorImpl, its storage. `first`, `words`: there, all that says what
    of the storage the tensor is: number of dims, sizes, strides, offset, number of
    elements, dtype, device, dispatch keys in the last word. `kind`: the word of them
    that has the dtype and the device. `inlined`: most dims that are kept there.
    `memory`: in a storage, where its memory is; what owns it follows in two words.
    """

    storage: int = 0
    first: int = 0
    words: int = 0
    kind: int = 0
    inlined: int = 0
    memory: int = 0


#: Words of a tensor and of a storage that are searched, less than either has.
_TENSOR, _STORAGE = 22, 7


def _words(address: int, n: int) -> list[int]:
    return list((ctypes.c_uint64 * n).from_address(address))


def _sample(dtype: torch.dtype = torch.float64, device: str = "cpu") -> torch.Tensor:
    """A tensor with numbers that are hardly anywhere else in its memory."""
    memory = torch.empty(1000, dtype=dtype, device=device)
    return memory.as_strided((3, 5), (101, 17), 307)


@functools.cache
def fields() -> Fields:
    """Where the fields of a tensor lie in this torch.

    Relies on `Tensor._cdata` and `UntypedStorage._cdata` being addresses. All that can
    change of a tensor is changed in turn, and must show in the words found.
    """
    try:
        t = _sample()
        words = _words(t._cdata, _TENSOR)
        keys = torch._C._dispatch_keys(t).raw_repr()
        storage = words.index(t.untyped_storage()._cdata)
        first = words.index(3) - 1
        inlined = words.index(101) - first - 1
        last = words.index(keys, first) + 1
        own = _words(words[storage], _STORAGE)
        memory = own.index(t.untyped_storage().data_ptr())
        region = words[first:last]
        if len(region) < 8:  # the helper compares so many at a time
            return Fields()
        shape = [2, 3, 5], [101, 17], [307, 15]
        places = 0, 1 + inlined, 1 + 2 * inlined
    except (ValueError, AttributeError, RuntimeError):
        return Fields()
    if any(
        region[at : at + len(known)] != known
        for at, known in zip(places, shape, strict=True)
    ):
        return Fields()
    others = [
        _sample(torch.int64),
        _sample(torch.complex128),
        _sample(device="meta"),
        torch._neg_view(_sample()),
    ]
    if any(_words(o._cdata, _TENSOR)[first:last] == region for o in others):
        return Fields()
    like = _words(others[0]._cdata, _TENSOR)[first:last]
    kind = [i for i, (a, b) in enumerate(zip(region, like, strict=True)) if a != b]
    if len(kind) != 1:
        return Fields()
    # a lazy clone shares its memory until one of both is written: not the same owner
    lender = torch.zeros(8, device="cpu")
    place = _owner(lender, storage, memory)
    torch._lazy_clone(lender)
    if _owner(lender, storage, memory) == place:
        return Fields()
    return Fields(storage, first, last - first, kind[0], inlined, memory)


def _owner(t: torch.Tensor, storage: int, memory: int) -> list[int]:
    """The memory of a tensor's storage and what owns it: three words."""
    return _words(_words(t._cdata, _TENSOR)[storage] + 8 * memory, 3)


def _handle_offset(tensors: Sequence[torch.Tensor]) -> int | None:
    """Where in the memory of a Python tensor the pointer to its TensorImpl lies.

    `Tensor._cdata` is that pointer; it is looked for in the object, and must lie at one
    place in all of them.
    """
    offset = None
    for t in tensors:
        words = (ctypes.c_uint64 * 6).from_address(id(t))
        places = [8 * k for k in range(2, 6) if words[k] == t._cdata]
        if len(places) != 1 or offset not in (None, places[0]):
            return None
        offset = places[0]
    return offset


#: C functions of libtorch by their field, and one of C++, which helpers do without.
_NAMES = {
    "data": "aoti_torch_get_data_ptr",
    "dims": "aoti_torch_get_dim",
    "dtype": "aoti_torch_get_dtype",
    "device": "aoti_torch_get_device_type",
    "device_index": "aoti_torch_get_device_index",
    "sizes": "aoti_torch_get_sizes",
    "strides": "aoti_torch_get_strides",
}
_REQUIRES_GRAD = "_ZNK3c1010TensorImpl13requires_gradEv"
_GRADIENT = "_ZNK3c1010TensorImpl4gradEv"
_WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE"
_MODE = "_ZN2at4impl27torch_function_mode_enabledEv"
_VERSION = "_ZNK2at10TensorBase8_versionEv"
_BUMP = "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"


@functools.cache
def _shims() -> dict[str, int] | None:
    try:
        library = torch_library("libtorch_cpu", ctypes.CDLL)
        found = {
            field: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
            for field, name in _NAMES.items()
        }
    except (OSError, AttributeError):
        return None
    bump = getattr(library, _BUMP, None)
    found["bump"] = ctypes.cast(bump, ctypes.c_void_p).value or 0 if bump else 0
    return found


def tensor_functions(
    tensors: Sequence[torch.Tensor], raw: bool = True
) -> TensorFunctions | None:
    """C functions that read a tensor's address and metadata; None where there are none.

    Relies on the stable C shim of AOTInductor, and on finding a tensor's handle in its
    Python object, which is looked for and not assumed. `raw`: with the places of fields
    in memory.
    """
    shims = _shims()
    offset = _handle_offset(tensors) if shims is not None else None
    if shims is None or offset is None:
        return None
    found = fields() if raw else Fields()
    return TensorFunctions(
        handle=offset,
        storage=8 * found.storage,
        first=8 * found.first,
        words=found.words,
        kind=found.kind,
        inlined=found.inlined,
        memory=8 * found.memory,
        **shims,
    )


@functools.cache
def _required() -> int:
    """The C++ function that says of a TensorImpl what its `requires_grad` is; 0: none.

    Tried on tensors of both kinds.
    """
    try:
        function = getattr(torch_library("libc10", ctypes.CDLL), _REQUIRES_GRAD)
    except (OSError, AttributeError):
        return 0
    function.restype, function.argtypes = ctypes.c_bool, [ctypes.c_void_p]
    leaf = torch.zeros(1, device="cpu", requires_grad=True)
    with torch.enable_grad():
        tried = [torch.zeros(1, device="cpu"), leaf, leaf * 2]
    if any(function(t._cdata) != t.requires_grad for t in tried):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def requires_grad_function(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """(where in a Python tensor its handle lies, a C function that says of what the
    handle points to whether it requires a gradient); None where that is not known.
    """
    offset = _handle_offset(tensors)
    return None if offset is None or not _required() else (offset, _required())


@functools.cache
def gradient_functions() -> tuple[int, int, int] | None:
    """C++ functions: which tensor is the gradient of what a handle points to, what is
    that tensor in Python, and does a mode want to be asked of each call? None where
    torch has no such ones.

    They skip the warning of a tensor that is no leaf. Tried on tensors with a gradient
    and without.
    """
    try:
        get = getattr(torch_library("libc10", ctypes.CDLL), _GRADIENT)
        wrap = getattr(torch_library("libtorch_python", ctypes.PyDLL), _WRAP)
        mode = getattr(torch_library("libtorch_cpu", ctypes.CDLL), _MODE)
    except (OSError, AttributeError):
        return None
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    wrap.restype, wrap.argtypes = ctypes.py_object, [ctypes.c_void_p]
    mode.restype, mode.argtypes = ctypes.c_bool, []
    bare, given = (torch.zeros(1, device="cpu", requires_grad=True) for _ in range(2))
    given.grad = torch.ones(1, device="cpu")
    for t in (bare, given, given):  # twice: a reference lost would be missed
        if wrap(get(t._cdata)) is not t.grad:
            return None
    # a mode may be on here already, and the answer is kept for the whole process
    already = torch._C._len_torch_function_stack() > 0
    with BaseTorchFunctionMode():
        within = mode()
    if mode() != already or not within:
        return None
    a, b, c = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (get, wrap, mode))
    return a, b, c


@functools.cache
def version_functions() -> tuple[int, int] | None:
    """C++ functions that take a handle: how often was a tensor changed in place, and
    count that up; None where torch has no such ones. Tried on a tensor.
    """
    try:
        library = torch_library("libtorch_cpu", ctypes.CDLL)
        ask, bump = getattr(library, _VERSION), getattr(library, _BUMP)
    except (OSError, AttributeError):
        return None
    t = torch.zeros(1, device="cpu")
    offset = _handle_offset((t,))
    if offset is None:
        return None
    ask.restype, ask.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    bump.restype, bump.argtypes = None, [ctypes.c_void_p]
    for change in (lambda: None, lambda: t.add_(1), lambda: bump(id(t) + offset)):
        before = t._version
        change()
        if ask(id(t) + offset) != t._version:
            return None
    if t._version != before + 1:
        return None
    a, b = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (ask, bump))
    return a, b


#: CPython's number of the slot with which a type's objects are read as attributes.
_DESCR_GET = 54


def gradient_getter(kinds: Sequence[type]) -> tuple[Any, int] | None:
    """What reads `grad` of objects of exactly these types: a descriptor, and the C
    function that takes it, an object and its type. None where something else does.
    """
    found = [inspect.getattr_static(kind, "grad", None) for kind in kinds]
    if any(
        x is not found[0] or type(x) is not types.GetSetDescriptorType for x in found
    ) or any(
        inspect.getattr_static(kind, "__getattribute__") is not object.__getattribute__
        for kind in kinds
    ):
        return None
    slot = ctypes.pythonapi.PyType_GetSlot
    slot.restype, slot.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_int]
    function = slot(type(found[0]), _DESCR_GET)
    return None if not function else (found[0], function)


def _ask(field: str, t: torch.Tensor) -> int:
    """A number that the C shim says of a tensor."""
    shims = _shims() or {}
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
    code = ctypes.c_int32()
    offset = _handle_offset((t,)) or 0
    kind(shims[field])(id(t) + offset, ctypes.addressof(code))
    return code.value


class Codes:
    """The numbers that the C shim gives for dtypes and devices, each asked once."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.dtype, torch.device], tuple[int, ...]] = {}

    def of(self, t: torch.Tensor) -> tuple[int, ...]:
        """Of a tensor: its dtype, its kind of device, the index of that."""
        key = t.dtype, t.device
        if key not in self._known:
            names = "dtype", "device", "device_index"
            self._known[key] = tuple([_ask(name, t) for name in names])
        return self._known[key]
