"""Steps in the backward, beside a backward with the step after it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fuseopt
from tests.tails.twins import same

WIDTH, LAYERS, TURNS = 6, 6, 5


class Net(torch.nn.Module):
    """Layers, of which some may be left out, tied or computed again."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(layers)
        self.left_out: tuple[int, ...] = ()
        self.again = False
        if tied:
            layers[4].weight = layers[1].weight

    def forward(self, x: Any) -> Any:
        for k, layer in enumerate(self.layers):
            if k in self.left_out:
                continue
            y = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            x = torch.tanh(y)
        return x.square().mean()


class Loop:
    """A model that is stepped in its backward (`fused`), or after it."""

    def __init__(self, fused: bool, tied: bool) -> None:
        self.fused, self.net = fused, Net(tied)
        self.opt: Any = (
            fuseopt.in_backward(self.net, self.make, buckets="layer")
            if fused
            else self.make(self.net.parameters())
        )

    def make(self, params: Any) -> Any:
        return torch.optim.AdamW(params, lr=0.01)

    def loss(self, turn: int, part: int = 0) -> Any:
        draw = torch.Generator().manual_seed(10 * turn + part)
        return self.net(torch.randn(4, WIDTH, generator=draw))

    def end(self) -> None:
        if not self.fused:
            self.opt.step()
            self.opt.zero_grad()

    def held(self) -> list[Any]:
        params = [*self.net.parameters()]
        state = [x for p in params for x in self.opt.state.get(p, {}).values()]
        return [*params, *(p.grad for p in params), *state]


Turn = Callable[[Loop, int], None]


def step(loop: Loop, turn: int) -> None:
    loop.loss(turn).backward()
    loop.end()


def layers_left_out(loop: Loop, turn: int) -> None:
    loop.net.left_out = (turn, turn + 2)
    step(loop, turn)


def computed_again(loop: Loop, turn: int) -> None:
    loop.net.again = True
    step(loop, turn)


def frozen_and_back(loop: Loop, turn: int) -> None:
    if turn in (2, 4):
        loop.net.layers[3].weight.requires_grad_(turn == 4)
    step(loop, turn)


def biases_alone(loop: Loop, turn: int) -> None:
    for layer in loop.net.layers:
        layer.weight.requires_grad_(turn % 2 == 0)
    step(loop, turn)


def accumulated(loop: Loop, turn: int) -> None:
    with loop.opt.accumulate() if loop.fused else contextlib.nullcontext():
        loop.loss(turn).backward()
        loop.loss(turn, 1).backward()
    loop.loss(turn, 2).backward()
    loop.end()


def an_error_while_accumulated(loop: Loop, turn: int) -> None:
    within = loop.opt.accumulate() if loop.fused else contextlib.nullcontext()
    with contextlib.suppress(ZeroDivisionError), within:
        loop.loss(turn).backward()
        raise ZeroDivisionError
    loop.loss(turn, 2).backward()
    loop.end()


def a_graph_that_is_kept(loop: Loop, turn: int) -> None:
    loop.loss(turn).backward(retain_graph=True)
    loop.end()


def two_losses(loop: Loop, turn: int) -> None:
    (loop.loss(turn) + loop.loss(turn, 1)).backward()
    loop.end()


def gradients_of_some_before(loop: Loop, turn: int) -> None:
    torch.autograd.grad(loop.loss(turn), [*loop.net.parameters()][:3])
    step(loop, turn)


def some_inputs(loop: Loop, turn: int) -> None:
    some = [*loop.net.parameters()][:5] if turn % 2 else None
    loop.loss(turn).backward(inputs=some)
    loop.end()


def gradients_that_were_there(loop: Loop, turn: int) -> None:
    if turn == 2:
        for p in loop.net.parameters():
            p.grad = torch.ones_like(p)
    step(loop, turn)


def memory_of_parameters(loop: Loop, turn: int) -> None:
    if turn == 2:
        for p in [*loop.net.parameters()][::3]:
            p.data = p.data * 0.5
    step(loop, turn)


def state_that_is_loaded(loop: Loop, turn: int) -> None:
    step(loop, turn)
    if turn == 2:
        loop.opt.load_state_dict(copy.deepcopy(loop.opt.state_dict()))


def a_layer_used_three_times(loop: Loop, turn: int) -> None:
    x = torch.ones(4, WIDTH)
    for _ in range(3):
        x = loop.net.layers[0](x)
    (x.square().mean() + loop.loss(turn)).backward()
    loop.end()


def weights_read_late(loop: Loop, turn: int) -> None:
    beside = sum(p.square().sum() for p in loop.net.parameters())
    (loop.loss(turn) + beside * 0.01).backward()
    loop.end()


def a_weight_in_the_gradient_of_another(loop: Loop, turn: int) -> None:
    first, last = loop.net.layers[0].weight, loop.net.layers[-1].weight
    (loop.loss(turn) + (first @ last).sum() * 0.1 + (last * last).mean()).backward()
    loop.end()


def closed_and_made_again(loop: Loop, turn: int) -> None:
    if turn == 2 and loop.fused:
        kept = loop.opt.state_dict()
        loop.opt.close()
        loop.opt = fuseopt.in_backward(loop.net, loop.make, buckets="layer")
        loop.opt.load_state_dict(kept)
    step(loop, turn)


def a_rate_of_a_scheduler(loop: Loop, turn: int) -> None:
    loop.opt.param_groups[0]["lr"] = 0.01 * 0.5**turn
    step(loop, turn)


CASES: list[Turn] = [
    step,
    layers_left_out,
    computed_again,
    frozen_and_back,
    biases_alone,
    accumulated,
    an_error_while_accumulated,
    a_graph_that_is_kept,
    two_losses,
    gradients_of_some_before,
    some_inputs,
    gradients_that_were_there,
    memory_of_parameters,
    state_that_is_loaded,
    a_layer_used_three_times,
    weights_read_late,
    a_weight_in_the_gradient_of_another,
    closed_and_made_again,
    a_rate_of_a_scheduler,
]


@pytest.mark.family(40)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("turn", CASES, ids=lambda f: f.__name__)
def test_a_backward_that_steps(turn: Turn, tied: bool) -> None:
    loops = Loop(False, tied), Loop(True, tied)
    try:
        for t in range(TURNS):
            raised = []
            for loop in loops:
                try:
                    turn(loop, t)
                    raised.append(None)
                except RuntimeError as error:
                    raised.append(type(error))
            assert raised[0] is raised[1], t
            for one, other in zip(*(x.held() for x in loops), strict=True):
                assert (one is None and other is None) or same(one, other), t
    finally:
        loops[1].opt.close()
