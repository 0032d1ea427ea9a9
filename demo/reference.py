"""In: the name of a torch optimizer. Out: what a compiled step is held against.

`eager_optimizer` is the reference: the same optimizer, foreach, run by eager.
`first_difference` says where two runs stop being the same bits.
"""

import inspect
from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Integers of a tensor's item size: as integers, -0.0 is not 0.0 and a nan is itself.
BITS_OF_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def accepts(name: str, argument: str) -> bool:
    """Return whether the torch optimizer of this name takes this argument."""
    return argument in inspect.signature(getattr(torch.optim, name)).parameters


def make_optimizer(
    name: str, params: Iterable[Tensor], lr: float, **flags: bool
) -> torch.optim.Optimizer:
    """Return a torch optimizer with the demo's hyperparameters and these flags."""
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(params, lr=lr, **momentum, **flags)


def eager_optimizer(
    name: str, params: Iterable[Tensor], lr: float
) -> torch.optim.Optimizer:
    """Return the optimizer whose eager steps the compiled ones must equal."""
    return make_optimizer(name, params, lr, foreach=True)


def first_difference(
    named_params: Iterable[tuple[str, nn.Parameter]],
    expected: torch.optim.Optimizer,
    actual_params: Iterable[nn.Parameter],
    actual: torch.optim.Optimizer,
) -> str | None:
    """Return the first tensor whose bits differ, in words; None when there is none.

    The parameters of the two runs are compared in order, each with its state.
    """
    for (name, want), got in zip(named_params, actual_params, strict=True):
        if words := difference(name, want, got):
            return words
        want_state, got_state = expected.state[want], actual.state[got]
        if want_state.keys() != got_state.keys():
            return f"state of {name}: {[*want_state]} in eager, {[*got_state]} compiled"
        for key, value in want_state.items():
            if words := difference(f"{key} of {name}", value, got_state[key]):
                return words
    return None


def difference(name: str, want: object, got: object) -> str | None:
    """Return where two tensors, or two other values, differ; None when nowhere."""
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return None if want == got else f"{name}: {want} in eager, {got} compiled"
    want, got = want.detach(), got.detach().to(want.device)
    if (want.dtype, want.shape) != (got.dtype, got.shape):
        return (
            f"{name}: {want.dtype} {[*want.shape]} in eager, "
            f"{got.dtype} {[*got.shape]} compiled"
        )
    if torch.equal(bits(want), bits(got)):
        return None
    differs = (bits(want) != bits(got)).flatten()
    index = int(differs.nonzero()[0])
    return (
        f"{name}: {int(differs.sum())} of {differs.numel()} elements; at {index} "
        f"{want.flatten()[index].item()!r} in eager, "
        f"{got.flatten()[index].item()!r} compiled"
    )


def bits(tensor: Tensor) -> Tensor:
    """Return the same memory as integers."""
    return tensor.view(BITS_OF_ITEMSIZE[tensor.element_size()])


def tensors_held(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return how many parameters an optimizer has, and how many state tensors."""
    params = sum(len(group["params"]) for group in optimizer.param_groups)
    state = sum(
        isinstance(value, Tensor)
        for values in optimizer.state.values()
        for value in values.values()
    )
    return params, state
