"""In: a model. Out: what whole training steps take, and the optimizer's share of them.

A step is forward, backward, and the tail: clip by the total norm, step, zero_grad. The
ways differ in the optimizer alone, on copies of one model; with `whole`, two more
compile forward, backward and tail as one function, where fuseopt hands the model's part
to Inductor.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.contenders import Unavailable, at_most, cold_caches
from bench.interleave import finish_gpu
from bench.models import build
from bench.results import Figures

ROUNDS = 7
WARM_UP = 2
CLIP = 1.0


class ConvNet(nn.Module):
    """Three stages of residual blocks, in torch alone."""

    def __init__(self, width: int = 64, blocks: int = 3, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        stages = []
        for stage in range(3):
            wide = width * 2**stage
            stages += [_Block(wide) for _ in range(blocks)]
            if stage < 2:
                stages.append(nn.Conv2d(wide, 2 * wide, 3, stride=2, padding=1))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(width * 4, classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the classes' scores of images (n, 3, h, w)."""
        return self.head(self.stages(self.stem(pixel_values)).mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


@dataclass(frozen=True)
class Trained:
    """A model to train: how it is built, and its input."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]


def _text(name: str, **config: Any) -> Trained:
    """A model over text: 4 pieces of 64 tokens, of a vocabulary of 8,000."""
    return Trained(
        lambda: build(f"transformers:{name}", vocab_size=8000, **config),
        lambda: {"input_ids": torch.randint(8000, (4, 64))},
    )


def _images(make: Callable[[], nn.Module], size: int) -> Trained:
    """A model over images: 4 of them."""
    return Trained(make, lambda: {"pixel_values": torch.randn(4, 3, size, size)})


MODELS: dict[str, Trained] = {
    "bert": _text(
        "bert",
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
    ),
    "convnet": _images(ConvNet, 32),
    "gpt2": _text("gpt2", n_embd=384, n_layer=6, n_head=6, use_cache=False),
    "llama": _text(
        "llama",
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1024,
        use_cache=False,
    ),
    "vit": _images(
        lambda: build(
            "transformers:vit",
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=6,
            intermediate_size=1536,
            image_size=96,
        ),
        96,
    ),
    "resnet": _images(
        lambda: build(
            "transformers:resnet",
            depths=[2, 2, 2, 2],
            layer_type="basic",
            hidden_sizes=[64, 128, 256, 512],
        ),
        96,
    ),
}


class Way:
    """A copy of a model with an optimizer of its own; `train` does one step."""

    def __init__(
        self, model: nn.Module, inputs: dict[str, Tensor], **flags: Any
    ) -> None:
        self.model = copy.deepcopy(model).train()
        self.inputs = inputs
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4, **flags)
        self.step: Callable[[], Any] = self.optimizer.step
        self.tails: list[float] = []
        self.totals: list[float] = []
        self.figures: Figures = {}
        self.whole: Callable[[], Any] | None = None

    def forward_backward(self) -> None:
        """Compute the loss and all gradients."""
        made = self.model(**self.inputs)
        scores = made if isinstance(made, Tensor) else made.last_hidden_state
        scores.square().mean().backward()

    def tail(self) -> None:
        """Clip, step, forget the gradients."""
        nn.utils.clip_grad_norm_(self.params, CLIP)
        self.step()
        self.optimizer.zero_grad()

    def train(self) -> None:
        """Do one step and keep its seconds; those of the tail where it stands alone."""
        finish_gpu()
        begin = time.perf_counter()
        if self.whole is not None:
            self.whole()
        else:
            self.forward_backward()
            finish_gpu()
            middle = time.perf_counter()
            self.tail()
        finish_gpu()
        end = time.perf_counter()
        self.totals.append(end - begin)
        if self.whole is None:
            self.tails.append(end - middle)

    def forget(self) -> None:
        """Drop the seconds of warming up."""
        self.tails.clear()
        self.totals.clear()

    def result(self) -> Figures:
        """Return medians: seconds of a step; of its tail and its share where known."""
        found = {**self.figures, "p50": statistics.median(self.totals)}
        found["rounds"] = len(self.totals)
        if self.tails:
            found["tail_seconds"] = statistics.median(self.tails)
            found["tail_share"] = found["tail_seconds"] / found["p50"]
        return found


class TrainingRun:
    """All ways to train a model, ready to take turns.

    whole: also compile the whole step as one function. cap: seconds for each to get
    ready.
    """

    def __init__(self, name: str, whole: bool, device: str, cap: float) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        trained = MODELS[name]
        self.model = trained.build().to(device)
        self.inputs = {k: v.to(device) for k, v in trained.inputs().items()}
        self.ways: dict[str, Way] = {}
        self.skipped: Figures = {}
        makers = [_foreach, _fused, _inductor, _fuseopt]
        if whole:
            makers += [_whole_inductor, _whole_fuseopt]
        else:
            for late in (_whole_inductor, _whole_fuseopt):
                why = "the short suite does not compile models"
                self.skipped[_label(late)] = {"skipped": why}
        for make in makers:
            self._add(make, cap)

    def _add(self, make: Callable[[Way], None], cap: float) -> None:
        flags = {"fused": True} if make is _fused else {"foreach": True}
        way = Way(self.model, self.inputs, **flags)
        begin = time.perf_counter()
        try:
            with at_most(cap), cold_caches():
                make(way)
                for _ in range(WARM_UP):
                    way.train()
        except Unavailable as error:
            self.skipped[_label(make)] = {"skipped": str(error)}
            return
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            self.skipped[_label(make)] = {"skipped": why}
            return
        way.figures["ready_seconds"] = time.perf_counter() - begin
        way.forget()
        self.ways[_label(make)] = way

    def round(self, turn: int) -> None:
        """Let each way do one step."""
        names = list(self.ways)
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            self.ways[name].train()

    def result(self) -> Figures:
        """Return the case's entry of the results file."""
        params = list(self.model.parameters())
        return {
            "tensors": len(params),
            "elements": sum(p.numel() for p in params),
            "contenders": self.skipped
            | {name: way.result() for name, way in self.ways.items()},
        }


def _label(make: Callable[[Way], None]) -> str:
    return make.__name__.strip("_").replace("_", "-")


def _foreach(way: Way) -> None:
    pass


def _fused(way: Way) -> None:
    pass


def _inductor(way: Way) -> None:
    way.step = torch.compile(way.step)


def _fuseopt(way: Way) -> None:
    import fuseopt

    way.step = fuseopt.compile(way.optimizer).step


def _whole_inductor(way: Way) -> None:
    way.whole = torch.compile(_train_step(way))


def _whole_fuseopt(way: Way) -> None:
    way.whole = torch.compile(_train_step(way), backend="fuseopt")


def _train_step(way: Way) -> Callable[[], None]:
    model, inputs, params, optimizer = way.model, way.inputs, way.params, way.optimizer

    def train_step() -> None:
        made = model(**inputs)
        scores = made if isinstance(made, Tensor) else made.last_hidden_state
        scores.square().mean().backward()
        nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return train_step
