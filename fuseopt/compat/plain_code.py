"""Decide whether a step's code is so plain that Dynamo's own guards suffice.

Plain code loops over groups and parameters, and reads groups, state and numbers of its
optimizer. It calls functions of torch and of `math`, and functions that are as plain.
It depends on no fact that Dynamo leaves unguarded, except the code behind its names,
which `PlainCode.same` compares. Anything outside of the lists here is not plain.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from .patch_state import patch_state

#: Instructions that plain code must not have.
ODD = (
    *("IS_OP", "CONTAINS_OP", "FORMAT", "BUILD_STRING", "IMPORT", "CHECK_E", "RAISE"),
    *("YIELD", "SEND", "DELETE", "STORE_GLOBAL", "STORE_DEREF", "LOAD_BUILD", "MATCH"),
    *("DICT_", "SET_", "GET_A", "CONVERT_VALUE", "LOAD_SUPER", "RETURN_GENERATOR"),
    *("END_ASYNC", "BUILD_SET", "BUILD_MAP", "BUILD_CONST_KEY_MAP"),
)
BUILTINS = frozenset(
    (
        "len range enumerate zip filter map float int bool abs min max sum list tuple"
    ).split()
)
#: Attributes of a tensor that are no arithmetic: facts that Dynamo treats as constants.
FACTS = frozenset(
    (
        "shape size stride ndim dim numel nelement dtype device layout requires_grad "
        "is_leaf is_cuda is_cpu is_sparse is_nested is_quantized is_meta is_mkldnn "
        "itemsize nbytes element_size storage_offset data_ptr const_data_ptr "
        "is_contiguous is_complex names is_floating_point get_device type grad_fn "
        "output_nr name values indices tolist numpy untyped_storage storage "
        "storage_type retains_grad volatile register_hook backward retain_grad apply_ "
        "map_ module_load is_shared is_pinned is_inference is_conj is_neg is_signed "
        "is_same_size is_set_to is_coalesced is_distributed set_ resize_ resize_as_ "
        "share_memory_ requires_grad_ random_ normal_ uniform_ bernoulli bernoulli_ "
        "multinomial cauchy_ exponential_ geometric_ log_normal_ type_as new __class__ "
        "__dict__ __module__ __doc__ detach_ ndimension dense_dim sparse_dim"
    ).split()
)
#: Functions of torch that draw numbers, or read more than a tensor's contents.
OTHERS = frozenset(
    (
        "rand rand_like randn randn_like randint randint_like randperm normal "
        "bernoulli "
        "multinomial poisson load save compile manual_seed seed initial_seed is_tensor "
        "get_default_dtype is_grad_enabled get_rng_state set_rng_state"
    ).split()
)
METHODS = frozenset(x for x in dir(torch.Tensor) if not x.startswith("__")) - FACTS
VALUES = (int, float, bool, complex, str, bytes, type(None))


class PlainCode:
    """Code that a step may run; `refusal` is the reason why it is not plain, or ""."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.refusal = ""
        #: each function that the step may call, and its code
        self._codes: list[tuple[types.FunctionType, types.CodeType]] = []
        #: by the id of a module's globals: these globals, and the builtins that its
        #: code names
        self._builtins: dict[int, tuple[dict[str, Any], set[str]]] = {}
        #: the values of global names and of class attributes
        self._named: list[tuple[dict[str, Any], str, Any]] = []
        self._kind = weakref.ref(type(optimizer))
        self._held = [*vars(type(optimizer)).items()]
        pending: list[Any] = [inspect.unwrap(type(optimizer).step)]
        while pending and not self.refusal:
            pending += self._function(pending.pop(), optimizer)

    def same(self) -> bool:
        """Do all names still refer to the same code?"""
        kind = self._kind()
        return (
            kind is not None
            and _read(kind) == [(name, id(x)) for name, x in self._held]
            and all(f.__code__ is code for f, code in self._codes)
            and all(names.isdisjoint(g) for g, names in self._builtins.values())
            and all(table.get(name) is x for table, name, x in self._named)
        )

    def _function(self, function: Any, optimizer: Optimizer) -> Iterator[Any]:
        if not isinstance(function, types.FunctionType):
            self.refusal = f"it calls {function!r}"
            return
        if any(function is f for f, _ in self._codes):
            return
        self._codes.append((function, function.__code__))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if not isinstance(value, (*VALUES, type)):
                self.refusal = (
                    f"{function.__name__} closes over a {type(value).__name__}"
                )
        codes = [function.__code__]
        for code in codes:
            codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
        for code in codes:
            yield from self._code(code, function.__globals__, optimizer)

    def _code(
        self, code: types.CodeType, names: dict[str, Any], optimizer: Optimizer
    ) -> Iterator[Any]:
        before: Any = None
        for x in dis.get_instructions(code):
            if x.opname in ("CACHE", "NOP", "EXTENDED_ARG"):
                continue
            none = (
                x.opname == "IS_OP"
                and before is not None
                and (before.opname.startswith("LOAD_CONST") and before.argval is None)
            )
            if x.opname.startswith(ODD) and not none:
                self.refusal = f"{code.co_name} has the instruction {x.opname}"
                return
            if x.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield from self._global(x.argval, names)
            elif x.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
                yield from self._attribute(str(x.argval), optimizer)
            before = x

    def _global(self, name: str, names: dict[str, Any]) -> Iterator[Any]:
        if name not in names:
            if name not in BUILTINS or not hasattr(builtins, name):
                self.refusal = f"it names {name}"
            self._builtins.setdefault(id(names), (names, set()))[1].add(name)
            return
        value = names[name]
        self._named.append((names, name, value))
        home = getattr(value, "__module__", None) or ""
        if isinstance(value, types.FunctionType) and not home.startswith("torch"):
            yield value
        elif not (value is torch or value is math or isinstance(value, VALUES)) and (
            not home.startswith("torch") or name in OTHERS
        ):
            self.refusal = f"it names {name}, a {type(value).__name__}"

    def _attribute(self, name: str, optimizer: Optimizer) -> Iterator[Any]:
        held = vars(optimizer).get(name, self)
        if held is not self and name not in ("param_groups", "state", "defaults"):
            if isinstance(held, types.FunctionType):
                yield held
            elif not isinstance(held, VALUES):
                self.refusal = f"it reads self.{name}, a {type(held).__name__}"
            return
        method = next((vars(k)[name] for k in _own(optimizer) if name in vars(k)), None)
        if method is not None:
            method = getattr(method, "__func__", method)
            if isinstance(method, (types.FunctionType)):
                yield inspect.unwrap(method)
            elif not isinstance(method, VALUES):
                self.refusal = f"it reads self.{name}, a {type(method).__name__}"
            return
        known = name in METHODS or name in ("param_groups", "state", "grad")
        of_torch = hasattr(torch, name) and not isinstance(
            getattr(torch, name), types.ModuleType
        )
        if name in OTHERS or not (known or of_torch or hasattr(math, name)):
            self.refusal = f"it reads {name!r}"


def _own(optimizer: Optimizer) -> list[type]:
    """Return the classes of an optimizer outside of torch, the first one first."""
    kinds = type(optimizer).__mro__
    inside = kinds[: kinds.index(Optimizer)]
    return [x for x in inside if not x.__module__.startswith("torch.")]


def _read(kind: type) -> list[tuple[str, int]]:
    return [(name, id(x)) for name, x in vars(kind).items()]


def plain_code(optimizer: Optimizer) -> PlainCode:
    """Return a step's PlainCode, made anew if its names refer to other code."""
    code: PlainCode | None = patch_state.plain.get(optimizer)
    if code is None or not code.same():
        code = patch_state.plain[optimizer] = PlainCode(optimizer)
    return code


def plain(optimizer: Optimizer) -> bool:
    """Is the code of a step plain?"""
    return not plain_code(optimizer).refusal


def names_in(optimizer: Optimizer) -> frozenset[str]:
    """Return all names in the methods of an optimizer's own classes."""
    return frozenset(name for code in _codes(optimizer) for name in code.co_names)


def writes_attributes(optimizer: Optimizer) -> bool:
    """Does one of its methods write an attribute of anything but a tensor?

    Methods of torch's classes and `__init__` do not count.
    """
    return any(
        x.opname in ("STORE_ATTR", "DELETE_ATTR") and x.argval not in ("data", "grad")
        for code in _codes(optimizer)
        if code.co_name not in ("__init__", "__setstate__")
        for x in dis.get_instructions(code)
    )


def _codes(optimizer: Optimizer) -> Iterator[types.CodeType]:
    for kind in _own(optimizer):
        for value in vars(kind).values():
            function = inspect.unwrap(getattr(value, "__func__", value))
            pending = [getattr(function, "__code__", None)]
            while pending:
                code = pending.pop()
                if isinstance(code, types.CodeType):
                    yield code
                    pending += code.co_consts
