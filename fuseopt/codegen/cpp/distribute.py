"""Split element code where it calls a library function over a block of elements.

Some functions exist only in a library that works on arrays (eager's square root).
Element code then runs in phases over blocks that stay in cache: loop, call, loop. Each
instruction goes to the last phase that can hold it, so that few values cross a call. A
crossing value is loaded again if its memory is unchanged or was given that very value.
Otherwise a small array keeps it. The elements of a block are neighbours, so that a
library reads such memory itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...ir.graph import Variant


@dataclass(frozen=True)
class Phases:
    """Instructions of each phase, by number.

    `code[k]`: computed in phase k. `reads[k]`: made in an earlier phase and used in k;
    those in `reloaded[k]` are loaded again from its slot, others come from an array.
    `calls[k]`: library calls made before phase k. `direct`: slots that they read
    themselves, by (call, argument). `stores[k]`: (instruction, slot). Slots past the
    last are the arrays of the operands of the variant's reductions, in their order.
    `divided[k]`: divisions that phase k makes by multiplying. It may run again, since
    it stores to no memory that it reads.
    """

    count: int
    code: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[int, ...], ...]
    reloaded: tuple[dict[int, int], ...]
    calls: dict[int, tuple[int, ...]]
    direct: dict[tuple[int, int], int]
    stores: tuple[tuple[tuple[int, int], ...], ...]
    spilled: frozenset[int]
    divided: tuple[tuple[int, ...], ...]


#: Dtypes with the same form in memory and in registers.
_EXACT = frozenset({"f32", "f64"})


def phases(
    variant: Variant, library: frozenset[str], divided: Collection[int] = ()
) -> Phases:
    """Return the phases of a variant's element code: one, without library calls and
    without divisions that are `divided` by multiplying.
    """
    instrs, elements = variant.instrs, set(variant.code)
    level: dict[int, int] = {}
    for i in variant.code:
        args = [level[a] for a in instrs[i].args if a in elements]
        level[i] = max(args, default=0) + (instrs[i].op in library)
    stores = [(x, s) for x, s in variant.stores if variant.slots[s].domain == "element"]
    folded = [instrs[i].args[0] for i in variant.folds]
    stores += [(x, len(variant.slots) + k) for k, x in enumerate(folded)]
    count = max(level.values(), default=0) + 1
    # a library call happens between level - 1, which must compute its argument, and
    # level
    wanted: dict[int, int] = {}
    for x, _ in stores:
        if x in elements:
            wanted[x] = min(wanted.get(x, count), level[x])
    for i in reversed(variant.code):
        is_call = instrs[i].op in library
        if instrs[i].op == "tail":
            # a tail is no code, and output code may use it
            wanted.setdefault(i, 0)
        at = level[i] if is_call else wanted[i]
        for a in instrs[i].args:
            if a in elements:
                need = at - 1 if is_call else at
                wanted[a] = min(wanted.get(a, count), need)
    phase = {
        i: level[i] if instrs[i].op in library else wanted[i] for i in variant.code
    }
    count, opens = _split(variant, library, divided, phase, stores, count)
    loads = {
        int(instrs[i].attr or 0): phase[i]
        for i in variant.code
        if instrs[i].op == "load"
    }
    store_phase = {}
    for x, s in stores:
        at = max(phase.get(x, 0), loads.get(s, 0))
        store_phase[s] = at + (at in opens)
    code: list[list[int]] = [[] for _ in range(count)]
    reads: list[dict[int, None]] = [{} for _ in range(count)]
    reloaded: list[dict[int, int]] = [{} for _ in range(count)]
    direct: dict[tuple[int, int], int] = {}
    # slots that store a value unchanged
    slot_of = {
        x: s
        for x, s in stores
        if s < len(variant.slots)
        and variant.slots[s].dtype == instrs[x].dtype
        and instrs[x].dtype in _EXACT
    }

    def memory(x: int, k: int) -> int | None:
        """Return the slot whose memory has the value of instruction x before loop k."""
        if instrs[x].op == "load":
            slot = int(instrs[x].attr or 0)
            if store_phase.get(slot, count) >= k:
                return slot
        slot = slot_of.get(x, -1)
        return slot if slot >= 0 and store_phase[slot] < k else None

    calls: dict[int, list[int]] = {}
    spilled: set[int] = set()

    def use(x: int, k: int) -> None:
        """Record that the loop of phase k needs instruction x."""
        if x not in elements or instrs[x].op == "tail":
            return
        is_call = instrs[x].op in library
        if phase[x] == k and not is_call:
            return
        reads[k][x] = None
        slot = memory(x, k)
        if slot is None:
            spilled.add(x)
        else:
            reloaded[k][x] = slot

    for i in variant.code:
        if instrs[i].op in library:
            calls.setdefault(phase[i], []).append(i)
            spilled.add(i)
            for a in instrs[i].args:
                slot = memory(a, phase[i]) if a in elements else None
                if slot is not None and instrs[a].dtype in _EXACT:
                    direct[i, a] = slot
                elif a in elements:
                    spilled.add(a)
            continue
        code[phase[i]].append(i)
        for a in instrs[i].args:
            use(a, phase[i])
    by_phase: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for x, s in stores:
        by_phase[store_phase[s]].append((x, s))
        use(x, store_phase[s])
    return Phases(
        count,
        tuple(map(tuple, code)),
        tuple(tuple(sorted(r)) for r in reads),
        tuple(reloaded),
        {k: tuple(v) for k, v in calls.items()},
        direct,
        tuple(map(tuple, by_phase)),
        frozenset(spilled),
        tuple([tuple(x for x in c if x in divided) for c in code]),
    )


def _split(
    v: Variant,
    library: frozenset[str],
    divided: Collection[int],
    phase: dict[int, int],
    stores: list[tuple[int, int]],
    count: int,
) -> tuple[int, frozenset[int]]:
    """Split phases that make divisions by multiplying, and renumber `phase`.

    The first half computes these and what they need; the second one all else, and
    stores. A phase stays whole if it stores to no memory that it reads. Return the new
    number of phases, and the first halves.
    """
    early: set[int] = set()
    for i in reversed(v.code):
        if i in divided:
            early.add(i)
        if i in early:
            early.update(
                a
                for a in v.instrs[i].args
                if phase.get(a) == phase[i] and v.instrs[a].op not in library
            )
    in_place = [s for _, s in stores if s < len(v.slots) and v.slots[s].read]
    halved = {phase[i] for i in divided} if in_place else set()
    start, total = [], 0
    for k in range(count):
        start.append(total)
        total += 1 + (k in halved)
    for i, k in phase.items():
        late = k in halved and i not in early and v.instrs[i].op not in library
        phase[i] = start[k] + late
    return total, frozenset(start[k] for k in halved)
