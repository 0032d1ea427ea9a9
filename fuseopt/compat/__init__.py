"""All uses of torch that are not its public API. Checked with torch 2.11.0 and 2.13.0.

Each function says what it relies on, and what happens where it is missing.
"""

from .accelerators import (
    before_process_groups_end,
    end_allocation,
    end_generator_capture,
)
from .dynamo import (
    as_if_compiling,
    disabled,
    group_as_traced,
    initialize,
    never_compiled,
    number_sources,
    on_graph_break,
    on_recompile_limit,
    on_trace,
    scalar_outputs,
    trace_power,
    traces_step,
)
from .fields import (
    Codes,
    TensorFunctions,
    gradient_getter,
    requires_grad_function,
    tensor_functions,
)
from .imports import spare_inductor
from .rewrites import trace_rewrites
from .tensors import (
    GRAD_SWITCH,
    HIGHER_ORDER,
    MAKE_TENSOR,
    LibraryStruct,
    bump_versions,
    first_difference,
    metadata_guard,
    negated_view,
    shapes_of,
    vector_library,
)
from .traced import Traced, stance
from .wrappers import GRAD_MODE, PROFILED, undisturbed

__all__ = [
    "GRAD_MODE",
    "GRAD_SWITCH",
    "HIGHER_ORDER",
    "MAKE_TENSOR",
    "PROFILED",
    "Codes",
    "LibraryStruct",
    "TensorFunctions",
    "Traced",
    "as_if_compiling",
    "before_process_groups_end",
    "bump_versions",
    "disabled",
    "end_allocation",
    "end_generator_capture",
    "first_difference",
    "gradient_getter",
    "group_as_traced",
    "initialize",
    "metadata_guard",
    "negated_view",
    "never_compiled",
    "number_sources",
    "on_graph_break",
    "on_recompile_limit",
    "on_trace",
    "requires_grad_function",
    "scalar_outputs",
    "shapes_of",
    "spare_inductor",
    "stance",
    "tensor_functions",
    "trace_power",
    "trace_rewrites",
    "traces_step",
    "undisturbed",
    "vector_library",
]
