"""A matrix that is embedding and head: its gradient has eager's bits, one is alive."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseopt.backward import lookups
from fuseopt.backward.lookups import Lookups
from tests.backward.pairs import Pair
from tests.backward.peak import adamw, in_backward, momentum, plainly
from tests.steps import same_bits


class Tied(nn.Module):
    """An embedding, something, and a head that is the embedding."""

    def __init__(self, padding: int | None = None, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 6, padding_idx=padding, dtype=dtype)
        self.inner = nn.Linear(6, 6, dtype=dtype)
        self.head = nn.Linear(6, 40, bias=False, dtype=dtype)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.inner(self.tokens(ids))))
        return out


class Twins:
    """Two equal models, one of which is watched; `done`: lookups added in place."""

    def __init__(self, **given: Any) -> None:
        torch.manual_seed(2)
        self.theirs = Tied(**given)
        self.mine = copy.deepcopy(self.theirs)
        self.watch = Lookups(self.mine, [*self.mine.parameters()])
        self.ids = torch.tensor([[3, 5, 3, 39, 0, 3]])

    def both(self, backward: Any) -> None:
        for m in (self.theirs, self.mine):
            backward(m, self.ids)
        self.check()

    def check(self) -> None:
        for p, q in zip(self.theirs.parameters(), self.mine.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                assert q.grad is not None
                assert same_bits(q.grad, p.grad)
                assert q.grad.stride() == p.grad.stride()


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each lookup that a backward came to: was it added in place?"""
    found: list[bool] = []
    plain = Lookups.looked_up

    def looked_up(self: Lookups, *args: Any) -> bool:
        found.append(plain(self, *args))
        return found[-1]

    monkeypatch.setattr(lookups.Lookups, "looked_up", looked_up)
    return found


def squares(m: Any, ids: Tensor) -> None:
    m(ids).square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("padding", [None, 3, 7])
def test_gradients(done: list[bool], dtype: Any, padding: int | None) -> None:
    twins = Twins(dtype=dtype, padding=padding)
    for _ in range(3):  # added up
        twins.both(squares)
    assert done == [True] * 3


def test_zeros_have_the_sign_of_eager_s(done: list[bool]) -> None:
    """The engine adds zeros to rows that were not looked up: -0 becomes 0."""

    def negative_zeros(m: Any, ids: Tensor) -> None:
        out = m(ids)
        zeros = torch.zeros_like(out)
        zeros[..., ::2] = -0.0
        out.backward(zeros * -1)

    twins = Twins()
    twins.both(negative_zeros)
    weight: Any = twins.mine.tokens.weight
    assert not weight.grad.view(torch.int32).any()
    assert done == [True]


def test_infinities_and_nans(done: list[bool]) -> None:
    def odd(m: Any, ids: Tensor) -> None:
        out = m(ids)
        given = torch.ones_like(out)
        given[0, 1], given[0, 2, 5] = torch.nan, torch.inf
        out.backward(given)

    Twins().both(odd)
    assert done == [True]


def before(m: Any, ids: Tensor) -> None:
    """A third use comes first in the forward, so last in the backward."""
    more = m.tokens.weight.exp().sum()
    (m(ids).square().mean() + more).backward()


def after(m: Any, ids: Tensor) -> None:
    out = m(ids).square().mean()
    (out + m.tokens.weight.exp().sum()).backward()


def between(m: Any, ids: Tensor) -> None:
    x = m.tokens(ids)
    more = m.tokens.weight.exp().sum()
    (m.head(x).square().mean() + more).backward()


def two_forwards(m: Any, ids: Tensor) -> None:
    (m(ids).square().mean() + m(ids + 0).exp().mean()).backward()


def two_lookups(m: Any, ids: Tensor) -> None:
    one = m.tokens(ids)
    m.head(torch.tanh(one * m.tokens(ids.flip(0) * 0 + 4))).square().mean().backward()


def two_heads(m: Any, ids: Tensor) -> None:
    x = m.tokens(ids)
    (m.head(x).square().mean() + m.head(x + 1).exp().mean()).backward()


def lookups_alone(m: Any, ids: Tensor) -> None:
    m.tokens(ids).square().mean().backward()


def head_alone(m: Any, ids: Tensor) -> None:
    m(ids)  # a graph whose lookup no backward comes to
    m.head(torch.ones(3, 6)).square().mean().backward()


def head_alone_beside_a_graph(m: Any, ids: Tensor) -> None:
    kept = m(ids)
    m.head(torch.ones(3, 6)).square().mean().backward()
    kept.sum().backward()


def retained(m: Any, ids: Tensor) -> None:
    loss = m(ids).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def of_the_second_order(m: Any, ids: Tensor) -> None:
    loss = m(ids).square().mean()
    (grad,) = torch.autograd.grad(loss, [m.tokens.weight], create_graph=True)
    (grad.square().sum() + m(ids).mean()).backward()


def under_autocast(m: Any, ids: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = m(ids).float().square().mean()
    loss.backward()


def no_tokens(m: Any, ids: Tensor) -> None:
    (m(ids[:, :0]).sum() + m.head(torch.ones(2, 6)).sum()).backward()


def more_tokens_than_rows(m: Any, ids: Tensor) -> None:
    m(ids.repeat(8, 1)).square().mean().backward()


def to_the_head_alone(m: Any, ids: Tensor) -> None:
    """A backward that goes to some of the inputs."""
    m(ids).square().mean().backward(inputs=[m.tokens.weight])


@pytest.mark.parametrize(
    ("backward", "want"),
    [
        (before, [True]),
        (after, [False]),
        (between, [False]),
        (two_forwards, [True, False]),
        (two_lookups, [True, False]),
        (two_heads, [False]),
        (lookups_alone, [False]),
        (head_alone, []),
        (head_alone_beside_a_graph, [True]),
        (retained, [True, True]),
        (of_the_second_order, [True, False]),
        (under_autocast, [True]),
        (no_tokens, None),
        (more_tokens_than_rows, []),
        (to_the_head_alone, [True]),
    ],
)
def test_other_uses(done: list[bool], backward: Any, want: list[bool] | None) -> None:
    twins = Twins()
    twins.both(backward)
    if want is not None:
        assert done == want
    twins.both(squares)


def test_gradients_that_are_asked_for(done: list[bool]) -> None:
    twins = Twins()
    found = []
    for m in (twins.theirs, twins.mine):
        loss = m(twins.ids).square().mean()
        found.append(torch.autograd.grad(loss, [m.tokens.weight, m.inner.weight]))
    for p, q in zip(*found, strict=True):
        assert same_bits(q, p)
    assert done == [True]


def test_hooks_see_what_eager_shows() -> None:
    twins = Twins()
    seen: list[Tensor] = []

    def with_hook(m: Any, ids: Tensor) -> None:
        hook = m.tokens.weight.register_hook(lambda g: seen.append(g.clone()))
        squares(m, ids)
        hook.remove()

    twins.both(with_hook)
    assert same_bits(*seen)


def test_a_gradient_that_somebody_keeps_is_not_changed(done: list[bool]) -> None:
    twins = Twins()
    kept: list[Tensor] = []

    def keeping(m: Any, ids: Tensor) -> None:
        out = m(ids)
        node: Any = out.grad_fn
        while node.name() != "TBackward0":  # of the head's matrix
            node = [n for n, _ in node.next_functions if n is not None][-1]
        node.register_hook(lambda grads, _: kept.append(grads[0]))
        out.square().mean().backward()

    twins.both(keeping)
    assert done == [False]
    assert same_bits(*kept)


def test_indices_that_were_changed_in_place() -> None:
    twins = Twins()
    out = twins.mine(twins.ids)
    twins.ids.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_a_backward_that_fails_keeps_nothing() -> None:
    twins = Twins()
    known: list[Any] = []
    plain = lookups.Lookups.arrives

    def arrives(self: Any, p: Tensor, grad: Tensor) -> Tensor:
        made = plain(self, p, grad)
        known.append(weakref.ref(made))
        return made

    def fails(_: Any) -> None:
        raise ValueError("a hook of the user's")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookups.Lookups, "arrives", arrives)
        inner = twins.mine.inner.weight
        hook = inner.register_hook(fails)
        with pytest.raises(ValueError, match="user's"):
            squares(twins.mine, twins.ids)
        hook.remove()
    gc.collect()
    assert len(known) == 1
    assert known[0]() is None
    assert not twins.watch._held
    for p in (*twins.theirs.parameters(), *twins.mine.parameters()):
        p.grad = None
    twins.both(squares)


def test_copies_and_pickles_are_watched_by_nobody(done: list[bool]) -> None:
    twins = Twins()
    for other in (copy.deepcopy(twins.mine), pickle.loads(pickle.dumps(twins.mine))):
        squares(other, twins.ids)
    assert done == []
    twins.both(squares)
    assert done == [True]


def test_a_model_that_is_compiled_is_one_graph(done: list[bool]) -> None:
    twins = Twins()
    compiled = torch.compile(twins.mine, backend="aot_eager", fullgraph=True)
    squares(compiled, twins.ids)
    squares(twins.theirs, twins.ids)
    twins.check()
    assert done == []


def test_closed_or_dropped(done: list[bool]) -> None:
    twins = Twins()
    twins.watch.close()
    twins.both(squares)
    twins = Twins()
    out = twins.mine(twins.ids)
    del twins.watch
    gc.collect()
    assert not twins.mine.tokens._forward_hooks
    out.square().mean().backward()
    squares(twins.theirs, twins.ids)
    twins.check()
    assert done == []


def test_what_is_not_shared_is_not_watched() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    Lookups(model, [*model.parameters()])
    assert not any(m._forward_hooks for m in model.modules())
    tied = Tied()
    Lookups(tied, [*tied.inner.parameters()])  # another optimizer's is the matrix
    assert not any(m._forward_hooks for m in tied.modules())


@pytest.mark.parametrize("buckets", ["layer", 1])
def test_training(done: list[bool], buckets: Any) -> None:
    pair = Pair(adamw, buckets, of=lambda: Tied(padding=2))
    ids = torch.tensor([[1, 2, 1, 7]])
    for turn in range(4):
        for m in (pair.theirs, pair.mine):
            squares(m, (ids + turn) % 40)
        pair.plain.step()
        pair.plain.zero_grad()
        pair.check()
    with pair.handle.accumulate():
        squares(pair.mine, ids)
    squares(pair.theirs, ids)
    pair.check(grads=True)
    assert done == [True] * 5
    handle: Any = pair.handle
    handle.close()
    assert not pair.mine.tokens._forward_hooks


@pytest.mark.parametrize(
    "build", [pytest.param(adamw, marks=pytest.mark.slow), momentum]
)
def test_the_peak_of_a_small_gpt(build: Any) -> None:
    """A quarter less than any plain loop's; of gradients the largest is alive."""
    buckets = in_backward(build)
    largest = 2000 * 128 * 4  # the embedding
    assert buckets.gradients <= largest
    for way in ({"foreach": False}, {"foreach": True}, {"compiled": True}):
        plain = plainly(build, **way)
        assert plain.gradients > 4 * largest
        assert buckets.all <= 0.75 * plain.all


def test_the_bytes_are_counted() -> None:
    from bench.allocations import Allocations

    old = torch.ones(1000)
    with Allocations() as counted:
        kept = torch.ones(300)
        for n in (5000, 10):
            with counted.region("here"):
                torch.ones(n)
        del old
    assert counted.peaks("here") == [1200 + 20000, 1200 + 40]
    assert counted.peaks("elsewhere") == []
    assert kept.numel() == 300
