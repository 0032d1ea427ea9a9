"""Guards that Dynamo leaves out of a step, with any backend.

Each was found by a random optimizer that it gave wrong bits. Checked with torch 2.11
and 2.13; where a version has other names for what is wrapped here, its own guards are
all there are.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from .dynamo import leads_to, traces_step


def guard_identities() -> None:
    """While Dynamo traces a step, let it ask whether two places hold one object still.

    It reads the state of a parameter by its place among the keys, and leaves out the
    guard that this key is that parameter: a state that was dropped and made anew stands
    last, and each other one was taken for its neighbour's. Nor does it ask which of the
    parameters an attribute is. Relies on the function that tells Dynamo which guards of
    this kind to leave out.
    """
    try:
        guards: Any = importlib.import_module("torch._dynamo.guards")
        left_out = guards.is_from_optimizer_source
    except (ImportError, AttributeError):
        return

    @functools.wraps(left_out)
    def asked(source: Any) -> bool:
        return not traces_step() and bool(left_out(source))

    guards.is_from_optimizer_source = asked


def guard_absences(backend: Callable[..., Any]) -> None:
    """Where Dynamo traces for `backend`, let it ask whether what was not there is still
    not there: a key or an attribute whose error was caught, a name in the dict of an
    object. And whether a tensor still requires a gradient, of which a step without a
    graph is not asked.

    Relies on the methods by which Dynamo looks these up.
    """
    try:
        variables: Any = importlib.import_module("torch._dynamo.variables")
        sources: Any = importlib.import_module("torch._dynamo.source")
        guards: Any = importlib.import_module("torch._dynamo.guards")
        builder, install = guards.GuardBuilder, guards.install_guard
        absent: Any = importlib.import_module(
            "torch._dynamo.exc"
        ).ObservedAttributeError
    except (ImportError, AttributeError):
        return

    def wrap(kind: Any, name: str, guard: Callable[..., None]) -> None:
        """Call `guard(*arguments)` before a method of Dynamo's."""
        own = kind.__dict__.get(name)
        if own is None:
            return

        @functools.wraps(own)
        def asked(this: Any, tx: Any, *args: Any) -> Any:
            if leads_to(getattr(tx.output, "compiler_fn", None), backend):
                guard(this, tx, *args)
            return own(this, tx, *args)

        setattr(kind, name, asked)

    def wrap_lookup(kind: Any, name: str) -> None:
        """Ask for an attribute that a method of Dynamo's does not find."""
        own = kind.__dict__.get(name)
        if own is None:
            return

        @functools.wraps(own)
        def looked_up(this: Any, tx: Any, attribute: str) -> Any:
            try:
                return own(this, tx, attribute)
            except absent:
                source = subguards(this)
                compiler = getattr(tx.output, "compiler_fn", None)
                if source is not None and leads_to(compiler, backend):
                    missing(source, attribute)
                raise

        setattr(kind, name, looked_up)

    def subguards(this: Any) -> Any:
        source = getattr(this, "source", None)
        return source if source is not None and source.subguards_allowed() else None

    def missing(source: Any, name: str) -> None:
        if "attr" in inspect.signature(builder.HASATTR).parameters:
            install(source.make_guard(functools.partial(builder.HASATTR, attr=name)))
        else:
            install(sources.AttrSource(source, name).make_guard(builder.HASATTR))

    def key(this: Any, tx: Any, arg: Any) -> None:
        if arg not in this:
            this.install_dict_contains_guard(tx, [arg])

    def requires_grad(this: Any, tx: Any) -> None:
        source = subguards(this)
        if source is not None:
            own = sources.AttrSource(source, "requires_grad")
            install(own.make_guard(builder.CONSTANT_MATCH))

    def names(this: Any, tx: Any, *_: Any) -> None:
        source = subguards(this)
        if source is not None and hasattr(getattr(this, "value", None), "__dict__"):
            own = sources.AttrSource(source, "__dict__")
            install(own.make_guard(builder.DICT_KEYS_MATCH))

    wrap(variables.ConstDictVariable, "getitem_const_raise_exception_if_absent", key)
    wrap(variables.TensorVariable, "method_attr_requires_grad", requires_grad)
    plain: Any = variables.UserDefinedObjectVariable
    inside = "get_dict_vt", "has_key_in_generic_dict"  # of torch 2.13, of 2.11
    wrap(plain, next((x for x in inside if hasattr(plain, x)), ""), names)
    wrap_lookup(variables.TensorVariable, "dynamic_getattr")
    lookup = "generic_getattr" if hasattr(plain, "generic_getattr") else "var_getattr"
    wrap_lookup(plain, lookup)
    for kind in ("UserDefinedClassVariable", "UserFunctionVariable"):
        wrap_lookup(getattr(variables, kind), "var_getattr")
