"""In: the name of a model. Out: its parameter shapes; parameters with gradients.

A name says where the shapes come from:

    resnet50              a profile of data/model_shapes.json
    transformers:gpt2     the library's own model, built from its default configuration
    timm:resnet50         the same of timm; neither downloads anything
    300x8                 300 tensors of 8 elements: all cost is cost per tensor
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROFILES = Path(__file__).parent / "data" / "model_shapes.json"
SMALL = re.compile(r"(\d+)x(\d+)")

Shape = tuple[int, ...]


class ModelMissing(Exception):
    """No such profile, or the model's library is not installed. The message says."""


@functools.cache
def profiles() -> dict[str, Any]:
    """Return all profiles: `suite`, `params`, `elements` and `shapes` by name."""
    return json.loads(PROFILES.read_text())


def model_shapes(name: str) -> list[Shape]:
    """Return the shape of each parameter, in the model's order. Raises ModelMissing."""
    if small := SMALL.fullmatch(name):
        return [(int(small[2]),)] * int(small[1])
    if ":" in name:
        return [tuple(p.shape) for p in build(name, "meta").parameters()]
    if name not in profiles():
        raise ModelMissing(f"{name!r} is no profile of {PROFILES.name}")
    runs = profiles()[name]["shapes"]
    return [tuple(shape) for shape, times in runs for _ in range(times)]


def build(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, **config: Any
) -> torch.nn.Module:
    """Build `library:model` with random weights. Raises ModelMissing.

    `config`: values of a transformers configuration that differ from its defaults, or
    arguments of timm's `create_model`.
    """
    library, _, model = name.partition(":")
    try:
        module = __import__(library)
    except ImportError as error:
        raise ModelMissing(f"{library} is not installed") from error
    with torch.device(device):
        if library == "timm":
            made = module.create_model(model, pretrained=False, **config)
        else:
            settings = module.AutoConfig.for_model(model, **config)
            made = module.AutoModel.from_config(settings)
    return made.to(dtype)


def make_params(
    shapes: Sequence[Shape],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> list[Tensor]:
    """Return parameters of these shapes, each a leaf with a gradient of its own."""
    try:
        random = torch.Generator(device)
    except NotImplementedError:
        # no generator of its own: the simulated accelerator
        random = torch.Generator()
    random.manual_seed(seed)

    def drawn(shape: Shape) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=random.device)
        return made.normal_(generator=random).to(device)

    params = [drawn(shape).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = drawn(tuple(param.shape))
    return params


def elements(shapes: Sequence[Shape]) -> int:
    """Return the number of elements of all shapes."""
    total = 0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total
