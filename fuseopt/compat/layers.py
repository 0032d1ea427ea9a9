"""Find the backend within what Dynamo calls with a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

#: Where wrappers of a backend keep what they wrap: Dynamo's, torch.compile's, ours.
WRAPPED = ("_torchdynamo_orig_backend", "_compiler_fn", "compiler_fn")


def layers_of(compiler: Any) -> Iterator[Any]:
    """The function that Dynamo calls with a graph, then what each wrapper wraps."""
    for _ in range(8):  # whoever wraps a backend may wrap itself
        if compiler is None:
            return
        yield compiler
        wrapped = (getattr(compiler, name, None) for name in WRAPPED)
        compiler = next((x for x in wrapped if x is not None), None)


def leads_to(compiler: Any, backend: Callable[..., Any]) -> bool:
    """Is `backend` what Dynamo calls as `compiler`, within whatever wrappers?"""
    return any(
        layer is backend or getattr(layer, "compiler_fn", None) is backend
        for layer in layers_of(compiler)
    )


def traces_for(tx: Any, backend: Callable[..., Any]) -> bool:
    """Does one of Dynamo's translators trace for this backend?"""
    return leads_to(getattr(tx.output, "compiler_fn", None), backend)
