"""Sources of the arguments of a graph of Dynamo."""

from __future__ import annotations

from typing import Any

import torch

#: Names of Dynamo's source classes that refer to the same place at each call: a
#: variable, an attribute, an item. Its value is passed unchanged.
PLACES = frozenset(
    (
        "LocalSource LocalCellSource GlobalSource GlobalWeakRefSource "
        "WeakRefCallSource ImportSource AttrSource GenericAttrSource "
        "CellContentsSource ClosureSource "
        "TypeSource TypeDictSource TypeMROSource CodeSource DefaultsSource GradSource "
        "ParamBufferSource UnspecializedParamBufferSource OptimizerSource "
        "NNModuleSource UnspecializedNNModuleSource FSDPNNModuleSource "
        "UnspecializedBuiltinNNModuleSource GetItemSource ListGetItemSource "
        "TupleIteratorGetItemSource DictGetItemSource DictSubclassGetItemSource "
        "ConstDictKeySource NonSerializableSetGetItemSource NamedTupleFieldsSource "
        "DataclassFieldsSource SkipGuardSource ConvertIntSource"
    ).split()
)
#: Names of source classes by which a number or an array becomes a tensor, or is read
#: from one.
FORMS = frozenset(
    (
        "NumpyTensorSource FloatTensorSource CallMethodItemSource TensorPropertySource"
    ).split()
)
#: Names of source classes for new values of the code before the graph, which may only
#: be tensors.
MADE = frozenset(["SyntheticLocalSource", "TempLocalSource"])


def strange_input(gm: torch.fx.GraphModule) -> str:
    """Describe an argument of a graph with an unsupported source; "" if there is none.

    A source is supported if a tensor, an array or a number lies in a place that Dynamo
    reads at each call. Others are not, such as a number that Dynamo draws itself.
    Relies on the `grapharg` that Dynamo records at each placeholder.
    """
    for node in gm.graph.find_nodes(op="placeholder"):
        if "grapharg" in node.meta:
            why = _unknown(node.meta["grapharg"], node.meta.get("example_value"))
            if why:
                return f"the graph has the input {node.target}, {why}"
    return ""


def _unknown(graph_arg: Any, example: Any) -> str:
    if not isinstance(
        example, (torch.Tensor, torch.SymInt, torch.SymFloat, int, float)
    ):
        return f"a {type(example).__name__}"
    source = getattr(graph_arg, "source", None)
    made = isinstance(example, torch.Tensor) and getattr(graph_arg, "is_tensor", False)
    known = PLACES | FORMS | MADE if made else PLACES | FORMS
    while source is not None:
        name = type(source).__name__
        if name not in known:
            return f"which comes from a {name}"
        source = getattr(source, "base", None)
    return "" if getattr(graph_arg, "source", None) is not None else "of no source"


def number_sources(gm: torch.fx.GraphModule) -> dict[int, str]:
    """Return the sources of a graph's number arguments, by position: "L['self'].t".

    A float arrives as a tensor of one element. Relies on the `grapharg` that Dynamo
    records at each placeholder; a source without a name is "".
    """
    sources = {}
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        graph_arg = node.meta.get("grapharg")
        tensor = isinstance(node.meta.get("example_value"), torch.Tensor)
        if graph_arg is None or (
            tensor and not getattr(graph_arg, "pass_arg_as_tensor", False)
        ):
            continue
        name = getattr(getattr(graph_arg, "source", None), "name", "")
        sources[i] = name() if callable(name) else str(name)
    return sources
