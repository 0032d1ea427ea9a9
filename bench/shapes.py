"""In: the name of a model. Out: its parameter shapes, and parameters to step."""

import json
from pathlib import Path

import torch
from torch import Tensor

SHAPES = Path(__file__).parent / "data" / "model_shapes.json"

Shape = tuple[int, ...]


def model_shapes(model: str) -> list[Shape]:
    """Return the shape of each parameter of a model, in the model's order."""
    runs = json.loads(SHAPES.read_text())[model]["shapes"]
    return [tuple(shape) for shape, times in runs for _ in range(times)]


def small_shapes(count: int) -> list[Shape]:
    """Return `count` shapes so small that their arithmetic takes no time."""
    return [(8,)] * count


def make_params(shapes: list[Shape]) -> list[Tensor]:
    """Return float32 parameters of these shapes, each with a gradient."""
    random = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=random) for shape in shapes]
    for param in params:
        param.requires_grad_()
        param.grad = torch.randn(param.shape, generator=random)
    return params


def elements(params: list[Tensor]) -> int:
    """Return the number of elements of all parameters."""
    return sum(param.numel() for param in params)
