"""Disjoint sets that only grow (union-find)."""

from __future__ import annotations


class UnionFind:
    """Disjoint sets of positions that only grow; the least position names its set."""

    def __init__(self, n: int) -> None:
        self.parent = list(range(n))

    def find(self, x: int) -> int:
        """Return the least position of the set of `x`."""
        parent = self.parent
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def join(self, a: int, b: int) -> None:
        """Merge the sets of `a` and `b`."""
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[max(a, b)] = min(a, b)
