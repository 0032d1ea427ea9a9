"""Prove that a step treats lanes alike, or return the reason against it."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ..handlers import passing, reraise
from . import (
    assignments,
    branches,
    calls,
    class_functions,
    comparisons,
    comprehensions,
    container_functions,
    expressions,
    forms,
    invocations,
    loop_statements,
    statements,
    torch_functions,
)
from .machine import Machine, Raises, Refusal
from .source import Sources
from .values import Known
from .values import Optimizer as Itself
from .world import Unknown, World

#: The largest number of rounds until the written places reach a fixed point.
ROUNDS = 12
#: Modules that register handlers of syntax and rules of functions when imported.
RULES = (
    *(assignments, branches, statements, loop_statements),
    *(comparisons, comprehensions, invocations),
    *(class_functions, container_functions, torch_functions),
)
_SOURCES = Sources()

Machine.evaluate = staticmethod(expressions.evaluate)
Machine.call = staticmethod(calls.call)
Machine.execute = staticmethod(forms.execute)


@dataclass(frozen=True)
class Proof:
    """Result of the analysis.

    `refusal`: the reason against a proof, or "". `sizes`: True if the step reads sizes
    of lanes; then only lanes of one size are alike. `classes`: True if it reads the
    class of a lane's tensor. `codes`: all code that the step may run, except that of
    torch and Python. `shared`: the ids of tensors that belong to no lane. `firsts`:
    True if the step may depend on which kind comes first.
    """

    refusal: str
    sizes: bool
    classes: bool
    codes: frozenset[types.CodeType]
    shared: frozenset[int] = frozenset()
    firsts: bool = True

    def why_not(self, reshaped: bool, parts: bool) -> str:
        """Return why the proof does not cover the lanes at hand; "" if it does.

        `reshaped`: True if some alike lanes differ in size. `parts`: True if the lanes
        are parts of tensors.
        """
        if self.refusal:
            return self.refusal
        if self.sizes and reshaped:
            return "it reads sizes, in which lanes differ"
        if self.sizes and parts:
            return "it reads sizes, which are those of whole tensors"
        if self.classes and parts:
            return "it reads the class of a tensor"
        return ""


def prove(
    function: Any,
    optimizer: Optimizer,
    known: Iterable[torch.Tensor] = (),
    counters: bool = False,
) -> Proof:
    """Analyse the step of an optimizer in its present state. Never raises.

    `known`: tensors of lanes that its groups and state do not hold at the moment.
    `counters`: True if lanes may differ in the integers in their state.
    """
    machine: Machine | None = None
    try:
        world = World(optimizer, known, counters)
        for _ in range(ROUNDS):
            world.changed = False
            machine = Machine(_SOURCES, world)
            with passing():
                calls.call(machine, Known(function), [Itself()], {}, ast.Pass())
            if not world.changed:
                seen = frozenset(machine.codes), frozenset(world.shared)
                reads = machine.sizes, machine.classes
                return Proof("", *reads, *seen, machine.firsts)
        refusal = f"the analysis did not reach a fixed point in {ROUNDS} rounds"
    except (Refusal, Unknown) as error:
        refusal = str(error)
    except RecursionError:
        refusal = "its code is nested too deeply to be analysed"
    except Raises:
        refusal = "it always raises"
    except Exception as error:
        reraise(error)
        # an error of the analysis itself proves nothing
        refusal = f"its analysis fails: {type(error).__name__}: {error}"
    codes = frozenset() if machine is None else frozenset(machine.codes)
    return Proof(refusal, True, True, codes)
