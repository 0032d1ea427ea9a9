"""The loop of small GPT trainings: decay for matrices alone, a rate that warms up and
falls as a cosine, micro-batches, a clip by the total norm, checkpoints of a dict.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.wild.trained import STEPS, Compile, Trained, seed_all, tensors_of

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 32, 16, 32, 2, 3
BATCH, MICRO_BATCHES = 4, 2
HIGHEST, LOWEST, WARM_UP = 1e-2, 1e-3, 5


class Block(nn.Module):
    """Attention to what came before, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.attention(self.norms[0](x)).split(WIDTH, dim=2)
        q, k, v = (h.view(batch, length, HEADS, -1).transpose(1, 2) for h in heads)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(x.shape))
        return x + self.perceptron(self.norms[1](x))


class GPT(nn.Module):
    """Token ids -> logits; the embedding is the last matrix too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def rate_of(step: int) -> float:
    """The learning rate of a step: it rises in a line, then falls as a cosine."""
    if step < WARM_UP:
        return HIGHEST * (step + 1) / WARM_UP
    share = (step - WARM_UP) / (STEPS - WARM_UP)
    return LOWEST + 0.5 * (1 + math.cos(math.pi * share)) * (HIGHEST - LOWEST)


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    """Token ids and those that follow them: each is the sum of the two before it."""
    random = torch.Generator().manual_seed(number)
    ids = [torch.randint(VOCABULARY, (BATCH,), generator=random) for _ in range(2)]
    while len(ids) <= CONTEXT:
        ids.append((ids[-1] + ids[-2]) % VOCABULARY)
    rows = torch.stack(ids, dim=1)
    return rows[:, :-1], rows[:, 1:]


class Loop:
    """A model, its optimizer, and how far they are."""

    def __init__(self, compile: Compile) -> None:
        seed_all()
        self.model = GPT()
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=HIGHEST, betas=(0.9, 0.95))
        self.optimizer = compile(optimizer)
        self.step = 0

    def train_until(self, last: int) -> None:
        """Take steps until so many are done."""
        while self.step < last:
            for group in self.optimizer.param_groups:
                group["lr"] = rate_of(self.step)
            for micro in range(MICRO_BATCHES):
                ids, following = batch_of(MICRO_BATCHES * self.step + micro)
                logits = self.model(ids).flatten(0, 1)
                loss = functional.cross_entropy(logits, following.flatten())
                (loss / MICRO_BATCHES).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        checkpoint = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        torch.save(checkpoint, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        checkpoint = torch.load(path)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.step = checkpoint["step"]

    def trained(self) -> Trained:
        return Trained(tensors_of(self.model), [self.optimizer])


def train(compile: Compile) -> Trained:
    """Train from the first step to the last."""
    loop = Loop(compile)
    loop.train_until(STEPS)
    return loop.trained()


def resume(compile: Compile, folder: Path) -> Trained:
    """The same in two loops."""
    first = Loop(compile)
    first.train_until(STEPS // 2)
    first.save(folder / "checkpoint.pt")
    second = Loop(compile)
    second.load(folder / "checkpoint.pt")
    second.train_until(STEPS)
    return second.trained()
