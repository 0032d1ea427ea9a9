"""All uses of torch that are not its public API. Checked with torch 2.11.0 and 2.13.0.

Each function says what it relies on, and what happens where it is missing.
"""

from .accelerators import (
    before_process_groups_end,
    end_allocation,
    end_generator_capture,
)
from .attributes import keep_attributes, read_attributes
from .backward import (
    at_end_of_backward,
    backward_under_way,
    has_one_owner,
    has_step_hooks,
    is_nested,
    why_no_backward_is_known,
)
from .bound_steps import Asked, on_bound_step
from .branches import trace_branches
from .contexts import scalar_outputs
from .counters import stay_symbolic, take_for_symbols
from .debug import debug_folder, trace_artifact
from .dicts import dict_version
from .dtensors import (
    alike,
    are_spread,
    arrived,
    dtensor_type,
    fake_mode,
    in_place,
    is_collective,
    is_summed_up,
    is_wait,
    is_wrapper,
    local_part,
    part_places,
    spec_of,
    spread,
    spread_as,
    waiting,
)
from .dynamo import (
    cuts_noted,
    disabled,
    initialize,
    leave_no_patches,
    never_compiled,
    number_sources,
    on_failure,
    on_graph_break,
    on_recompile_limit,
    on_trace,
    refusal_of,
)
from .fields import (
    Codes,
    TensorFunctions,
    gradient_functions,
    gradient_getter,
    requires_grad_function,
    tensor_functions,
    version_functions,
)
from .grouping import dtypes_in_order
from .guard_latency import leave_guards_untimed
from .guards import trace_guarded
from .hazards import acts_otherwise
from .imports import spare_inductor
from .kept import Fakes, forget, tidy
from .modes import numbers_pass_modes
from .nodes import gives_to, gradient_of_lookup, is_lookup, nodes_near
from .plain import as_if_compiling, trace_plainly
from .powers import power_unchecked, trace_power
from .profiling import profiled, profiler_range
from .refusals import refusals_pass
from .rewrites import WRITTEN_AS, trace_rewrites
from .scaler import (
    STAGES,
    founds_of,
    has_stepped,
    is_plain_scaler,
    scale_of,
    stage_of,
)
from .schemas import Schema, changes_first, name_of, schema_of, written
from .states import guard_states
from .symbol_uses import trace_symbols
from .symbols import (
    TraceAgain,
    can_stay_symbolic,
    has_symbols,
    hint_of,
    plainly,
    symbol_sources,
)
from .tensors import (
    GRAD_SWITCH,
    HIGHER_ORDER,
    MAKE_TENSOR,
    LibraryStruct,
    bound_op,
    bump_versions,
    first_difference,
    metadata_guard,
    negated_view,
    shapes_of,
    vector_library,
    wraps_others,
)
from .traced import Traced, dynamo_errors, must_fail, reason_of, stance
from .tracing import traces_step
from .watched import watched
from .wrappers import (
    DECORATED,
    FALLBACK,
    GRAD_MODE,
    PROFILED,
    SORTS_BY_DIMS,
    devices_with_lists,
    ran,
    undisturbed,
    unhooked,
    without_modes,
)

__all__ = [
    "DECORATED",
    "FALLBACK",
    "GRAD_MODE",
    "GRAD_SWITCH",
    "HIGHER_ORDER",
    "MAKE_TENSOR",
    "PROFILED",
    "SORTS_BY_DIMS",
    "STAGES",
    "WRITTEN_AS",
    "Asked",
    "Codes",
    "Fakes",
    "LibraryStruct",
    "Schema",
    "TensorFunctions",
    "TraceAgain",
    "Traced",
    "acts_otherwise",
    "alike",
    "are_spread",
    "arrived",
    "as_if_compiling",
    "at_end_of_backward",
    "backward_under_way",
    "before_process_groups_end",
    "bound_op",
    "bump_versions",
    "can_stay_symbolic",
    "changes_first",
    "cuts_noted",
    "debug_folder",
    "devices_with_lists",
    "dict_version",
    "disabled",
    "dtensor_type",
    "dtypes_in_order",
    "dynamo_errors",
    "end_allocation",
    "end_generator_capture",
    "fake_mode",
    "first_difference",
    "forget",
    "founds_of",
    "gives_to",
    "gradient_functions",
    "gradient_getter",
    "gradient_of_lookup",
    "guard_states",
    "has_one_owner",
    "has_step_hooks",
    "has_stepped",
    "has_symbols",
    "hint_of",
    "in_place",
    "initialize",
    "is_collective",
    "is_lookup",
    "is_nested",
    "is_plain_scaler",
    "is_summed_up",
    "is_wait",
    "is_wrapper",
    "keep_attributes",
    "leave_guards_untimed",
    "leave_no_patches",
    "local_part",
    "metadata_guard",
    "must_fail",
    "name_of",
    "negated_view",
    "never_compiled",
    "nodes_near",
    "number_sources",
    "numbers_pass_modes",
    "on_bound_step",
    "on_failure",
    "on_graph_break",
    "on_recompile_limit",
    "on_trace",
    "part_places",
    "plainly",
    "power_unchecked",
    "profiled",
    "profiler_range",
    "ran",
    "read_attributes",
    "reason_of",
    "refusal_of",
    "refusals_pass",
    "requires_grad_function",
    "scalar_outputs",
    "scale_of",
    "schema_of",
    "shapes_of",
    "spare_inductor",
    "spec_of",
    "spread",
    "spread_as",
    "stage_of",
    "stance",
    "stay_symbolic",
    "symbol_sources",
    "take_for_symbols",
    "tensor_functions",
    "tidy",
    "trace_artifact",
    "trace_branches",
    "trace_guarded",
    "trace_plainly",
    "trace_power",
    "trace_rewrites",
    "trace_symbols",
    "traces_step",
    "undisturbed",
    "unhooked",
    "vector_library",
    "version_functions",
    "waiting",
    "watched",
    "why_no_backward_is_known",
    "without_modes",
    "wraps_others",
    "written",
]
