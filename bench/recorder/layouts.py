"""The layouts of results of calls, by those of their arguments; what a call is.

A layout has a number. The result of a call is that of the same call on meta tensors,
which is made once for all calls that are alike.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from fuseopt import compat

from .numbers import Refused, is_number

#: Attributes and methods that depend on a tensor's layout and on nothing else.
FACTS = frozenset(
    (
        "shape device dtype layout ndim is_cuda is_cpu is_meta is_mps is_xpu is_sparse "
        "is_sparse_csr is_quantized is_nested is_mkldnn is_leaf requires_grad itemsize "
        "nbytes numel dim size stride is_complex is_floating_point is_contiguous "
        "element_size nelement __len__ get_device is_signed ndimension is_same_size "
        "__hash__ storage_offset result_type is_tensor is_floating_point "
        "is_inference is_conj is_neg is_vulkan is_hpu is_ipu is_xla is_maia is_mtia"
    ).split()
)
#: What sets a mode of torch's, and does so in a recording too.
SWITCHES = frozenset({"_set_grad_enabled"})
READS = frozenset({"item", "__bool__", "__float__", "__int__", "__index__"})
#: Attributes that are views.
VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
#: What reads contents, memory or records of autograd, and what changes these.
REFUSED = frozenset(
    (
        "tolist numpy data_ptr untyped_storage storage typed_storage __array__ "
        "__dlpack__ register_hook backward requires_grad_ retain_grad set_ resize_ "
        "resize_as_ register_post_accumulate_grad_hook is_set_to share_memory_ "
        "pin_memory __repr__ __format__ __deepcopy__ __reduce_ex__ __setstate__ "
        "__iter__ __contains__ equal allclose is_nonzero swap_ as_subclass map_ "
        "apply_ map2_ is_shared is_pinned rename_ manual_seed seed"
    ).split()
)
PLAIN = (
    *(int, bool, str, bytes, complex, type(None), type(...), torch.dtype),
    *(torch.device, torch.layout, torch.memory_format),
)


def kind_of(func: Any) -> tuple[str, str]:
    """What a call is: fact, grad, read, refused, method, function; and its name."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "?")
        if name != "__get__":
            return "refused", f"a write of {attribute}"
        if attribute in FACTS:
            return "fact", attribute
        if attribute == "grad":
            return "grad", attribute
        if attribute == "data":
            return "data", attribute
        if attribute in VIEWS:
            return "view", attribute
        return "refused", f"the attribute {attribute}"
    if name in FACTS:
        return "fact", name
    if name in SWITCHES:
        return "switch", name
    if name in READS:
        return "read", name
    if name in REFUSED or not name:
        return "refused", name or str(func)
    is_method = (
        getattr(torch.Tensor, name, None) is func
        or getattr(func, "__objclass__", None) in torch.Tensor.__mro__
    )
    if is_method and not name.startswith("__"):
        return "method", name
    home = getattr(func, "__module__", None) or ""
    if not is_method and home and home.partition(".")[0] not in ("torch", "builtins"):
        return "refused", f"{home}.{name}"
    return "function", name


def operator_of(name: str, func: Any) -> Any:
    """The operator of a method such as `__getitem__`, or the function itself."""
    is_operator = name.startswith("__") and name.endswith("__")
    return getattr(operator, name, func) if is_operator else func


def flat(x: Any) -> list[Any]:
    """The tensors in arguments, in order."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (list, tuple)):
        return []
    return [t for y in x for t in flat(y)]


class Layouts:
    """The layouts of a recording, and the results of its calls."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._facts: list[Any] = []
        self._results: dict[Any, Any] = {}
        self._memory: dict[Any, torch.Tensor] = {}

    def number(self, t: torch.Tensor) -> int:
        """The number of a tensor's layout."""
        facts = t.shape, t.stride(), t.dtype, t.device
        return self._number(facts)

    def _number(self, facts: Any) -> int:
        found = self._numbers.get(facts)
        if found is None:
            found = self._numbers[facts] = len(self._facts)
            self._facts.append(facts)
        return found

    def make(self, number: int) -> torch.Tensor:
        """A tensor of this layout, without contents; many have the same memory."""
        shape, stride, dtype, device = self._facts[number]
        need = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n)
        memory = self._memory.get((dtype, device))
        if memory is None or memory.numel() < need:
            memory = torch.empty(need, dtype=dtype, device=device)
            self._memory[dtype, device] = memory
        return memory.as_strided(shape, stride)

    def result(self, key: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """How to make the result of a call, see `Recording._results`."""
        try:
            found = self._results.get(key)
        except TypeError as error:
            raise Refused(f"an argument of {func}: {error}") from error
        if found is None:
            name = getattr(func, "__name__", "")
            of = self._of_lists if name.startswith("_foreach_") else self._on_meta
            found = self._results[key] = of(func, args, kwargs)
        return found

    def _of_lists(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The same of a call of lists: once for all positions that are alike."""
        first = args[0]
        if not isinstance(first, (list, tuple)) or len(first) < 2:
            return self._on_meta(func, args, kwargs)
        n = len(first)

        def listed(x: Any) -> bool:
            return isinstance(x, (list, tuple)) and len(x) == n

        lists = [x for x in [*args, *kwargs.values()] if listed(x)]
        seen: dict[Any, int] = {}
        keys = [
            tuple([
                self.number(t) if isinstance(t, torch.Tensor) else type(t)
                for t in position
            ])
            for position in zip(*lists, strict=True)
        ]  # fmt: skip
        for i, key in enumerate(keys):
            seen.setdefault(key, i)
        at = [*seen.values()]
        picked = [[x[i] for i in at] if listed(x) else x for x in args]
        named = {k: [x[i] for i in at] if listed(x) else x for k, x in kwargs.items()}
        kind, what = self._on_meta(func, picked, named)
        if kind != "many":
            return kind, what
        by_key = dict(zip(seen, what[1], strict=True))
        places = []
        for i, key in enumerate(keys):
            how = by_key[key]
            if how[0] == "given" and how[1] >= len(at):
                raise Refused(f"{func} gives another of its arguments")
            places.append(("given", i) if how[0] == "given" else how)
        return kind, (what[0], places)

    def _on_meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = flat((args, kwargs))
        metas: list[torch.Tensor] = []

        def meta(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                metas.append(
                    torch.empty_strided(
                        x.shape, x.stride(), dtype=x.dtype, device="meta"
                    )
                )
                return metas[-1]
            if is_number(x):
                return x.value if x._value is not None else (1.5 if x.is_float else 2)
            return x

        margs, mkwargs = compat.tree_map(meta, (args, kwargs))
        device = given[0].device if given else torch.get_default_device()
        if mkwargs.get("device") is not None or not given:
            device = torch.device(mkwargs.get("device") or device)
            mkwargs["device"] = torch.device("meta")
        try:
            made = func(*margs, **mkwargs)
        except Refused:
            raise
        except Exception as error:
            name = getattr(func, "__name__", func)
            raise Refused(f"{name} depends on contents, or fails: {error}") from error

        def describe(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                for i, y in enumerate(metas):
                    if x is y:
                        return "given", i
                where = device if x.is_meta else x.device
                return "tensor", self._number((x.shape, x.stride(), x.dtype, where))
            if isinstance(x, (list, tuple)):
                return "many", (type(x), [describe(y) for y in x])
            if x is None:
                return "plain", None
            raise Refused(f"{getattr(func, '__name__', func)} gives no tensor")

        return describe(made)
