"""Proofs of one graph's step, for parts of an optimizer's lanes that take turns.

Of lanes an analysis sees what kinds of values their state holds, and whether they have
one dtype and device; all else that it sees belongs to the optimizer or to the code,
which Dynamo's guards have just found unchanged. So for each bucket of a backward it
would say again what it said of the first.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch.optim import Optimizer

from ..uniformity import Proof, Unknown, World

#: So many proofs are kept, the last ones.
KEPT = 8


class Prover(Protocol):
    """Who has a step analysed."""

    counters: bool  #: may lanes that are alike differ in the integers in their state?

    def prove(self) -> Proof:
        """A proof for the lanes at hand; LanesDiffer if there is none."""

    def allow(self, proof: Proof) -> None:
        """Raise LanesDiffer where a proof is none for the lanes at hand."""


class Proofs:
    """Proofs by what the analysis saw."""

    def __init__(self) -> None:
        self._proofs: list[tuple[Any, Proof]] = []

    def proof(self, prover: Prover, optimizer: Optimizer, held: Any) -> Proof:
        """A proof for the lanes of an optimizer; LanesDiffer if there is none.

        `held`: what the optimizer holds besides its lanes.
        """
        try:
            world = World(optimizer, counters=prover.counters)
        except Unknown:
            return prover.prove()  # which says why
        seen = world.of_lanes(), held
        for before, proof in self._proofs:
            if before == seen and world.lanes.isdisjoint(proof.shared):
                prover.allow(proof)
                return proof
        proof = prover.prove()
        self._proofs.append((seen, proof))
        del self._proofs[:-KEPT]
        return proof
