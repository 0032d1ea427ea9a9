"""Find the backend inside the function that Dynamo calls with a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

#: Attributes of backend wrappers with the wrapped function: Dynamo's, torch.compile's,
#: ours.
WRAPPED = ("_torchdynamo_orig_backend", "_compiler_fn", "compiler_fn")


def layers_of(compiler: Any) -> Iterator[Any]:
    """Yield the function that Dynamo calls with a graph, then each wrapped function."""
    for _ in range(8):  # a wrapper may wrap itself
        if compiler is None:
            return
        yield compiler
        wrapped = (getattr(compiler, name, None) for name in WRAPPED)
        compiler = next((x for x in wrapped if x is not None), None)


def leads_to(compiler: Any, backend: Callable[..., Any]) -> bool:
    """Is `backend` the function that Dynamo calls as `compiler`, in any wrapper?"""
    return any(
        layer is backend or getattr(layer, "compiler_fn", None) is backend
        for layer in layers_of(compiler)
    )


def traces_for(tx: Any, backend: Callable[..., Any]) -> bool:
    """Does one of Dynamo's translators trace for this backend?"""
    return leads_to(getattr(tx.output, "compiler_fn", None), backend)
