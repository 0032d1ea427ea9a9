"""C functions that read a tensor, and the offsets of its fields in memory.

The compiled helper reads tensors by these. fuseopt searches for the offsets in sample
tensors, and tests them on others; no layout is assumed. If they are not found, the
helper calls the C functions that torch exports for code compiled ahead of time. If
these are missing, tensors are read in Python.
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

from .capability import cached, probed
from .libraries import torch_library
from .names import Missing, find


class TensorFunctions(NamedTuple):
    """Addresses and offsets with which C code reads a tensor.

    `handle`: the offset in bytes of the pointer to its TensorImpl in the Python object.
    Addresses of C functions that take this pointer: `data` to `bytes`, and `bump`,
    which is 0 if torch has none. The others: `Fields`, `storage`, `first` and `memory`
    in bytes; `words` is 0 if no fields were found.
    """

    handle: int
    data: int
    dims: int
    dtype: int
    device: int
    device_index: int
    sizes: int
    strides: int
    bytes: int
    bump: int
    storage: int
    first: int
    words: int
    kind: int
    inlined: int
    memory: int


class Fields(NamedTuple):
    """Offsets of fields, in words of 8 bytes; `words` is 0 if they were not found.

    In a TensorImpl: `storage`, the pointer to its storage; `first` and `words`, the
    begin and the length of its layout region. The region has the number of dims, sizes,
    strides, offset, number of elements, dtype and device; its last word has the
    dispatch keys. In that region: `kind`, the word with the dtype and the device;
    `inlined`, the greatest number of dims whose sizes it can hold. In a storage:
    `memory`, the data pointer; the two words after it identify the owner.
    """

    storage: int = 0
    first: int = 0
    words: int = 0
    kind: int = 0
    inlined: int = 0
    memory: int = 0


#: The number of words of a TensorImpl and of a storage that are searched; each has as
#: many. A TensorImpl has one more if its dispatch keys, which come last, are not among
#: them.
_TENSOR, _STORAGE = 22, 7


def _words(address: int, n: int) -> list[int]:
    return list((ctypes.c_uint64 * n).from_address(address))


def _sample(dtype: torch.dtype = torch.float64, device: str = "cpu") -> torch.Tensor:
    """Return a tensor whose sizes, strides and offset are rare numbers.

    Its TensorImpl hardly holds them in any other place.
    """
    memory = torch.empty(1000, dtype=dtype, device=device)
    return memory.as_strided((3, 5), (101, 17), 307)


@probed(
    "raw-fields",
    "the fields of a tensor are compared where they lie in memory",
    "torch's functions of C are called for each tensor: some microseconds more a call",
)
def RAW_FIELDS() -> None:
    if not _searched().words:
        raise Missing("the fields of a tensor were not found in its memory")


@probed(
    "tensor-functions",
    "tensors are compared in C",
    "tensors are compared in Python: some hundred microseconds more a call",
)
def FUNCTIONS() -> None:
    if _shims() is None or _handle_offset((torch.zeros(1, device="cpu"),)) is None:
        raise Missing("libtorch_cpu exports no functions that read a tensor")


@probed(
    "requires-grad-in-c",
    "whether a tensor requires a gradient is read in C",
    "it is read in Python: some microseconds more a call",
)
def REQUIRES_GRAD() -> None:
    if not _required():
        raise Missing("libc10 exports no TensorImpl::requires_grad")


@probed(
    "gradients-in-c",
    "the gradient of a parameter is read in C",
    "it is read in Python: some microseconds more a call",
)
def GRADIENTS() -> None:
    if _gradient_functions() is None:
        raise Missing("torch's libraries export no TensorImpl::grad that reads it")


@probed(
    "versions-in-c",
    "the version of a tensor is counted in C",
    "it is counted in Python: some microseconds more a call",
)
def VERSIONS() -> None:
    if _version_functions() is None:
        raise Missing("libtorch_cpu exports no version of a tensor")


def fields() -> Fields:
    """Return the offsets of a tensor's fields in this version of torch."""
    return _searched() if RAW_FIELDS.available() else Fields()


@functools.cache
def _searched() -> Fields:
    """Search for the offsets of a tensor's fields in this version of torch.

    Relies on `Tensor._cdata` and `UntypedStorage._cdata` being addresses. Everything
    that can differ between tensors is changed in turn, and must change the region.
    """
    try:
        t = _sample()
        size = _TENSOR
        keys = find("torch._C:_dispatch_keys")(t).raw_repr()
        if keys not in _words(t._cdata, size):
            size += 1
        words = _words(t._cdata, size)
        storage = words.index(t.untyped_storage()._cdata)
        first = words.index(3) - 1
        inlined = words.index(101) - first - 1
        last = words.index(keys, first) + 1
        storage_words = _words(words[storage], _STORAGE)
        memory = storage_words.index(t.untyped_storage().data_ptr())
        region = words[first:last]
        if len(region) < 8:  # the helper compares that many words at a time
            return Fields()
        shape = [2, 3, 5], [101, 17], [307, 15]
        places = 0, 1 + inlined, 1 + 2 * inlined
    except (ValueError, AttributeError, RuntimeError, Missing):
        return Fields()
    if any(
        region[at : at + len(values)] != values
        for at, values in zip(places, shape, strict=True)
    ):
        return Fields()
    others = [
        _sample(torch.int64),
        _sample(torch.complex128),
        _sample(device="meta"),
        find("torch:_neg_view")(_sample()),
    ]
    if any(_words(o._cdata, size)[first:last] == region for o in others):
        return Fields()
    like = _words(others[0]._cdata, size)[first:last]
    kind = [i for i, (a, b) in enumerate(zip(region, like, strict=True)) if a != b]
    if len(kind) != 1:
        return Fields()
    # a lazy clone shares its memory until one of the two is written: the owner changes
    lender = torch.zeros(8, device="cpu")
    owner = _owner(lender, storage, memory)
    find("torch:_lazy_clone")(lender)
    if _owner(lender, storage, memory) == owner:
        return Fields()
    return Fields(storage, first, last - first, kind[0], inlined, memory)


def _owner(t: torch.Tensor, storage: int, memory: int) -> list[int]:
    """Return a storage's data pointer and the two words that identify its owner."""
    return _words(_words(t._cdata, _TENSOR)[storage] + 8 * memory, 3)


def _handle_offset(tensors: Sequence[torch.Tensor]) -> int | None:
    """Return the byte offset of the pointer to the TensorImpl in a Python tensor.

    `Tensor._cdata` is that pointer; the memory of each object is searched for it. None
    if the offset differs among `tensors`.
    """
    offset = None
    for t in tensors:
        words = (ctypes.c_uint64 * 6).from_address(id(t))
        offsets = [8 * k for k in range(2, 6) if words[k] == t._cdata]
        if len(offsets) != 1 or offset not in (None, offsets[0]):
            return None
        offset = offsets[0]
    return offset


#: C functions of libtorch by their field, and an optional one of C++.
_NAMES = {
    "data": "aoti_torch_get_data_ptr",
    "dims": "aoti_torch_get_dim",
    "dtype": "aoti_torch_get_dtype",
    "device": "aoti_torch_get_device_type",
    "device_index": "aoti_torch_get_device_index",
    "sizes": "aoti_torch_get_sizes",
    "strides": "aoti_torch_get_strides",
    "bytes": "aoti_torch_get_storage_size",
}
_REQUIRES_GRAD = "_ZNK3c1010TensorImpl13requires_gradEv"
_GRADIENT = "_ZNK3c1010TensorImpl4gradEv"
_WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE"
_MODE = "_ZN2at4impl27torch_function_mode_enabledEv"
_VERSION = "_ZNK2at10TensorBase8_versionEv"
_BUMP = "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"


@functools.cache
def _shims() -> dict[str, int] | None:
    """Return addresses of the C functions by field; None if libtorch lacks one."""
    try:
        library = torch_library("libtorch_cpu", ctypes.CDLL)
        addresses = {
            field: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
            for field, name in _NAMES.items()
        }
    except (OSError, AttributeError):
        return None
    bump = getattr(library, _BUMP, None)
    addresses["bump"] = ctypes.cast(bump, ctypes.c_void_p).value or 0 if bump else 0
    return addresses


def tensor_functions(
    tensors: Sequence[torch.Tensor], raw: bool = True
) -> TensorFunctions | None:
    """Return C functions that read a tensor's address and metadata, or None.

    Relies on the stable C shim of AOTInductor, and on finding the pointer to a tensor's
    TensorImpl in its Python object. `raw`: with the offsets of fields in memory.
    """
    shims = _shims() if FUNCTIONS.available() else None
    offset = _handle_offset(tensors) if shims is not None else None
    if shims is None or offset is None:
        return None
    places = fields() if raw else Fields()
    return TensorFunctions(
        handle=offset,
        storage=8 * places.storage,
        first=8 * places.first,
        words=places.words,
        kind=places.kind,
        inlined=places.inlined,
        memory=8 * places.memory,
        **shims,
    )


@functools.cache
def _required() -> int:
    """Return the address of `TensorImpl::requires_grad`; 0 if torch exports none.

    Tested on tensors that require a gradient and on one that does not.
    """
    try:
        function = getattr(torch_library("libc10", ctypes.CDLL), _REQUIRES_GRAD)
    except (OSError, AttributeError):
        return 0
    function.restype, function.argtypes = ctypes.c_bool, [ctypes.c_void_p]
    leaf = torch.zeros(1, device="cpu", requires_grad=True)
    with torch.enable_grad():
        samples = [torch.zeros(1, device="cpu"), leaf, leaf * 2]
    if any(function(t._cdata) != t.requires_grad for t in samples):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def requires_grad_function(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return how C code reads `requires_grad`, or None.

    The tuple has the byte offset of the pointer to the TensorImpl in a Python tensor.
    It also has the address of a C++ function that takes this pointer and returns a
    bool.
    """
    if not REQUIRES_GRAD.available() or not _required():
        return None
    offset = _handle_offset(tensors)
    return None if offset is None else (offset, _required())


@cached
def gradient_functions() -> tuple[int, int, int] | None:
    """Return the result of `_gradient_functions` if it is available, else None."""
    return _gradient_functions() if GRADIENTS.available() else None


@functools.cache
def _gradient_functions() -> tuple[int, int, int] | None:
    """Return addresses of three C++ functions, or None if torch lacks one.

    They return the gradient of a TensorImpl, the Python object of a C++ tensor, and
    whether a torch function mode is on. Reading the gradient of a non-leaf tensor gives
    no warning this way. Tested on tensors with a gradient and without.
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
    without, leaf = (torch.zeros(1, device="cpu", requires_grad=True) for _ in range(2))
    leaf.grad = torch.ones(1, device="cpu")
    for t in (without, leaf, leaf):  # twice, to notice a reference that was not counted
        if wrap(get(t._cdata)) is not t.grad:
            return None
    # a mode may be on already, and the result is cached for the whole process
    already = find("torch._C:_len_torch_function_stack")() > 0
    with BaseTorchFunctionMode():
        within = mode()
    if mode() != already or not within:
        return None
    a, b, c = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (get, wrap, mode))
    return a, b, c


@cached
def version_functions() -> tuple[int, int] | None:
    """Return the result of `_version_functions` if it is available, else None."""
    return _version_functions() if VERSIONS.available() else None


@functools.cache
def _version_functions() -> tuple[int, int] | None:
    """Return addresses of two C++ functions that read and increment a tensor's version.

    None if torch lacks one. Tested on a tensor.
    """
    try:
        library = torch_library("libtorch_cpu", ctypes.CDLL)
        read, bump = getattr(library, _VERSION), getattr(library, _BUMP)
    except (OSError, AttributeError):
        return None
    t = torch.zeros(1, device="cpu")
    offset = _handle_offset((t,))
    if offset is None:
        return None
    read.restype, read.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    bump.restype, bump.argtypes = None, [ctypes.c_void_p]
    for change in (lambda: None, lambda: t.add_(1), lambda: bump(id(t) + offset)):
        before = t._version
        change()
        if read(id(t) + offset) != t._version:
            return None
    if t._version != before + 1:
        return None
    a, b = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (read, bump))
    return a, b


#: CPython's number of the slot `tp_descr_get`, by which a descriptor is read.
_DESCR_GET = 54


def gradient_getter(kinds: Sequence[type]) -> tuple[Any, int] | None:
    """Return how Python reads `grad` of objects of exactly these types, or None.

    The tuple has a descriptor, and the C function that takes the descriptor, an object
    and its type. None if a type reads `grad` in another way.
    """
    descriptors = [inspect.getattr_static(kind, "grad", None) for kind in kinds]
    if any(
        x is not descriptors[0] or type(x) is not types.GetSetDescriptorType
        for x in descriptors
    ) or any(
        inspect.getattr_static(kind, "__getattribute__") is not object.__getattribute__
        for kind in kinds
    ):
        return None
    slot = ctypes.pythonapi.PyType_GetSlot
    slot.restype, slot.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_int]
    function = slot(type(descriptors[0]), _DESCR_GET)
    return None if not function else (descriptors[0], function)


def _read(field: str, t: torch.Tensor) -> int:
    """Return the code that a function of the C shim returns for a tensor."""
    shims = _shims() or {}
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
    code = ctypes.c_int32()
    offset = _handle_offset((t,)) or 0
    kind(shims[field])(id(t) + offset, ctypes.addressof(code))
    return code.value


class Codes:
    """Codes of the C shim for dtypes and devices, each read once."""

    def __init__(self) -> None:
        self._codes: dict[tuple[torch.dtype, torch.device], tuple[int, ...]] = {}

    def of(self, t: torch.Tensor) -> tuple[int, ...]:
        """Return the codes of a tensor's dtype and type of device, and its device's
        index.
        """
        key = t.dtype, t.device
        if key not in self._codes:
            names = "dtype", "device", "device_index"
            self._codes[key] = tuple([_read(name, t) for name in names])
        return self._codes[key]
