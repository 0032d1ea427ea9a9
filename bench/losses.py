"""In: kinds of storage. Out: losses of a small GPT-2 with each, and a picture of them.

    python -m bench.losses --steps 300

The model of the demo on its text, AdamW, the same batches for each kind: state in
float32, in blocks of 8 bits, in bfloat16 with stochastic rounding and without it. One
line of JSON for each kind: the mean loss of the last 30 steps, and the bytes that the
state takes for an element.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import fuseopt

KINDS: dict[str, Any] = {
    "float32": None,
    "8bit": "8bit",
    "fp8-e4m3/256": "fp8-e4m3/256",
    "bf16-stochastic": "bf16-stochastic",
    "bf16": "bf16",
}
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "storage-losses.png"
TEXT = Path(__file__).parent.parent / "demo" / "data" / "pride_and_prejudice.txt"
#: Steps whose mean loss is compared.
LAST = 30
CONTEXT, BATCH = 64, 16


def batches(steps: int) -> tuple[list[torch.Tensor], int]:
    """The same batches at each call, and the number of characters that there are."""
    text = TEXT.read_text(encoding="utf-8")
    letters = sorted(set(text))
    number = {letter: k for k, letter in enumerate(letters)}
    tokens = torch.tensor([number[x] for x in text])
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator)
        found.append(torch.stack([tokens[s : s + CONTEXT] for s in starts.tolist()]))
    return found, len(letters)


def train(storage: Any, steps: int, width: int) -> tuple[list[float], float]:
    """The losses of one run, and the bytes of state for an element."""
    from transformers import GPT2Config, GPT2LMHeadModel

    data, letters = batches(steps)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=letters,
        n_positions=CONTEXT,
        n_embd=width,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.999))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1.0, (k + 1) / 20) * (1 - 0.9 * k / steps)
    )
    fuseopt.compile(optimizer, storage=storage)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        logits = model(batch).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    n = sum(p.numel() for p in model.parameters())
    state = [t for s in optimizer.state.values() for t in s.values()]
    size = sum(t.numel() * t.element_size() for t in state) / n
    return losses, size


def smooth(losses: list[float], over: int = 20) -> list[float]:
    """The mean of each loss and those before it."""
    spans = [losses[max(0, k + 1 - over) : k + 1] for k in range(len(losses))]
    return [sum(x) / len(x) for x in spans]


def draw(found: dict[str, tuple[list[float], float]], path: Path) -> None:
    """The picture: all losses, and beside them how far each lies from float32."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    base = smooth(next(iter(found.values()))[0])
    for kind, (losses, size) in found.items():
        mean = smooth(losses)
        left.plot(mean, label=f"{kind}: {size:.2f} bytes an element", linewidth=1.2)
        right.plot([a - b for a, b in zip(mean, base, strict=True)], linewidth=1.2)
    left.set(xlabel="step", ylabel="loss, mean of 20 steps", title="State of AdamW")
    right.set(xlabel="step", ylabel="loss - loss with float32", title="The difference")
    right.axhline(0, color="gray", linewidth=0.6)
    left.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train with each kind, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--picture", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    found = {}
    for kind in arguments.kinds:
        losses, size = train(KINDS[kind], arguments.steps, arguments.width)
        found[kind] = losses, size
        last = sum(losses[-LAST:]) / len(losses[-LAST:])
        row = {"kind": kind, "loss": round(last, 4), "bytes": round(size, 3)}
        print(json.dumps(row), flush=True)
    draw(found, arguments.picture)


if __name__ == "__main__":
    main()
