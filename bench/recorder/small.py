"""Tensors of one number in the CPU's memory: what a step counts, and may branch on.

Their contents are formulas too. A symbol stands for contents: those of a leaf, or those
that a call gives for other symbols. Tensors with one symbol have equal contents, so the
numbers that are read from them are one number: 1,000 counters that agree are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .numbers import Expr, Refused, evaluate, is_number

#: Functions that make a tensor of numbers.
MADE = frozenset({"tensor", "scalar_tensor"})
#: Calls that give new memory, or write their first argument; none gives a view.
PURE = frozenset(
    (
        "add sub mul div pow sqrt rsqrt reciprocal neg abs exp log clone maximum "
        "minimum add_ sub_ mul_ div_ pow_ sqrt_ neg_ fill_ zero_ copy_ lerp_ addcmul_ "
        "zeros_like ones_like full_like clamp clamp_ clamp_min clamp_max"
    ).split()
)


class Log:
    """The symbols of tensors of one number.

    `alike`: pairs of leaves (by place) whose contents must be equal at later calls.
    """

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.symbols: dict[int, int] = {}  # of tensors, by id
        self.alike: list[tuple[int, int]] = []
        self._known: dict[Any, int] = {}
        self._memory: set[int] = set()

    def _symbol(self, key: Any, entry: Any) -> int:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(self.entries)
            self.entries.append((entry, key))
        return found

    def leaf(self, t: torch.Tensor, place: int, name: Any) -> None:
        """A tensor of the optimizer's is used; `name`: of a lane's state, or None."""
        if t.dim() or t.device.type != "cpu" or t.dtype.is_complex:
            return
        if t.untyped_storage().nbytes() != t.element_size():
            return
        if t.data_ptr() in self._memory:
            raise Refused("numbers of the state share memory")
        self._memory.add(t.data_ptr())
        with torch._C.DisableTorchFunction():
            key = name and ("leaf", name, t.dtype, repr(t.item()))
        symbol = self._symbol(key or ("leaf", place), ("leaf", place))
        first = self.entries[symbol][0][1]
        if first != place:
            self.alike.append((place, first))
        self.symbols[id(t)] = symbol

    def call(
        self, name: str, func: Any, args: Any, kwargs: Any, result: Any, tensors: Any
    ) -> None:
        """A call was recorded. What it does to numbers that are known, or forget."""
        symbols = self.symbols
        if not tensors:
            if name in MADE and isinstance(result, torch.Tensor) and not kwargs:
                if not result.dim() and type(args[0]) in (int, float):
                    key = name, type(args[0]), repr(args[0])
                    symbols[id(result)] = self._symbol(key, ("call", func, args, {}))
            elif name in MADE and isinstance(result, torch.Tensor) and not result.dim():
                self._note(func, name, args, kwargs, result)
            return
        if not any(id(t) in symbols for t in tensors):
            return
        short = name.removeprefix("_foreach_")
        known = short in PURE and all(id(t) in symbols for t in tensors)
        if not known:
            for t in tensors:
                if short not in PURE or short.endswith("_"):
                    symbols.pop(id(t), None)
            return
        if short is name:
            self._note(func, name, args, kwargs, result)
            return
        first = args[0]
        n = len(first)
        results = result if result is not None else first
        keywords = [*kwargs.items()]
        news = []
        for i in range(n):
            one = [[x[i]] if type(x) is list and len(x) == n else x for x in args]
            named = {
                k: [x[i]] if type(x) is list and len(x) == n else x for k, x in keywords
            }
            news.append(self._of(func, one, named))
        for t, symbol in zip(results, news, strict=True):
            symbols[id(t)] = symbol

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        self.symbols[id(result)] = self._of(func, args, kwargs)

    def _of(self, func: Any, args: Any, kwargs: Any) -> int:
        """The symbol of a call's result."""
        symbols = self.symbols
        key: list[Any] = [func]

        def mapped(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                key.append(("tensor", symbols[id(x)]))
                return _Symbol(symbols[id(x)])
            if type(x) in (list, tuple):
                key.append((type(x), len(x)))
                return type(x)([mapped(y) for y in x])
            if is_number(x):
                key.append(("number", id(x)))
                return x.expr
            key.append((type(x), repr(x)))
            return x

        given = [mapped(x) for x in args]
        named = {}
        for k, x in kwargs.items():
            key.append(k)
            named[k] = mapped(x)
        return self._symbol(tuple(key), ("call", func, given, named))

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Are the contents of leaves equal that were so?"""
        if not self.alike:
            return True
        wanted = [leaves[b] for _, b in self.alike]
        given = [leaves[a] for a, _ in self.alike]
        bits = [torch.stack(x).contiguous().view(torch.uint8) for x in (given, wanted)]
        return torch.equal(*bits)

    def item(self, symbol: int, leaves: Sequence[Any], known: dict[Any, Any]) -> Any:
        """The number that tensors with a symbol hold, in a call with these leaves."""
        with torch._C.DisableTorchFunction():
            return self._content(symbol, leaves, known).item()

    def _content(self, symbol: int, leaves: Any, known: dict[Any, Any]) -> torch.Tensor:
        at = "symbol", symbol
        if at in known:
            found: torch.Tensor = known[at]
            return found

        def given(x: Any) -> Any:
            if isinstance(x, _Symbol):
                return self._content(x.symbol, leaves, known).clone()
            if type(x) in (list, tuple):
                return type(x)([given(y) for y in x])
            if isinstance(x, Expr):
                return evaluate(x, leaves, lambda s: self.item(s, leaves, known), known)
            return x

        entry = self.entries[symbol][0]
        if entry[0] == "leaf":
            made = leaves[entry[1]].detach()
        else:
            _, func, args, kwargs = entry
            operands = [given(x) for x in args]
            made = func(*operands, **{k: given(x) for k, x in kwargs.items()})
            made = operands[0] if made is None else made
            if isinstance(made, (list, tuple)):
                made = made[0]
        known[at] = made
        return made


class _Symbol:
    """An argument that is a tensor."""

    def __init__(self, symbol: int) -> None:
        self.symbol = symbol
