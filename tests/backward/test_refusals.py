"""What is refused, with nothing written; hooks, threads, and what is left behind."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import fuseopt
from fuseopt.errors import CaptureError, ConfigError, NotAnOptimizer, UnsupportedInput
from tests.backward.pairs import Pair, model
from tests.steps import same_bits


def adamw(params: Any) -> Optimizer:
    return AdamW(params, 1e-2)


def momentum(params: Any) -> Optimizer:
    return SGD(params, 1e-2, momentum=0.9)


class Plain(Optimizer):
    """Steps of the gradient; others do more."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.calls = 0

    def given(self) -> list[Any]:
        every = [p for group in self.param_groups for p in group["params"]]
        return [p for p in every if p.grad is not None]


class TotalNorm(Plain):
    @torch.no_grad()
    def step(self) -> None:
        params = [p for g in self.param_groups for p in g["params"]]
        params = [p for p in params if p.grad is not None]
        norms = torch._foreach_norm([p.grad for p in params])
        norm = torch.linalg.vector_norm(torch.stack(norms))
        for p in params:
            p.sub_(p.grad / norm)


class SumOfNumbers(Plain):
    @torch.no_grad()
    def step(self) -> None:
        total = 0.0
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    total += float(p.grad.norm())
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=g["lr"] / (1 + total))


class Counts(Plain):
    @torch.no_grad()
    def step(self) -> None:
        self.calls += 1
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=g["lr"] / self.calls)


class CountsInGroup(Plain):
    @torch.no_grad()
    def step(self) -> None:
        for g in self.param_groups:
            g["k"] = g.get("k", 0) + 1
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=g["lr"] / g["k"])


class CountsInTensor(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.k = torch.zeros(())

    @torch.no_grad()
    def step(self) -> None:
        self.k += 1
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / self.k)


class AnyVector(Plain):
    """Is any parameter a vector?"""

    @torch.no_grad()
    def step(self) -> None:
        found = False
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    found |= p.dim() == 1
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.2 if found else 0.1)


class AnyLarge(Plain):
    """Is any parameter large?"""

    @torch.no_grad()
    def step(self) -> None:
        found = False
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    found |= p.shape[0] > 6 if p.dim() else False
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.2 if found else 0.1)


class OtherGroup(Plain):
    """Has any parameter of the first group a gradient?"""

    @torch.no_grad()
    def step(self) -> None:
        found = any(p.grad is not None for p in self.param_groups[0]["params"])
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.2 if found else 0.1)


class ShrinksOthers(Plain):
    """Those without a gradient as well."""

    @torch.no_grad()
    def step(self) -> None:
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    p.mul_(0.9)
                else:
                    p.sub_(p.grad, alpha=0.1)


class FirstOfAll(Plain):
    """Has any parameter a state?"""

    @torch.no_grad()
    def step(self) -> None:
        first = len(self.state) == 0
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    self.state[p]["last"] = p.grad.clone()
                    p.sub_(p.grad, alpha=0.1 if first else 0.2)


class AnyMissing(Plain):
    """Has any parameter no gradient?"""

    @torch.no_grad()
    def step(self) -> None:
        missing = False
        for g in self.param_groups:
            for p in g["params"]:
                missing |= p.grad is None
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.2 if missing else 0.1)


class VectorAndNumber(Plain):
    """Two kinds have to be there for a third one to be treated in another way."""

    @torch.no_grad()
    def step(self) -> None:
        vector = number = matrix = False
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    vector |= p.dim() == 1
                    number |= p.dim() == 0
                    matrix |= p.dim() == 2
        odd = vector and number and not matrix
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.2 if odd else 0.1)


class Position(Plain):
    @torch.no_grad()
    def step(self) -> None:
        for g in self.param_groups:
            for i, p in enumerate(g["params"]):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1 / (i + 1))


class HowMany(Plain):
    @torch.no_grad()
    def step(self) -> None:
        for g in self.param_groups:
            n = sum(1 for p in g["params"] if p.grad is not None)
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1 / n)


class Noise(Plain):
    @torch.no_grad()
    def step(self) -> None:
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + torch.randn_like(p))


class OfFirst(Plain):
    """The state of the first parameter is everybody's."""

    @torch.no_grad()
    def step(self) -> None:
        for g in self.param_groups:
            first = self.state[g["params"][0]]
            first["k"] = first.get("k", 0) + 1
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1 / first["k"])


class InTheEnd(Plain):
    """Sees others from the third step on alone."""

    @torch.no_grad()
    def step(self) -> None:
        if self.param_groups[0]["lr"] > 0.05:
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=g["lr"])
        else:
            params = [p for g in self.param_groups for p in g["params"]]
            params = [p for p in params if p.grad is not None]
            total = torch.stack([p.grad.norm() for p in params]).sum()
            for p in params:
                p.sub_(p.grad / total)


TRAPS = [
    *(OtherGroup, ShrinksOthers, AnyLarge, AnyVector, AnyMissing, VectorAndNumber),
    *(TotalNorm, SumOfNumbers, HowMany, Position, OfFirst, InTheEnd),
    *(Counts, CountsInGroup, CountsInTensor, Noise),
]


@pytest.mark.family(5)
@pytest.mark.parametrize("trap", TRAPS)
def test_optimizers_that_see_more_than_a_parameter(trap: Any) -> None:
    net = model(2)
    net.append(torch.nn.Linear(6, 7))
    params = [*net.parameters()]
    with pytest.raises(UnsupportedInput, match="bucket by bucket"):
        fuseopt.in_backward([{"params": params[:5]}, {"params": params[5:]}], trap)
    # and nothing is left of it
    net(torch.randn(3, 6)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_what_is_seen_of_others_when_they_have_state() -> None:
    """All begin at once, which is as in eager; then some begin late."""

    def of() -> Any:
        made = model(3)
        made[0].requires_grad_(False)
        return made

    pair = Pair(FirstOfAll, of=of)
    pair.step()
    before = [p.detach().clone() for p in pair.mine.parameters()]
    with pytest.raises(UnsupportedInput, match="depends on other parameters"):
        pair.backward()
    for p, q in zip(before, pair.mine.parameters(), strict=True):
        assert same_bits(q.detach(), p)


def test_the_class_of_an_optimizer_changes_later() -> None:
    """What was shown of a step is shown again where its code is another."""

    class Changing(Plain):
        @torch.no_grad()
        def step(self) -> None:
            self.calls  # noqa: B018
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=rate(g))

    def rate(group: Any) -> Any:
        return group["lr"]

    pair = Pair(Changing)
    for _ in range(2):
        pair.step()
    before = [p.detach().clone() for p in pair.mine.parameters()]

    def counted(group: Any) -> Any:
        group["k"] = group.get("k", 0) + 1
        return group["lr"] / group["k"]

    rate.__code__ = counted.__code__
    with pytest.raises(UnsupportedInput):
        pair.backward()
    for p, q in zip(before, pair.mine.parameters(), strict=True):
        assert same_bits(q.detach(), p)


@pytest.mark.parametrize(
    ("buckets", "error"),
    [
        (0, ConfigError),
        (True, ConfigError),
        ("layers", ConfigError),
        (1.5, ConfigError),
        (lambda ps: ps, ConfigError),
        (lambda ps: [ps, ps[:1]], UnsupportedInput),
        (lambda ps: [[ps[0], *ps]], UnsupportedInput),
        (lambda ps: [ps[1:]], UnsupportedInput),
        (lambda ps: [[*ps, torch.nn.Parameter(torch.ones(2))]], UnsupportedInput),
    ],
)
def test_buckets(buckets: Any, error: Any) -> None:
    net = model(1)
    if callable(buckets):
        buckets = buckets([*net.parameters()])
    with pytest.raises(error):
        fuseopt.in_backward(net, adamw, buckets=buckets)


def test_what_is_no_optimizer_and_no_model() -> None:
    net = model(1)
    with pytest.raises(NotAnOptimizer):
        fuseopt.in_backward(net, lambda params: params)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError):
        fuseopt.in_backward([*net.parameters()], adamw, buckets="layer")
    with pytest.raises(ConfigError):
        fuseopt.in_backward(net, adamw, what=1)
    with pytest.raises(ValueError, match="non-leaf"):
        fuseopt.in_backward([torch.ones(2, requires_grad=True) * 2], adamw)
    handle = fuseopt.in_backward(net, adamw)
    with pytest.raises(NotAnOptimizer):
        fuseopt.in_backward(net, lambda _: handle)
    with pytest.raises(UnsupportedInput):
        fuseopt.compile(handle)
    with pytest.raises(TypeError):
        handle.__reduce__()


def test_a_backward_within_a_backward() -> None:
    pair = Pair(adamw)
    pair.step()
    forward = pair.mine[1].forward
    pair.mine[1].forward = lambda x: checkpoint(forward, x, use_reentrant=True)
    before = [p.detach().clone() for p in pair.mine.parameters()]
    with pytest.raises(UnsupportedInput, match="use_reentrant=False"):
        pair.mine(pair.input()).sum().backward()
    # the blocks behind it were stepped, its own and those before it were not
    same = [
        same_bits(p.detach(), q)
        for p, q in zip(pair.mine.parameters(), before, strict=True)
    ]
    assert same == [True] * 10 + [False] * 10


def test_a_grad_scaler() -> None:
    net = model(1)
    handle = fuseopt.in_backward(net, adamw)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(torch.randn(3, 6)).sum()).backward()
    with pytest.raises(UnsupportedInput, match="GradScaler"):
        scaler.step(handle)


def test_hooks_of_the_step() -> None:
    net = model(1)
    handle = fuseopt.in_backward(net, adamw)
    for register in (handle.register_step_pre_hook, handle.register_step_post_hook):
        with pytest.raises(UnsupportedInput):
            register(lambda *_: None)
    hook = handle.optimizer.register_step_post_hook(lambda *_: None)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(UnsupportedInput):
        net(torch.randn(3, 6)).sum().backward()
    assert all(map(same_bits, (p.detach() for p in net.parameters()), before))
    hook.remove()
    net(torch.randn(3, 6)).sum().backward()
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_that_no_bucket_takes(sparse: bool) -> None:
    net = torch.nn.Embedding(4, 3, sparse=sparse)
    handle = fuseopt.in_backward(net, momentum)
    before = net.weight.detach().clone()
    with pytest.raises(UnsupportedInput):
        net(torch.tensor([1, 2])).square().sum().backward(create_graph=not sparse)
    assert same_bits(net.weight.detach(), before)
    assert not handle.state


def test_a_parameter_that_is_read_after_its_step() -> None:
    """Autograd sees that it was changed, and torch raises."""
    a, b = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    handle = fuseopt.in_backward([a, b], momentum, buckets=1)
    x = a * b.detach()  # keeps b, of which it has no gradient
    with pytest.raises(RuntimeError, match="inplace"):
        (x * x + b).sum().backward()
    handle.close()


@pytest.mark.slow
def test_where_nothing_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eager, with its bits, and the user is told; or an error, if that is wished."""
    monkeypatch.setenv("CXX", "/nowhere/c++")
    pair = Pair(adamw)
    with pytest.warns(RuntimeWarning, match="runs in eager"):
        pair.step()
    for _ in range(2):
        pair.step()
    assert {bool(r.fallback) for r in fuseopt.reports()} == {True}
    net = model(1)
    handle = fuseopt.in_backward(net, adamw, fallback="error")
    with pytest.raises(CaptureError, match="fallback"):
        net(torch.randn(3, 6)).sum().backward()
    assert not handle.state
    with pytest.raises(UnsupportedInput, match="verify"):
        fuseopt.in_backward(model(1), adamw, verify=True)


def test_two_for_one_parameter() -> None:
    net = model(2)
    first = fuseopt.in_backward(net[0], adamw)
    with pytest.raises(UnsupportedInput, match="another"):
        fuseopt.in_backward(net, adamw)
    first.close()
    second = fuseopt.in_backward(net, adamw)
    net(torch.randn(3, 6)).sum().backward()
    assert all(p.grad is None for p in net.parameters())
    assert second.state
    assert not first.state


@pytest.mark.slow
def test_a_group_that_is_refused_is_not_added() -> None:
    """It stayed in the optimizer, which then refused each backward."""
    net, other = model(1), model(1)
    first, second = (fuseopt.in_backward(m, adamw) for m in (net, other))
    with pytest.raises(UnsupportedInput, match="another"):
        second.add_param_group({"params": [*net.parameters()]})
    assert len(second.param_groups) == 1
    for m in (net, other):
        m(torch.randn(3, 6)).sum().backward()
        assert all(p.grad is None for p in m.parameters())
    assert len(first.state) == len(second.state) == 5


def test_a_copy_of_a_model_is_stepped_by_nobody() -> None:
    net = model(2)
    handle = fuseopt.in_backward(net, adamw)
    other = copy.deepcopy(net)
    other(torch.randn(3, 6)).sum().backward()
    assert all(p.grad is not None for p in other.parameters())
    assert not handle.state


@pytest.mark.slow
def test_it_is_closed() -> None:
    pair = Pair(adamw)
    with pair.handle as handle:
        pair.step()
    assert handle.param_groups
    pair.backward()
    assert all(p.grad is not None for p in pair.mine.parameters())
    pair.plain.step()
    pair.plain.zero_grad()
    handle.step()
    pair.check()


@pytest.mark.slow
def test_nothing_is_left_when_it_is_dropped() -> None:
    net = model(2)
    handle = fuseopt.in_backward(net, adamw)
    for _ in range(3):
        net(torch.randn(3, 6)).sum().backward()
    known = [weakref.ref(handle), weakref.ref(handle.optimizer)]
    known += [weakref.ref(own["exp_avg"]) for own in handle.state.values()]
    del handle
    gc.collect()
    assert [x() for x in known] == [None] * len(known)
    net(torch.randn(3, 6)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    params = [weakref.ref(p) for p in net.parameters()]
    del net
    gc.collect()
    assert [x() for x in params] == [None] * len(params)


@pytest.mark.slow
def test_nothing_is_left_of_a_state_when_another_is_loaded() -> None:
    net = model(3)
    handle = fuseopt.in_backward(net, adamw, buckets="layer")
    for _ in range(3):
        net(torch.randn(3, 6)).sum().backward()
    known = [weakref.ref(own["exp_avg"]) for own in handle.state.values()]
    handle.load_state_dict(copy.deepcopy(handle.state_dict()))
    gc.collect()
    assert [x() for x in known] == [None] * len(known)
    net(torch.randn(3, 6)).sum().backward()


def test_no_gradient_is_kept() -> None:
    net = model(2)
    known: list[Any] = []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: known.append(weakref.ref(p.grad))
        )
    handle = fuseopt.in_backward(net, adamw, buckets=200)
    for _ in range(4):
        net(torch.randn(3, 6)).sum().backward()
    assert len(known) == 40
    assert [x() for x in known] == [None] * 40
    assert handle.state


@pytest.mark.slow
def test_threads_that_train_models_of_their_own() -> None:
    pairs = [Pair(build) for build in (adamw, momentum, adamw)]
    for pair in pairs:
        for _ in range(2):
            pair.step()  # docs/limits.md tells of threads while another one compiles
    errors: list[BaseException] = []

    def train(pair: Pair) -> None:
        try:
            for _ in range(4):
                pair.step()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(pair,)) for pair in pairs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    for pair in pairs:
        pair.check()


@pytest.mark.slow
def test_two_optimizers_of_one_model() -> None:
    """Each has its own parameters, in one backward."""
    nets = [model(3), model(3)]
    builds = [(adamw, 0), (momentum, 1), (adamw, 2)]
    plain = [build([*nets[0][k].parameters()]) for build, k in builds]
    handles = [
        fuseopt.in_backward([*nets[1][k].parameters()], build, buckets=200)
        for build, k in builds
    ]
    for _ in range(3):
        x = torch.randn(3, 6)
        for net in nets:
            net(x).square().mean().backward()
        for opt in plain:
            opt.step()
            opt.zero_grad()
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert same_bits(q.detach(), p.detach())
    assert all(handle.state for handle in handles)


class SeenTwice(Plain):
    """A number that is made from nothing, and seen by two tensors."""

    @torch.no_grad()
    def step(self) -> None:
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    k = torch.zeros(())
                    same = k.detach()
                    k += 1
                    p.sub_(p.grad / (1 + same))


def test_a_number_that_two_tensors_see() -> None:
    with pytest.raises(UnsupportedInput, match="several tensors"):
        fuseopt.in_backward(model(1), SeenTwice)
