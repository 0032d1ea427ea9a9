"""Proofs of one graph's step, for parts of an optimizer's lanes that take turns.

An analysis reads little of lanes: the kinds of values in their state, and whether they
have one dtype and device. All else that it reads belongs to the optimizer or to the
code. Dynamo's guards have just found these unchanged. So the analysis of each bucket of
a backward would repeat the result for the first bucket.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch.optim import Optimizer

from ..uniformity import Proof, Unknown, World

#: The number of proofs that are kept, the last ones.
KEPT = 8


class Prover(Protocol):
    """An object that has fuseopt analyse a step."""

    counters: bool  #: True if integers in the state of alike lanes may differ

    def prove(self) -> Proof:
        """Return a proof for the current lanes; raise LanesDiffer without one."""

    def allow(self, proof: Proof) -> None:
        """Raise LanesDiffer if a proof does not hold for the current lanes."""


class Proofs:
    """Proofs, found by the inputs of the analysis."""

    def __init__(self) -> None:
        self._proofs: list[tuple[Any, Proof]] = []

    def proof(self, prover: Prover, optimizer: Optimizer, held: Any) -> Proof:
        """Return a proof for the lanes of an optimizer; raise LanesDiffer without one.

        `held`: all that the optimizer holds besides its lanes.
        """
        try:
            world = World(optimizer, counters=prover.counters)
        except Unknown:
            return prover.prove()  # raises LanesDiffer with the reason
        seen = world.of_lanes(), held
        for before, proof in self._proofs:
            if before == seen and world.lanes.isdisjoint(proof.shared):
                prover.allow(proof)
                return proof
        proof = prover.prove()
        self._proofs.append((seen, proof))
        del self._proofs[:-KEPT]
        return proof
