"""Numbers in the state of each lane, which count apart as gradients go missing."""

from __future__ import annotations

import math

from tests.cases.base import Lacking


class Counts(Lacking):
    """An int in the state of each lane; lanes count apart as gradients go missing."""

    abstract = True
    lacking = ((), (3, 8), (3,), (5, 7, 9))

    def lane(self, p, group):
        state = self.state[p]
        if not state:
            state["n"] = 0
        state["n"] += 1
        p.add_(p.grad, alpha=-group["lr"] * self.of(state["n"], state, group))


class CountFloorDiv(Counts):
    def of(self, n, state, group):
        return 1.0 / (1 + n // 2)


class CountMod(Counts):
    def of(self, n, state, group):
        return 1.0 + n % 3


class CountPow(Counts):
    def of(self, n, state, group):
        return 0.9**n


class CountPowNeg(Counts):
    def of(self, n, state, group):
        return (n + 1) ** (-0.5)


class CountBigPow(Counts):
    def of(self, n, state, group):
        return 1.0 / (1 + (n * 7) ** 25)


class CountShift(Counts):
    def of(self, n, state, group):
        return 1.0 / (1 << n)


class CountMin(Counts):
    def of(self, n, state, group):
        return min(n, 3)


class CountMax(Counts):
    def of(self, n, state, group):
        return max(n, 3)


class CountMinFloat(Counts):
    def of(self, n, state, group):
        return min(1.0, n / 4)


class CountMax2(Counts):
    def of(self, n, state, group):
        return max(2, n) / max(n, 2.0)


class CountBits(Counts):
    def of(self, n, state, group):
        return 1.0 + (n & 1) + (~n & 3)


class CountXor(Counts):
    def of(self, n, state, group):
        return 1.0 + (n ^ 2) + (n | 4)


class CountDivmod(Counts):
    def of(self, n, state, group):
        a, b = divmod(n, 2)
        return 1.0 + a - b / 4


class CountRound(Counts):
    def of(self, n, state, group):
        return 1.0 + round(n / 2) + round(n / 3, 1)


class CountInt(Counts):
    def of(self, n, state, group):
        return (
            1.0 + int(n / 2) + math.floor(n / 3) + math.ceil(n / 4) + math.trunc(-n / 3)
        )


class CountCompare(Counts):
    def of(self, n, state, group):
        return 1.0 + (n > 2) + (n == 3) * 0.5


class CountBool(Counts):
    def of(self, n, state, group):
        return 1.0 + bool(n - 2)


class CountNot(Counts):
    def of(self, n, state, group):
        return 1.0 + (not n - 2)


class CountTable(Counts):
    def of(self, n, state, group):
        return (1.0, 0.5, 0.25, 0.125, 2.0, 3.0, 4.0)[n]


class CountDict(Counts):
    def of(self, n, state, group):
        return {1: 0.5, 2: 0.25}.get(n, 1.0)


class CountStr(Counts):
    def of(self, n, state, group):
        return float(str(n)) + len(f"{n:b}")


class CountRange(Counts):
    def of(self, n, state, group):
        s = 0.0
        for k in range(n):
            s += 1.0 / (k + 1)
        return s


class CountWhile(Counts):
    def of(self, n, state, group):
        s = 1.0
        while n > 1:
            n //= 2
            s *= 0.5
        return s


class CountSum(Counts):
    def of(self, n, state, group):
        return sum(1.0 / k for k in range(1, n + 1))


class CountNeg(Counts):
    def of(self, n, state, group):
        return -n + abs(-n) + 1 + +n * 0.5


class CountMath(Counts):
    def of(self, n, state, group):
        return (
            math.sqrt(n)
            + math.log(n + 1)
            + math.cos(n)
            + math.atan2(n, 2)
            + math.hypot(n, 1)
        )


class CountFactorial(Counts):
    def of(self, n, state, group):
        return 1.0 / math.factorial(n) + math.comb(n + 2, 2) + math.gcd(n, 2)


class CountIsqrt(Counts):
    def of(self, n, state, group):
        return 1.0 + math.isqrt(n * 5)


class CountLdexp(Counts):
    def of(self, n, state, group):
        return math.ldexp(1.0, -n) + math.fmod(n, 2) + math.copysign(1, n - 2)


class CountZeroDiv(Counts):
    def of(self, n, state, group):
        return 1.0 / (n - 4)


class CountZeroMod(Counts):
    def of(self, n, state, group):
        return 7 % (n - 4)


class CountNegSqrt(Counts):
    def of(self, n, state, group):
        return math.sqrt(3 - n)


class CountNegPow(Counts):
    def of(self, n, state, group):
        return abs((2.5 - n) ** 0.5)


class CountOverflow(Counts):
    def of(self, n, state, group):
        return 1e200**n * 1e-200 if group["lr"] else 0
