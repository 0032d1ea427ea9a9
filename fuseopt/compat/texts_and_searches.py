"""Refuse uses of a number that moves where Dynamo computes something else.

Such uses are a text of the number, and a search for it in a list or in a range.
"""

from __future__ import annotations

import functools
from typing import Any

from .guards import guard
from .hooks import all_kinds, is_ours
from .leaving import refuse
from .names import attribute_of, find
from .outcomes import constant_of, is_among
from .patches import Hook, Patcher
from .symbol_uses import constant


@guard("refused-texts", "text that is made of a number which moves is refused")
def TEXTS(patcher: Patcher) -> None:
    """Refuse a text made of a symbolic number: Dynamo would keep the text constant.

    Dynamo calls `str.format` where a step calls `format`.
    """
    kind = find("torch._dynamo.symbolic_convert:InstructionTranslatorBase")
    BuiltinVariable = find("torch._dynamo.variables.builtin:BuiltinVariable")
    SymNodeVariable = find("torch._dynamo.variables.tensor:SymNodeVariable")

    def fixed(tx: Any, x: Any) -> Any:
        """Return a variable, or the guarded constant of a symbolic number."""
        x = x.realize()
        if not isinstance(x, SymNodeVariable):
            return x
        number = constant(tx, x)
        if number is None:
            refuse(tx, "it formats a number that changes as text")
        return number

    def text(original: Hook, self: Any, *args: Any) -> Any:
        if is_ours(self):
            self.stack[-1] = fixed(self, self.stack[-1])
        return original(self, *args)

    def formatted(original: Hook, self: Any, tx: Any, *args: Any, **named: Any) -> Any:
        if self.fn is not format or not is_ours(tx):
            return original(self, tx, *args, **named)
        values = [fixed(tx, x) for x in args]
        if named or not all(x.is_python_constant() for x in values):
            return original(self, tx, *args, **named)
        return constant_of(format(*(x.as_python_constant() for x in values)))

    patcher.around(kind, "_format_value", text, "self")
    patcher.around(BuiltinVariable, "call_format", formatted, "self", "tx")


@guard("refused-searches", "a number which moves is not looked for in a list")
def SEARCHES(patcher: Patcher) -> None:
    """Refuse a search for a symbolic number in a list: Dynamo would not find it.

    Dynamo's variable of a range is a list of its bounds. That a range holds a number is
    an int there.
    """
    base = find("torch._dynamo.variables.lists:BaseListVariable")
    RangeVariable = find("torch._dynamo.variables.lists:RangeVariable")
    SymNodeVariable = find("torch._dynamo.variables.tensor:SymNodeVariable")
    name = attribute_of(base, "sq_contains_impl", "sq_contains", "call_method")

    def contains(original: Hook, self: Any, tx: Any, item: Any) -> Any:
        if not is_ours(tx):
            return original(self, tx, item)
        both = [item.realize(), *(x.realize() for x in self.items)]
        if any(isinstance(x, SymNodeVariable) for x in both):
            answer = is_among(tx, item, self.items, isinstance(self, RangeVariable))
            if answer is None:
                refuse(tx, "it searches a list with a number that changes")
            return answer
        found = original(self, tx, item)
        if isinstance(self, RangeVariable) and found.is_python_constant():
            return constant_of(bool(found.as_python_constant()))
        return found

    def called(
        original: Hook, self: Any, tx: Any, name: str, args: Any, kwargs: Any
    ) -> Any:
        if name == "__contains__" and len(args) == 1 and not kwargs:
            rest = functools.partial(_with_name, original, name)
            return contains(rest, self, tx, args[0])
        return original(self, tx, name, args, kwargs)

    hook: Hook = called if name == "call_method" else contains
    for kind in set(all_kinds(base)):
        if name in vars(kind):
            patcher.around(kind, name, hook, "self", "tx")


def _with_name(method: Hook, name: str, self: Any, tx: Any, item: Any) -> Any:
    return method(self, tx, name, [item], {})
