"""Steps in the backward, beside a backward with the step after it."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fuseopt
from tests.cases.trainer import SIZES, quiet
from tests.tails.twins import same

WIDTH, TURNS = 6, 5


class Net(torch.nn.Module):
    """Layers, of which some may be left out, tied or computed again."""

    def __init__(self, layers: int, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        linears = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)]
        self.layers = torch.nn.ModuleList(linears)
        self.left_out: tuple[int, ...] = ()
        self.again = False
        if tied:
            linears[-1].weight = linears[0].weight

    def forward(self, x: Any) -> Any:
        for k, layer in enumerate(self.layers):
            if k in self.left_out:
                continue
            y = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            x = torch.tanh(y)
        return x.square().mean()


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.01)


def nesterov(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)


class Loop:
    """A model that is stepped in its backward (`fused`), or after it."""

    def __init__(
        self,
        fused: bool,
        lanes: int,
        tied: bool,
        make: Callable[[Any], Any] = adamw,
        buckets: Any = "layer",
    ) -> None:
        self.fused, self.net, self.make = fused, Net(lanes // 2, tied), make
        self.opt: Any = (
            fuseopt.in_backward(self.net, make, buckets=buckets)
            if fused
            else make(self.net.parameters())
        )
        #: what a scenario keeps
        self.kept: Any = None

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
        loop.net.layers[1].weight.requires_grad_(turn == 4)
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


def accumulated_until_a_step(loop: Loop, turn: int) -> None:
    with loop.opt.accumulate() if loop.fused else contextlib.nullcontext():
        loop.loss(turn).backward()
        loop.loss(turn, 1).backward()
    loop.opt.step()
    loop.opt.zero_grad()


def a_graph_that_is_used_twice(loop: Loop, turn: int) -> None:
    loss = loop.loss(turn)
    loss.backward(retain_graph=True)
    loop.end()
    loss.backward()  # torch's own error: the step has written what it needs
    loop.end()


def a_rate_that_a_scheduler_moves(loop: Loop, turn: int) -> None:
    if turn == 0:
        loop.kept = torch.optim.lr_scheduler.ExponentialLR(loop.opt, 0.5)
    step(loop, turn)
    loop.kept.step()


def state_for_a_plain_optimizer(loop: Loop, turn: int) -> None:
    step(loop, turn)
    if turn == 2:
        state = loop.opt.state_dict()
        if loop.fused:
            loop.opt.close()
        loop.opt = adamw(loop.net.parameters())
        loop.opt.load_state_dict(state)
        loop.fused = False


def hooks_that_clamp(loop: Loop, turn: int) -> None:
    for p in loop.net.parameters() if turn == 0 else ():
        p.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    step(loop, turn)


def some_gradients_that_were_there(loop: Loop, turn: int) -> None:
    loop.net.left_out = (0,) if turn == 2 else ()
    for p in [*loop.net.parameters()][:3] if turn == 2 else ():
        p.grad = torch.ones_like(p)
    step(loop, turn)


def a_module_with_another_parameter(loop: Loop, turn: int) -> None:
    """The optimizer steps the former one, which gets no gradient any more."""
    if turn == 2:
        loop.kept = loop.net.layers[1].weight
        loop.net.layers[1].weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH))
    step(loop, turn)
    if turn >= 2:
        loop.net.layers[1].weight.grad = None
        assert loop.kept.grad is None


def a_group_that_is_added(loop: Loop, turn: int) -> None:
    if turn == 2:
        loop.kept = torch.nn.Parameter(torch.ones(WIDTH))
        loop.opt.add_param_group({"params": [loop.kept], "lr": 0.5})
    beside = (loop.kept * loop.kept).sum() if turn >= 2 else 0
    (loop.loss(turn) + beside).backward()
    loop.end()
    if turn >= 2:
        loop.opt.param_groups[0]["seen"] = loop.kept.tolist()


def a_step_that_a_user_calls(loop: Loop, turn: int) -> None:
    loop.loss(turn).backward()
    loop.opt.step()
    loop.opt.zero_grad()


def a_closure(loop: Loop, turn: int) -> None:
    def closure() -> Any:
        loop.opt.zero_grad()
        loss = loop.loss(turn)
        loss.backward()
        return loss

    loop.opt.step(closure)
    loop.opt.zero_grad()


def in_a_thread(loop: Loop, turn: int) -> None:
    errors = []

    def run() -> None:
        try:
            step(loop, turn)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors


def without_recording(loop: Loop, turn: int) -> None:
    loss = loop.loss(turn)
    with torch.no_grad():
        loss.backward()
    loop.end()


def an_evaluation_before(loop: Loop, turn: int) -> None:
    with torch.inference_mode():
        loop.loss(turn, 5)
    step(loop, turn)


def anomalies_detected(loop: Loop, turn: int) -> None:
    with torch.autograd.set_detect_anomaly(True):
        loop.loss(turn).backward()
    loop.end()


def a_compiled_model(loop: Loop, turn: int) -> None:
    if turn == 0:
        loop.net.compile(backend="eager")
    step(loop, turn)


def a_loss_that_is_not_a_number(loop: Loop, turn: int) -> None:
    (loop.loss(turn) * (float("nan") if turn == 3 else 1)).backward()
    loop.end()


def another_optimizer_of_some(loop: Loop, turn: int) -> None:
    if turn == 0:
        loop.kept = torch.optim.SGD([*loop.net.parameters()][:2], lr=0.0)
    step(loop, turn)
    loop.kept.step()


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
    accumulated_until_a_step,
    a_graph_that_is_used_twice,
    a_rate_that_a_scheduler_moves,
    state_for_a_plain_optimizer,
    hooks_that_clamp,
    some_gradients_that_were_there,
    a_module_with_another_parameter,
    a_group_that_is_added,
    a_step_that_a_user_calls,
    a_closure,
    in_a_thread,
    without_recording,
    an_evaluation_before,
    anomalies_detected,
    a_compiled_model,
    a_loss_that_is_not_a_number,
    another_optimizer_of_some,
]

OTHER_SETUPS: dict[str, dict[str, Any]] = {
    "nesterov": {"make": nesterov},
    "small buckets": {"buckets": 300},
}


def beside(turn: Turn, lanes: int, **setup: Any) -> None:
    """Both loops, compared after each turn; an error is to come in both."""
    with quiet(), contextlib.ExitStack() as after:
        torch._dynamo.reset()
        loops = [Loop(fused, lanes, **setup) for fused in (False, True)]
        after.callback(lambda: loops[1].fused and loops[1].opt.close())
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
            groups = [
                [{k: v for k, v in group.items() if k != "params"} for group in groups]
                for groups in (loop.opt.param_groups for loop in loops)
            ]
            assert groups[0] == groups[1], t


@pytest.mark.family(160)
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("turn", CASES, ids=lambda f: f.__name__)
def test_a_backward_that_steps(turn: Turn, tied: bool, lanes: int) -> None:
    beside(turn, lanes, tied=tied)


@pytest.mark.family(8)
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("name", OTHER_SETUPS)
def test_a_backward_that_steps_otherwise(name: str, lanes: int) -> None:
    beside(layers_left_out, lanes, tied=False, **OTHER_SETUPS[name])
