"""Same-shape products of several lanes: a loop of torch.mm, or one torch.bmm.

    python -m bench.bmm [threads]

For each dtype, size and number of lanes: microseconds of the loop; of stack, bmm and
the results as views; of bmm alone; and whether the two have the same bits. Contenders
take turns in one run, and the least of the rounds counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

SIZES = (64, 128, 256, 512)
LANES = (2, 8, 32)
DTYPES = (torch.float32, torch.bfloat16)
#: rows x columns of a product that is not square, as an update of a wide layer has
WIDE = (64, 256)


def _best(runs: list[Callable[[], object]], seconds: float = 0.4) -> list[float]:
    """Least microseconds of each run; they take turns."""
    best = [float("inf")] * len(runs)
    for run in runs:
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - start)
    return [b * 1e6 for b in best]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print("dtype     lanes    shape     mm loop  stack+bmm  bmm alone  same bits")
    for dtype in DTYPES:
        for rows, inner in (*((s, s) for s in SIZES), WIDE):
            for n in LANES:
                a = [torch.randn(rows, inner).to(dtype) for _ in range(n)]
                b = [torch.randn(inner, rows).to(dtype) for _ in range(n)]
                stacked = torch.stack(a), torch.stack(b)

                def loop(
                    a: list[torch.Tensor] = a, b: list[torch.Tensor] = b
                ) -> object:
                    return [torch.mm(x, y) for x, y in zip(a, b, strict=True)]

                def batched(
                    a: list[torch.Tensor] = a, b: list[torch.Tensor] = b
                ) -> object:
                    return torch.bmm(torch.stack(a), torch.stack(b)).unbind()

                def alone(
                    pair: tuple[torch.Tensor, torch.Tensor] = stacked,
                ) -> object:
                    return torch.bmm(*pair)

                with torch.no_grad():
                    mm, bmm, only = _best([loop, batched, alone])
                    pairs = zip(loop(), batched(), strict=True)  # type: ignore[call-overload]
                    same = all(torch.equal(x, y) for x, y in pairs)
                print(
                    f"{str(dtype)[6:]:<9}{n:>6}{f'{rows}x{inner}':>9}{mm:>12.0f}"
                    f"{bmm:>11.0f}{only:>11.0f}  {'yes' if same else 'no'}"
                )


if __name__ == "__main__":
    main()
