"""A step's function, its optimizer -> is every lane treated like those alike to it?

The code that the step may run is gone through without running it (an abstract
interpretation of its syntax), with what is known of each value: see `values`. What may
be read, called and branched on is a whitelist; anything else is a reason not to let a
few lanes lead, with the line where it stands. docs/led-lanes.md says what is on it, and
why that is enough.
"""

from __future__ import annotations

import os
import types
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from . import calls, comprehensions, expressions, statements
from .machine import Machine, Raises, Refusal
from .source import Sources
from .values import Optimizer as Itself
from .world import Unknown, World

__all__ = ["Proof", "prove"]

_SOURCES = Sources()
#: What a step may write makes more to be looked at; so often.
ROUNDS = 12

Machine.evaluate = staticmethod(expressions.evaluate)
Machine.call = staticmethod(calls.call)
Machine.execute = staticmethod(statements.execute)


@dataclass(frozen=True)
class Proof:
    """What the analysis found. `why`: not all lanes are shown to be treated alike.

    `sizes`: does the step read sizes of lanes? Then only lanes of one size are alike.
    `codes`: all code that the step may run, but for torch's and Python's own.
    """

    why: str
    sizes: bool
    codes: frozenset[types.CodeType]


def prove(function: Any, optimizer: Optimizer) -> Proof:
    """Go through the step of an optimizer, as it is now."""
    machine: Machine | None = None
    try:
        world = World(optimizer)
        for _ in range(ROUNDS):
            world.changed = False
            machine = Machine(_SOURCES, world)
            _step(machine, function)
            if not world.changed:
                return Proof("", machine.sizes, frozenset(machine.codes))
        why = "it does not settle what the step writes"
    except (Refusal, Unknown) as error:
        why = str(error)
    except RecursionError:
        why = "its code is nested too deeply to be analysed"
    except Raises:
        why = "it always raises"
    except Exception as error:
        if os.environ.get("PROOF_DEBUG"):
            raise
        # an error of the analysis itself proves nothing
        why = f"its analysis fails: {type(error).__name__}: {error}"
    codes = frozenset() if machine is None else frozenset(machine.codes)
    return Proof(why, True, codes)


def _step(machine: Machine, function: Any) -> None:
    import ast

    place = ast.Pass()
    if not isinstance(function, types.FunctionType):
        raise machine.refusal("the step is no Python function")
    calls.call(
        machine,
        # not what a rule says of it, but its own text
        _plain(function),
        [Itself()],
        {},
        place,
    )


def _plain(function: types.FunctionType) -> Any:
    from .values import Known

    return Known(function)


_ = comprehensions
