"""Functions of torch outside of its public API that steps call."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .capability import probed
from .names import Missing, find, takes


def _those(*paths: str) -> tuple[Any, ...]:
    return tuple(x for path in paths if (x := find(path, None)) is not None)


#: They report that no script is being compiled.
SCRIPTING = _those("torch.jit._script:is_scripting")
#: They report whether code is being compiled.
COMPILING = _those("torch._utils:is_compiling")
#: They name a backend of the user.
BACKEND_NAME = _those("torch._C:_get_privateuse1_backend_name")
#: They report whether tensors override torch functions.
OVERRIDDEN = _those(
    "torch._C:_has_torch_function",
    "torch._C:_has_torch_function_unary",
    "torch._C:_has_torch_function_variadic",
)
#: They do nothing to a step.
CHECKS = _those(
    "torch.optim:Optimizer._accelerator_graph_capture_health_check",
    "torch.optim:Optimizer._cuda_graph_capture_health_check",
    "torch._dynamo:graph_break",
)


def _tree_map(function: Callable[[Any], Any], x: Any, **_: Any) -> Any:
    if isinstance(x, dict):
        return type(x)({k: _tree_map(function, y) for k, y in x.items()})
    if type(x) in (list, tuple):
        return type(x)(_tree_map(function, y) for y in x)
    return function(x)


#: Maps a function over the items of lists, tuples and dicts.
tree_map: Any = find("torch.utils._pytree:tree_map", _tree_map)


@probed(
    "inductor",
    "what is no optimizer step goes to Inductor",
    "what is no optimizer step runs in eager",
)
def INDUCTOR() -> None:
    # importing it takes a second
    if importlib.util.find_spec("torch._inductor.compile_fx") is None:
        raise Missing("torch has no torch._inductor.compile_fx")
    if "torch._inductor.compile_fx" in sys.modules:
        compiler = find("torch._inductor.compile_fx:compile_fx")
        takes(compiler, "model_", "example_inputs_")


def inductor(gm: Any, args: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph with Inductor."""
    compiled: Callable[..., Any] = find("torch._inductor.compile_fx:compile_fx")(
        gm, list(args)
    )
    return compiled
