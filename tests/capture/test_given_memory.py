"""Steps that give a tensor other memory, in every form that Python has for it.

What eager leaves is compared whole: contents, strides, who shares memory with whom, and
the memory that a tensor had before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import fuseopt
from fuseopt.backend import fuseopt as backend

Form = Callable[[Any, Tensor, float, dict[str, Any]], None]
FORMS: dict[str, Form] = {}


def form(function: Form) -> Form:
    FORMS[function.__name__] = function
    return function


def grad_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


@form
def assigned(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.data = p.data - lr * grad_of(p)


@form
def assigned_with_others(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.data, own.last = p.data - lr * grad_of(p), 3


@form
def assigned_by_setattr(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    setattr(p, "data", p.data - lr * grad_of(p))  # noqa: B010


@form
def assigned_by_a_method(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.__setattr__("data", p.data - lr * grad_of(p))


@form
def assigned_by_the_descriptor(
    own: Any, p: Tensor, lr: float, state: dict[str, Any]
) -> None:
    Tensor.data.__set__(p, p.data - lr * grad_of(p))  # type: ignore[attr-defined]


def give(p: Tensor, x: Tensor) -> None:
    p.data = x


@form
def assigned_by_a_helper(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    give(p, p.data - lr * grad_of(p))


@form
def assigned_in_place(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.data -= lr * grad_of(p)


@form
def assigned_twice(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.data = p.data - lr * grad_of(p)
    p.data = p.data * 0.99


@form
def assigned_then_written(
    own: Any, p: Tensor, lr: float, state: dict[str, Any]
) -> None:
    p.data = p.data - lr * grad_of(p)
    p.mul_(0.99)


@form
def written_then_assigned(
    own: Any, p: Tensor, lr: float, state: dict[str, Any]
) -> None:
    p.mul_(0.99)
    p.data = p.data - lr * grad_of(p)


@form
def assigned_and_kept(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    old = p.data
    p.data = p.data - lr * grad_of(p)
    state["m"].add_(old).add_(p)


@form
def assigned_a_clone(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    x = p.detach().clone()
    x.add_(grad_of(p), alpha=-lr)
    p.data = x


@form
def assigned_its_state(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    state["m"].mul_(0.9).add_(grad_of(p))
    p.data = state["m"]


@form
def assigned_what_becomes_state(
    own: Any, p: Tensor, lr: float, state: dict[str, Any]
) -> None:
    x = p.data - lr * grad_of(p)
    p.data = x
    state["m"] = x


@form
def assigned_its_gradient(
    own: Any, p: Tensor, lr: float, state: dict[str, Any]
) -> None:
    p.data = grad_of(p)


@form
def assigned_a_parameter(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.data = torch.nn.Parameter(p.data - lr * grad_of(p)).data


@form
def assigned_other_strides(
    own: Any, p: Tensor, lr: float, state: dict[str, Any]
) -> None:
    p.data = (p.data - lr * grad_of(p)).t().contiguous().t()


@form
def assigned_a_part(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    both = torch.cat([p.data, grad_of(p)])
    both.mul_(0.5)
    p.data = both[: p.shape[0]]


@form
def assigned_through_numpy(
    own: Any, p: Tensor, lr: float, state: dict[str, Any]
) -> None:
    p.data = torch.from_numpy(p.detach().numpy() - lr * grad_of(p).numpy())


@form
def swapped_with_its_state(
    own: Any, p: Tensor, lr: float, state: dict[str, Any]
) -> None:
    state["m"].add_(grad_of(p))
    p.data, state["m"].data = state["m"].data, p.data


@form
def state_assigned(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    state["m"].data = state["m"] * 0.9 + grad_of(p)
    p.add_(state["m"], alpha=-lr)


@form
def state_assigned_last(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.add_(state["m"], alpha=-lr)
    state["m"].data = state["m"] * 0.9 + grad_of(p)


@form
def gradient_assigned(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    grad_of(p).data = grad_of(p) * 0.5
    p.add_(grad_of(p), alpha=-lr)


@form
def gradient_assigned_last(
    own: Any, p: Tensor, lr: float, state: dict[str, Any]
) -> None:
    p.add_(grad_of(p), alpha=-lr)
    grad_of(p).data = grad_of(p) * 0.5


@form
def gradient_replaced(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.grad = grad_of(p) * 0.5
    p.add_(p.grad, alpha=-lr)


@form
def gradient_taken(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.add_(grad_of(p), alpha=-lr)
    p.grad = None


@form
def set_to_a_tensor(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.set_(p - lr * grad_of(p))


@form
def data_set_to_a_tensor(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.data.set_(p.data - lr * grad_of(p))


@form
def set_to_a_storage(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    x = p - lr * grad_of(p)
    p.set_(x.untyped_storage(), 0, x.shape, x.stride())  # type: ignore[call-overload]


@form
def set_by_aten(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    torch.ops.aten.set_.source_Tensor(p.data, p.data - lr * grad_of(p))
    torch.ops.aten.set_.source_Tensor(state["m"], p.data + 1)


@form
def storage_copied(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    x = p - lr * grad_of(p)
    p.untyped_storage().copy_(x.untyped_storage())


@form
def state_grown(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    n = p.numel()
    state["m"].resize_(2 * n).view(-1)[:n].copy_(p.view(-1))
    state["m"].resize_(p.shape)
    p.add_(grad_of(p), alpha=-lr)


@form
def state_reshaped(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    state["m"].resize_as_(p.view(-1))
    p.add_(grad_of(p), alpha=-lr)


@form
def state_transposed(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.add_(grad_of(p), alpha=-lr)
    state["m"].t_()


@form
def state_freed(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.add_(grad_of(p), alpha=-lr)
    state["m"].untyped_storage().resize_(0)


@form
def memory_kept_as_state(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    """Another tensor of the parameter's memory, not the parameter."""
    state["m"] = p.detach()
    p.add_(grad_of(p), alpha=-lr)


@form
def state_replaced(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    state["m"] = state["m"] * 0.9 + grad_of(p)
    p.add_(state["m"], alpha=-lr)


@form
def copied_through_data(own: Any, p: Tensor, lr: float, state: dict[str, Any]) -> None:
    p.data.copy_(p.data - lr * grad_of(p))


@form
def copied_through_a_view(
    own: Any, p: Tensor, lr: float, state: dict[str, Any]
) -> None:
    p.view(-1).copy_((p - lr * grad_of(p)).view(-1))


def optimizer_of(update: Form) -> type[Optimizer]:
    """An optimizer whose step does this to each parameter in a loop."""

    class Given(Optimizer):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if len(state) == 0:
                        state["m"] = torch.zeros_like(p)
                    update(self, p, group["lr"], state)

    return Given


def held(t: Tensor | None) -> Any:
    """What a tensor holds, if it has memory."""
    if t is None or t.untyped_storage().nbytes() == 0:
        return None
    return t.stride(), t.detach().clone()


class Run:
    """An optimizer that steps; after each step what it has left is noted."""

    def __init__(self, kind: type[Optimizer], lanes: int, compiled: str) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(3, 4)) for _ in range(lanes)]
        self.optimizer = kind(self.params)
        self.step: Any = self.optimizer.step
        if compiled == "torch.compile":
            self.step = torch.compile(self.step, backend=backend)
        elif compiled:
            self.step = fuseopt.compile(self.optimizer).step
        self.left: list[Any] = []

    def run(self, steps: int) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            for p in self.params:
                p.grad = torch.randn(3, 4, generator=generator)
            old = [x for p in self.params for x in (p.detach(), p.grad.detach())]  # type: ignore[union-attr]
            self.step()
            self.note(old)
        return self.left

    def note(self, old: list[Tensor]) -> None:
        tensors: list[Tensor | None] = [*self.params, *old]
        tensors += [p.grad for p in self.params]
        for p in self.params:
            own = self.optimizer.state[p]
            assert set(own) == {"m"}
            assert own["m"] is not p
            assert not own["m"].requires_grad
            tensors.append(own["m"])
        memory: dict[int, int] = {}
        shared = [
            None if t is None else memory.setdefault(t.data_ptr(), len(memory))
            for t in tensors
        ]
        self.left.append((shared, list(map(held, tensors))))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


WAYS = [("torch.compile", 3), ("fuseopt.compile", 3), ("fuseopt.compile", 16)]


@pytest.mark.family(120)
@pytest.mark.parametrize(("way", "lanes"), WAYS)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("ignore")
def test_memory_is_given_as_eager_gives_it(name: str, way: str, lanes: int) -> None:
    kind = optimizer_of(FORMS[name])
    want = Run(kind, lanes, "").run(3)
    got = Run(kind, lanes, way).run(3)
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        assert same(one[0], other[0]), f"step {step}: memory is shared in another way"
        assert same(one[1], other[1]), f"step {step}"


def grown(p: Tensor, m: Tensor) -> None:
    p.add_(1)
    m.untyped_storage().resize_(64)


@pytest.mark.parametrize("fallback", ["inductor", "error"])
def test_memory_of_another_size_is_eagers(fallback: str) -> None:
    """With one warning, or an error, and nothing written."""
    p, m = torch.zeros(4), torch.zeros(4)
    step = torch.compile(grown, backend=backend, options={"fallback": fallback})
    if fallback == "error":
        with pytest.raises(Exception, match="changes the size of memory"):
            step(p, m)
        assert torch.equal(p, torch.zeros(4))
        assert m.untyped_storage().nbytes() == 16
        return
    with pytest.warns(RuntimeWarning, match="changes the size of memory"):
        step(p, m)
    step(p, m)
    assert torch.equal(p, torch.full((4,), 2.0))
    assert m.untyped_storage().nbytes() == 64
    assert "changes the size of memory" in fuseopt.reports()[-1].fallback


def test_a_step_whose_loss_is_recorded_gives_memory_in_eager() -> None:
    def step(p: Tensor, x: Tensor) -> Tensor:
        loss = (p * x).sum()
        with torch.no_grad():
            p.data = p.data - 0.1 * x
        return loss

    mine, theirs = (torch.nn.Parameter(torch.ones(4)) for _ in "ab")
    x = torch.arange(4.0)
    fast = torch.compile(step, backend=backend, options={"fallback": "eager"})
    for _ in range(3):
        got, want = fast(mine, x), step(theirs, x)
        assert torch.equal(got, want)
        assert torch.equal(mine, theirs)
        assert got.requires_grad


def test_values_that_a_step_hands_back_are_of_the_memory_then() -> None:
    """The tensor itself, what it was before, and what it was given."""

    def step(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        old = p.detach()
        new = p - g
        p.data = new
        return old, new, p

    def left(call: Any) -> list[Any]:
        p, g = torch.ones(4), torch.full((4,), 0.25)
        seen: list[Any] = []
        for _ in range(3):
            before = p.data_ptr()
            old, new, itself = call(p, g)
            seen += [old.clone(), new.clone(), p.clone()]
            seen += [old.data_ptr() == before, new.data_ptr() == p.data_ptr()]
            seen += [itself.data_ptr() == p.data_ptr()]
        return seen

    assert same(left(torch.compile(step, backend=backend)), left(step))
