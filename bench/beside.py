"""In: a model. Out: how much of a step a second thread hides behind the backward.

    python -m bench.beside --rounds 7 --picture

A GPT-2 of the given width in float32 or bfloat16, AdamW, one thread for the backward
and one for the steps. Each round takes in turns a backward alone, all steps alone (the
same buckets), and a backward with steps beside it. One line of JSON: the medians in
milliseconds, and two shares of the steps' time. `hidden` compares times of the clock,
so it needs a quiet machine. `beside` leaves out what the backward's thread waits at its
end, and what it computes longer. `--picture` draws the round whose second share is the
median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fuseopt
from fuseopt.offload import CPUOffloadOptimizer

PICTURE = (
    Path(__file__).parent.parent / "docs" / "pictures" / "steps-beside-backward.png"
)
Span = tuple[float, float]


class Round(NamedTuple):
    """Seconds of one round, and the spans of steps beside a backward from its begin.

    `waited`: from the last gradient to the end. `added`: what the backward's thread
    computes longer than without steps.
    """

    backward: float
    steps: float
    both: float
    waited: float
    added: float
    spans: list[Span]

    @property
    def hidden(self) -> float:
        """The part of the steps' time that the backward hides, by the clock."""
        return 1 - (self.both - self.backward) / self.steps

    @property
    def beside(self) -> float:
        """The part of the spans that the backward's thread neither waits for nor
        computes. Another program's work lengthens both of them.
        """
        return 1 - (self.waited + self.added) / sum(y - x for x, y in self.spans)


def make(dtype: torch.dtype, width: int, layers: int, batch: int) -> Any:
    """A model, and a function that makes its loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=8, vocab_size=4096, n_positions=128
    )
    model = GPT2LMHeadModel(config).to(dtype)
    tokens = torch.randint(4096, (batch, 128))
    return model, lambda: model(tokens, labels=tokens).loss


def stepper(
    model: Any, dtype: torch.dtype, megabytes: float
) -> tuple[Any, list[Span], list[float]]:
    """An optimizer that steps on a thread, the list of the spans of its steps, and the
    list of the times of last gradients.
    """

    def optimizer(params: Any) -> torch.optim.Optimizer:
        if dtype == torch.float32:
            return torch.optim.AdamW(params, lr=1e-4)
        return CPUOffloadOptimizer(params, torch.optim.AdamW, lr=1e-4)

    made = fuseopt.in_backward(
        model, optimizer, buckets=int(megabytes * 2**20), thread=True
    )
    spans: list[Span] = []
    steps: Any = made._stepper
    inner: Callable[..., None] = steps._steps.step

    def timed(params: Any) -> None:
        begin = time.perf_counter()
        inner(params)
        spans.append((begin, time.perf_counter()))

    steps._steps.step = timed
    lasts: list[float] = []
    end = made._end

    def ended(of: Any) -> None:
        lasts.append(time.perf_counter())
        end(of)

    made._end = ended  # type: ignore[method-assign]
    return made, spans, lasts


def one_round(
    loss: Callable[[], Any], optimizer: Any, spans: list[Span], lasts: list[float]
) -> Round:
    """Time a backward, steps, and both."""
    with optimizer.accumulate():
        value = loss()
        begin, computed = time.perf_counter(), time.thread_time()
        value.backward()
        backward = time.perf_counter() - begin
        alone = time.thread_time() - computed
    begin = time.perf_counter()
    optimizer.step()
    steps = time.perf_counter() - begin
    value = loss()
    spans.clear()
    begin, computed = time.perf_counter(), time.thread_time()
    value.backward()
    end = time.perf_counter()
    added = max(0.0, time.thread_time() - computed - alone)
    both, waited = end - begin, end - lasts[-1]
    found = [(x - begin, y - begin) for x, y in spans]
    return Round(backward, steps, both, waited, added, found)


def draw(found: Round) -> None:
    """Draw who works when, with and without a second thread."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 2.6))
    ms = 1e3
    axes.broken_barh([(0, ms * found.backward)], (2.6, 0.7), color="#4c78a8")
    axes.broken_barh(
        [(ms * found.backward, ms * found.steps)], (2.6, 0.7), color="#f58518"
    )
    last = found.both - found.waited
    axes.broken_barh([(0, ms * last)], (1.3, 0.7), color="#4c78a8")
    axes.broken_barh([(ms * last, ms * found.waited)], (1.3, 0.7), color="#d5d8dc")
    axes.broken_barh(
        [(ms * x, ms * (y - x)) for x, y in found.spans],
        (0.4, 0.7),
        color="#f58518",
    )
    axes.set_yticks([2.95, 1.65, 0.75])
    axes.set_yticklabels(["one thread", "backward", "steps of buckets"])
    axes.set_xlabel("ms")
    axes.set_title(
        f"{found.beside:.0%} of the steps' time is beside the backward", loc="left"
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    """Time rounds in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--picture", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    model, loss = make(dtype, arguments.width, arguments.layers, arguments.batch)
    optimizer, spans, lasts = stepper(model, dtype, arguments.megabytes)
    for _ in range(3):
        one_round(loss, optimizer, spans, lasts)
    rounds = [one_round(loss, optimizer, spans, lasts) for _ in range(arguments.rounds)]
    rounds.sort(key=lambda x: x.beside)
    row = {
        name: round(1e3 * statistics.median(getattr(x, name) for x in rounds), 1)
        for name in ("backward", "steps", "both", "waited", "added")
    }
    middle = rounds[len(rounds) // 2]
    row |= {
        "hidden": round(statistics.median(x.hidden for x in rounds), 3),
        "beside": [round(x.beside, 3) for x in rounds],
        "buckets": len(middle.spans),
    }
    print(json.dumps(row), flush=True)
    if arguments.picture:
        draw(middle)


if __name__ == "__main__":
    main()
