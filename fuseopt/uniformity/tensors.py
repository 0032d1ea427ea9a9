"""Attributes of tensors that a step may read, and functions of torch that call ATen.

An ATen call returns tensors, independent of the contents of its operands. The path
through the code alone decides which tensors a call combines. Alike lanes take the same
path, and the dry run shows it. Results that are not tensors are numbers.
"""

from __future__ import annotations

import ast
import functools
import types
from typing import Any

import torch

from .machine import Machine, usable
from .memory import List
from .values import (
    NUMBER,
    PLAIN,
    Data,
    First,
    Items,
    Known,
    Level,
    Many,
    Ref,
    Tensor,
    Value,
    level_of,
)

#: Metadata on which lanes agree that are alike except for their sizes.
METADATA: dict[str, tuple[type, ...]] = {
    "dtype": (torch.dtype,),
    "device": (torch.device,),
    "layout": (torch.layout,),
    "ndim": (int,),
    "is_cuda": (bool,),
    "is_cpu": (bool,),
    "is_xpu": (bool,),
    "is_mps": (bool,),
    "is_meta": (bool,),
    "is_sparse": (bool,),
    "is_sparse_csr": (bool,),
    "is_quantized": (bool,),
    "requires_grad": (bool,),
    "itemsize": (int,),
}
#: Attributes that depend on sizes.
SIZES: dict[str, tuple[type, ...]] = {"shape": (torch.Size,), "nbytes": (int,)}
#: Methods and functions that return metadata.
ASKED: dict[str, tuple[type, ...]] = {
    "dim": (int,),
    "ndimension": (int,),
    "element_size": (int,),
    "is_complex": (bool,),
    "is_floating_point": (bool,),
    "is_contiguous": (bool,),
    "is_signed": (bool,),
}
ASKED_SIZES: dict[str, tuple[type, ...]] = {
    "size": (torch.Size, int),
    "numel": (int,),
    "nelement": (int,),
    "stride": (tuple, int),
    "__len__": (int,),
}
#: False for the parameter and the gradient of a led lane; lanes where it is True are
#: never led.
NEVER = frozenset({"is_sparse", "is_sparse_csr", "is_quantized", "is_complex"})
#: Attributes that are tensors.
VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
#: Methods besides those that ATen has under the same name.
METHODS = frozenset(
    "clone detach to type_as float double half bfloat16 int long short bool "
    "cpu cuda contiguous view reshape view_as reshape_as expand expand_as new_zeros "
    "new_ones new_full new_empty new_tensor t transpose permute flatten unflatten "
    "squeeze unsqueeze movedim swapaxes size copy_ fill_ zero_ requires_grad_ "
    "__getitem__ split chunk unbind tile repeat".split()
)
DENIED = frozenset(
    "set_ resize_ resize_as_ data_ptr storage untyped_storage share_memory_ backward "
    "register_hook retain_grad tolist numpy apply_ map_ map2_ requires_grad_ is_set_to "
    "storage_offset __reduce_ex__ __deepcopy__ record_stream is_pinned pin_memory "
    "nonzero masked_select unique is_same_size swap_tensors numpy_T".split()
)
READS = frozenset({"item", "__float__", "__int__", "__bool__", "tolist"})
#: Calls that use a number read from contents as a value; others might use it as a size.
VALUED = frozenset(
    "add sub subtract rsub mul multiply div divide true_divide pow float_power lerp "
    "addcmul addcdiv addmm addmv addbmm baddbmm clamp clip clamp_min clamp_max fill "
    "where maximum minimum fmod remainder full_like new_full full tensor as_tensor "
    "scalar_tensor eq ne lt le gt ge floor_divide threshold hardtanh masked_fill "
    "copy atan2 hypot xlogy softplus leaky_relu elu celu heaviside item "
    "ldexp copysign nan_to_num new_tensor softshrink "
    "hardshrink logaddexp".split()
)
#: Python functions of torch that only call ATen.
PYTHON = frozenset(
    "torch.functional torch.nn.functional torch._tensor torch.linalg torch.fft "
    "torch._linalg_utils torch.special".split()
)
_FACTORIES = frozenset({"tensor", "as_tensor", "scalar_tensor"})


@functools.cache
def returns(name: str) -> tuple[str, ...] | None:
    """Return the results of an ATen op: "tensor", "list" or "number" each; None: no op.

    If overloads return either a tensor or a tuple: "mixed" and the tuple's length.
    """
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    forms: set[tuple[str, ...]] = set()
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        if not any("Tensor" in str(r.type) for r in schema.returns):
            argument_types = {str(a.type) for a in schema.arguments}
            if not argument_types & {"Tensor", "Optional[Tensor]", "Tensor?"}:
                continue  # an overload on numbers and lists of TorchScript
        forms.add(tuple(_kind(str(r.type)) for r in schema.returns))
    forms.discard(())
    if not forms:
        return ("nothing",)
    if len(forms) == 1:
        return forms.pop()
    if any("number" in x for x in forms):
        return ("number",)
    longest = max(forms, key=len)
    if ("tensor",) in forms and len(longest) > 1:
        return "mixed", str(len(longest))
    return ("list",) if ("list",) in forms else ("tensor",)


def _kind(name: str) -> str:
    if name in ("Tensor", "Optional[Tensor]", "Tensor?"):
        return "tensor"
    return "list" if "List" in name and "Tensor" in name else "number"


def op_of(name: str) -> str | None:
    """Return the ATen op behind a method or a function of this name."""
    if name in DENIED:
        return None
    bare = name
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        if bare[:1] in "ri" and returns(bare) is None:
            bare = bare[1:]
    for candidate in (name, bare, bare.rstrip("_")):
        if candidate not in DENIED and returns(candidate) is not None:
            return candidate
    return None


# ---------------------------------------------------------------- attributes


def attribute(machine: Machine, t: Tensor | First, name: str, node: ast.AST) -> Value:
    """Return an attribute of a tensor."""
    first = isinstance(t, First)
    _near(machine, t, name, node)
    role = "" if isinstance(t, First) else t.role
    level = Level.KIND
    if first or (isinstance(t, Tensor) and t.shared):
        level = Level.UNIFORM
    if name == "requires_grad" and level != Level.UNIFORM:
        # no guard covers requires_grad of gradients and state, in Dynamo neither
        raise machine.refusal("it reads requires_grad of a tensor of a lane", node)
    if name in METADATA:
        if name in NEVER and role:
            return Known(False)
        return Data(level, frozenset(METADATA[name]))
    if name in SIZES:
        machine.sizes = True
        return Data(level, frozenset(SIZES[name]))
    if isinstance(t, First):
        if name in ASKED or name in ASKED_SIZES:
            from .values import Method

            return Method(t, name)
        raise machine.refusal("it uses a tensor of the first lane", node)
    if name == "grad" and role == "param":
        return Tensor(none=True, role="grad")
    if name in VIEWS:
        return Tensor(shared=t.shared, number=t.number, foreign=t.foreign)
    if (
        name in ASKED
        or name in ASKED_SIZES
        or name in READS
        or name in METHODS
        or (hasattr(torch.Tensor, name) and op_of(name) is not None)
    ):
        from .values import Method

        return Method(t, name)
    raise machine.refusal(f"it reads {name} of a tensor of a lane", node)


def _near(machine: Machine, t: Tensor | First, name: str, node: ast.AST) -> None:
    """Refuse to read metadata of a tensor that may belong to another lane."""
    if isinstance(t, Tensor) and t.foreign:
        names = (METADATA, SIZES, ASKED, ASKED_SIZES, READS)
        if name == "grad" or any(name in x for x in names):
            raise machine.refusal("two lists may have different lanes", node)


def metadata(
    machine: Machine, t: Tensor | First, name: str, level: Level, node: ast.AST
) -> Value | None:
    """Return the result of a method or function that returns metadata, or None."""
    _near(machine, t, name, node)
    first = isinstance(t, First) or t.shared
    level = max(level, Level.UNIFORM if first else Level.KIND)
    if name in ASKED:
        if name in NEVER and isinstance(t, Tensor) and t.role:
            return Known(False)
        return Data(level, frozenset(ASKED[name]))
    if name in ASKED_SIZES:
        machine.sizes = True
        return Data(level, frozenset(ASKED_SIZES[name]))
    return None


# ---------------------------------------------------------------- calls


class Operands:
    """Operands of an ATen call, joined.

    `shared`: none belongs to a lane. `number`: one is a number read from contents.
    `foreign`: one may belong to another lane. `lane_data`: one is plain data of this
    lane.
    """

    def __init__(self, machine: Machine, node: ast.AST) -> None:
        self.machine = machine
        self.node = node
        self.shared = True
        self.number = False
        self.foreign = False
        self.lane_data = False

    def take(self, value: Value) -> None:
        usable(self.machine, value, self.node)
        if isinstance(value, Tensor):
            self.shared = self.shared and value.shared
            self.number = self.number or value.number
            self.foreign = self.foreign or value.foreign
            self.lane_data = self.lane_data or value.number or value.plain
            return
        level = level_of(value)
        if level is not None:
            if isinstance(value, Known) and not isinstance(value.value, PLAIN):
                raise self.machine.refusal("it passes torch an object", self.node)
            self.number = self.number or level == Level.NUMBER
            self.lane_data = self.lane_data or level != Level.UNIFORM
            self.shared = self.shared and level == Level.UNIFORM
            return
        if isinstance(value, Items):
            for x in value.items:
                self.take(x)
            return
        if isinstance(value, Many):
            self.take(value.item)
            return
        if isinstance(value, Ref):
            container = self.machine.container(value, self.node)
            if isinstance(container, List):
                if container.lanes is not None:
                    raise self.machine.refusal(
                        "it passes a call tensors of all lanes", self.node
                    )
                for member in (*(container.items or ()), container.many):
                    if member is not None:
                        self.take(member)
                return
        raise self.machine.refusal(
            "it passes torch a value that depends on lanes", self.node
        )


def aten(
    machine: Machine,
    name: str,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    """Return the result of an ATen call. Refuses operands of several lanes."""
    op = op_of(name)
    if name.endswith("_") or name.startswith("__i") or "out" in keywords:
        machine.effects += 1
    operands = Operands(machine, node)
    for key, value in keywords.items():
        if key == "generator" and value != Known(None):
            raise machine.refusal("it draws random numbers", node)
        operands.take(value)
    for value in args:
        operands.take(value)
    bare = (op or name).rstrip("_").removeprefix("__")
    sized = {"full": 0, "new_full": 1}.get(bare)
    if sized is not None:
        size = args[sized] if len(args) > sized else keywords.get("size", Known(None))
        operands_of_out = Operands(machine, node)
        operands_of_out.take(size)
        if operands_of_out.number:
            raise machine.refusal("it reads a size from tensor data", node)
    if operands.number and bare not in VALUED:
        raise machine.refusal("it passes a call a number read from a lane", node)
    if operands.foreign and operands.lane_data:
        raise machine.refusal("two lists may have different lanes", node)
    if machine.lane is None and not operands.shared:
        raise machine.refusal("it uses a tensor of one lane for all lanes", node)
    result = Tensor(shared=operands.shared, foreign=operands.foreign)
    if name in _FACTORIES or name in METHODS or op is None:
        if name in ("split", "chunk", "unbind"):
            machine.sizes = True
            return Many(result, Level.KIND)
        return result
    form = returns(op)
    assert form is not None
    if form == ("nothing",):
        return Known(None)
    if form[0] == "mixed":
        second = args[1] if len(args) > 1 else keywords.get("dim")
        if second is not None and level_of(second) is not None:
            return Items((result,) * int(form[1]))
        return result
    if len(form) == 1:
        return _one(machine, form[0], result)
    return Items(tuple(_one(machine, x, result) for x in form))


def _one(machine: Machine, form: str, result: Tensor) -> Value:
    if form == "list":
        machine.sizes = True  # the length of the list depends on sizes
    if form == "tensor":
        return result
    return Many(result, Level.KIND) if form == "list" else NUMBER


def is_aten(function: Any) -> str | None:
    """Return the name of the ATen op that a function of torch calls, or None."""
    name = getattr(function, "__name__", "")
    if name.startswith("_foreach_"):
        return None
    if isinstance(function, types.BuiltinFunctionType):
        owner = getattr(function, "__self__", None)
        home = str(getattr(function, "__module__", None) or "")
        of_torch = (
            home.startswith("torch")
            or (
                isinstance(owner, (type, types.ModuleType))
                and owner.__name__.rpartition(".")[0].startswith("torch")
            )
            or getattr(owner, "__name__", "") == "_VariableFunctionsClass"
        )
        if not of_torch:
            return None
        if name in _FACTORIES or op_of(name) is not None:
            return name
        return None
    if isinstance(function, types.FunctionType):
        if function.__module__ in PYTHON and op_of(name) is not None:
            if getattr(torch, name, None) is function or _of_functional(function):
                return name
    return None


def _of_functional(function: Any) -> bool:
    return getattr(torch.nn.functional, function.__name__, None) is function


def is_foreach(function: Any) -> bool:
    """Is it a function of torch that takes lists of tensors?"""
    name = getattr(function, "__name__", "")
    return (
        isinstance(function, types.BuiltinFunctionType)
        and name.startswith("_foreach_")
        and getattr(torch, name, None) is function
    )
