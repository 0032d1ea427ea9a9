"""Every bug that was found, by the behaviour it broke."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.backend import fuseopt as backend
from fuseopt.ir.graph import Literal, Symbol
from tests.steps import Twins, compiled, make, make_params, same_bits, set_grads

Step = Callable[..., Any]


def against_eager(step: Step, make_tensors: Callable[[], list[torch.Tensor]]) -> None:
    """Run a function of tensors twice in eager and compiled; all bits must agree."""
    mine, theirs = make_tensors(), make_tensors()
    fast = torch.compile(step, backend=backend, options={"fallback": "error"})
    with torch.no_grad():
        for seed in range(2):
            torch.manual_seed(seed)
            step(*theirs)
            torch.manual_seed(seed)
            fast(*mine)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert same_bits(a, b), f"tensor {i}: {a} for {b}"


class Each(torch.optim.Optimizer):
    """Calls `body(parameter, its state, its group)` for each parameter."""

    def __init__(self, params: Any, body: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.body = body

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.body(p, self.state[p], group)


def steps_alike(
    body: Any, shapes: Any, options: Iterable[dict[str, Any]], **of_config: Any
) -> None:
    """Step an `Each` in eager and a compiled one, with the `options` of each step, and
    compare parameters and states after each.
    """
    theirs, mine = (make_params(shapes) for _ in range(2))
    every = [*options]
    plain, other = (Each(ps, body, **every[0]) for ps in (theirs, mine))
    fast = fuseopt.compile(other, **of_config)
    for seed, of_step in enumerate(every):
        set_grads(theirs, mine, seed)
        for optimizer in (plain, fast):
            optimizer.param_groups[0].update(of_step)
            optimizer.step()
        for p, q in zip(theirs, mine, strict=True):
            assert same_bits(q, p)
            assert [*fast.state[q]] == [*plain.state[p]]
            for name, held in plain.state[p].items():
                if isinstance(held, torch.Tensor):
                    assert same_bits(fast.state[q][name], held)
                    assert fast.state[q][name].stride() == held.stride()
                else:
                    assert fast.state[q][name] == held


def test_a_number_that_is_a_view_of_written_memory() -> None:
    def step(p: Any, q: Any, g: Any) -> None:
        p.add_(g)
        q.mul_(p[0] * 2)

    against_eager(step, lambda: [torch.ones(4), torch.ones(3), torch.ones(4)])


def test_a_view_taken_before_its_memory_is_written() -> None:
    def step(p: Any, q: Any, g: Any) -> None:
        first = p[0]
        p.add_(g)
        q.mul_(first * 2)

    against_eager(step, lambda: [torch.ones(4), torch.ones(3), torch.ones(4)])


def test_a_shared_counter_written_after_its_readers() -> None:
    def step(t: Any, p: Any, q: Any) -> None:
        p.mul_(t)
        q.mul_(t)
        t.add_(1)

    against_eager(step, lambda: [torch.tensor(2.0), torch.ones(2), torch.ones(6)])


def test_random_calls_keep_their_order() -> None:
    def step(p: Any, q: Any) -> None:
        p.mul_(0.9)
        p.add_(torch.rand_like(p))
        q.add_(torch.bernoulli(torch.full_like(q, 0.5)))
        p.add_(torch.rand_like(p))

    against_eager(step, lambda: [torch.ones(40), torch.ones(7)])


def test_the_tail_of_a_uniform_sum_is_asked_per_element() -> None:
    def step(p: Any, u: Any) -> None:
        p.fill_(2.0)
        p.add_(u, alpha=0.3)

    against_eager(
        step, lambda: [torch.zeros(40).bfloat16(), torch.tensor(0.337).bfloat16()]
    )


def test_a_view_made_after_a_write() -> None:
    def step(q: Any) -> None:
        q[0].mul_(2)
        q.t().add_(1)

    against_eager(step, lambda: [torch.ones(3, 3)])


def test_a_list_that_holds_a_tensor_twice() -> None:
    def step(x: Any, y: Any) -> None:
        torch._foreach_add_([x, y, x], 1.0)
        torch._foreach_mul_([x, x], [2.0, 3.0])

    against_eager(step, lambda: [torch.ones(5), torch.ones(3)])


def test_equal_numbers_that_are_not_the_same_scalar() -> None:
    """As tuples, Literal(1.0) and Symbol(1) were equal, and 0.0 was -0.0."""
    assert Literal(1.0) != Symbol(1)
    one, other = Literal(0.0), Literal(-0.0)
    assert one != other
    assert len({one, other}) == 2


def test_negative_zero_as_a_scalar() -> None:
    def step(p: Any, q: Any) -> None:
        torch._foreach_mul_([p, q], [0.0, -0.0])

    against_eager(step, lambda: [torch.ones(4), torch.ones(4)])


@pytest.mark.parametrize("whole", [False, True], ids=["torch.compile", "fuseopt"])
def test_a_number_that_becomes_negative_zero(whole: bool) -> None:
    """0.0 == -0.0, so the table of numbers was left as it was."""
    mine, theirs = (
        [torch.nn.Parameter(torch.ones(4)) for _ in range(2)] for _ in range(2)
    )
    for p in mine + theirs:
        p.grad = torch.ones(4)
    one = torch.optim.SGD(mine, lr=0.5)
    other = torch.optim.SGD(theirs, lr=0.5)
    step = (
        fuseopt.compile(one).step if whole else torch.compile(one.step, backend=backend)
    )
    for lr in (0.5, 0.25, 0.0, -0.0, 0.0):
        for optimizer in (one, other):
            optimizer.param_groups[0]["lr"] = lr
        for p in mine + theirs:
            p.data.fill_(-0.0)
        step()
        other.step()
        assert all(map(same_bits, mine, theirs)), f"lr = {lr}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_place_foreach_mul_rounds_its_number(dtype: torch.dtype) -> None:
    def step(p: Any, q: Any) -> None:
        torch._foreach_mul_([p], 0.9137)
        q.mul_(0.9137)

    def tensors() -> list[torch.Tensor]:
        x = torch.linspace(0.1, 3, 200).to(dtype)
        return [x.clone(), x.clone()]

    against_eager(step, tensors)


def test_comparisons_round_their_number() -> None:
    def step(p: Any) -> None:
        p.fill_(0.3)
        p.copy_(torch.where(p.eq(0.3), 1.0, p))

    against_eager(step, lambda: [torch.zeros(5).bfloat16()])


def test_a_0d_parameter_shares_the_kernel_of_the_others() -> None:
    for shapes in ([(3, 4)] * 2, [(3, 4), ()]):
        torch._dynamo.reset()
        params = make_params(shapes)
        set_grads(params, params, 0)
        compiled(make("AdamW", params))()
        (report,) = fuseopt.reports()
        assert report.kernels[0].variants == 1


def test_float64_counters_of_an_optimizer_without_capturable() -> None:
    """Tracing reads the counter as float32, which lost 8 digits in float64."""
    twins = Twins("Adagrad", [(6,)], torch.float64, lr=0.1, lr_decay=0.3)
    for _ in range(3):
        assert twins.step() == []


def test_division_by_a_lane_number_rounds_once() -> None:
    """What generated code computes in place of x / y, for y one number per lane."""
    bits = torch.randint(0x00800000, 0x7F000000, (4, 1 << 18), dtype=torch.int32)
    x = bits.view(torch.float32)
    y = torch.tensor([[0.9], [3.0], [1.1e-7], [7.7e19]])
    got = (x.double() * (1.0 / y.double())).float()
    assert same_bits(got, x / y)
    special = torch.tensor([float("inf"), float("nan"), 0.0, -0.0, -float("inf")])
    for divisor in (0.0, 3.0, float("inf")):
        d = torch.tensor(divisor)
        got = (special.double() * (1.0 / d.double())).float()
        assert same_bits(got, special / d)


def test_a_metadata_query_is_no_call() -> None:
    """`is_same_size` and the like return no tensor; they were run as externs."""

    def step(p: Any, q: Any) -> None:
        if p.is_same_size(q):
            p.add_(q)

    against_eager(step, lambda: [torch.ones(4), torch.ones(4)])


def test_no_grad_inside_the_step_is_no_forward() -> None:
    """Parameters require gradients, but the step switches recording off."""
    p = torch.nn.Parameter(torch.ones(4))

    def step() -> None:
        with torch.no_grad():
            p.mul_(0.5)

    torch.compile(step, backend=backend, options={"fallback": "error"})()
    assert torch.equal(p.detach(), torch.full((4,), 0.5))


def test_a_number_of_a_tensor_rounds_like_eagers_vector_loop() -> None:
    """One lane adds a tensor, the other one element of it: one variant, two layouts."""

    def step(x: Any, y: Any, z: Any) -> None:
        x.add_(y, alpha=0.3)
        z.add_(y[0], alpha=0.3)

    def tensors() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        made = [torch.randn(3001, generator=generator) for _ in range(3)]
        return [t.bfloat16() for t in made]

    against_eager(step, tensors)


def test_an_extern_that_changes_a_temporary_in_place() -> None:
    """The temporary had no memory when the kernel before the call wrote it."""

    def step(p: Any, g: Any) -> None:
        update = p.clone().mul_(0.9).add(g, alpha=0.1).erfinv_()
        p.add_(update, alpha=-0.3)

    against_eager(step, lambda: [torch.linspace(0, 0.5, 9), torch.full((9,), 0.2)])


def test_a_step_that_works_on_data_is_no_forward() -> None:
    """Nothing is recorded through `.data`, though recording is on all along."""
    p = torch.nn.Parameter(torch.ones(4))
    g = torch.full((4,), 0.5)

    def step() -> None:
        p.data.mul_(0.5).add_(g, alpha=-0.1)

    torch.compile(step, backend=backend, options={"fallback": "error"})()
    assert torch.equal(p.detach(), torch.full((4,), 0.45))


def test_a_number_handed_back_after_no_grad_is_no_forward() -> None:
    """Dynamo hands a float of Python's state back as a tensor, made after the step."""
    p = torch.nn.Parameter(torch.ones(4))
    group = {"total": 1.0}

    def step() -> None:
        with torch.no_grad():
            group["total"] += 0.5
            p.mul_(group["total"])

    fast = torch.compile(step, backend=backend, options={"fallback": "error"})
    for _ in range(3):
        fast()
    assert group["total"] == 2.5
    assert torch.equal(p.detach(), torch.full((4,), 1.5 * 2.0 * 2.5))


def test_parts_of_one_tensor_written_one_after_the_other() -> None:
    """The second part was taken for overwritten, since the whole had changed."""

    def step(p: Any) -> None:
        p[:2].mul_(2)
        p[2:].mul_(3)

    against_eager(step, lambda: [torch.ones(5)])


def test_whole_numbers_that_float64_cannot_hold() -> None:
    def step(i: Any, j: Any) -> None:
        i.add_(2**53 + 1)
        torch._foreach_add_([j, i], 2**60 + 1)
        i.mul_(3)

    against_eager(step, lambda: [torch.arange(3), torch.arange(4)])


def test_a_view_of_what_an_extern_made() -> None:
    """Views of temps had memory of their own."""

    def step(p: Any, g: Any) -> None:
        sums = torch.cumsum(g, 0)
        p.add_(sums[1:])
        sums.mul_(2)
        p.add_(sums[1:])

    against_eager(step, lambda: [torch.ones(4), torch.linspace(0, 1, 5)])


def test_a_temp_that_a_kernel_writes_and_an_extern_changes() -> None:
    """The kernel wrote to address 0: the temp was taken for the extern's result."""

    def step(p: Any) -> None:
        made = p * 2
        made.cumsum_(0)
        p.add_(made)

    against_eager(step, lambda: [torch.ones(4)])


def test_a_view_is_returned() -> None:
    def step(p: Any) -> Any:
        p.add_(1)
        return p[1:], p.t()

    p = torch.zeros(3, 3)
    rows, turned = torch.compile(step, backend=backend)(p)
    assert torch.equal(rows, p[1:])
    assert rows.data_ptr() == p[1].data_ptr()
    assert turned.stride() == (1, 3)


def test_types_without_a_rule_in_one_position_of_a_list() -> None:
    """That position runs as a call of its own; all of the step went to eager."""

    def step(p: Any, z: Any, q: Any) -> None:
        torch._foreach_mul_([p, z, q], 2)
        torch._foreach_pow_([p, z, q], 3)

    def tensors() -> list[torch.Tensor]:
        return [torch.ones(4), torch.full((4,), 0.5 + 0.5j), torch.ones(3)]

    against_eager(step, tensors)
    assert [report.fallback for report in fuseopt.reports()] == [""]


def test_an_out_argument_is_a_write() -> None:
    """A graph whose only write is by `out=` was taken for one that writes nothing."""

    def step(p: Any, g: Any) -> None:
        torch.mul(p, g, out=p)

    against_eager(step, lambda: [torch.ones(5), torch.full((5,), 0.3)])


def test_a_counter_is_a_number_beside_a_parameter_without_dimensions() -> None:
    """As a float64 tensor without dimensions it widened the product to float64."""
    for foreach in (True, False):
        torch._dynamo.reset()
        twins = Twins("Adagrad", [()] * 8, torch.bfloat16, lr=0.1, foreach=foreach)
        for _ in range(6):
            assert twins.step() == []


def test_a_number_by_a_counter_is_one_division() -> None:
    """A tensor as divisor took its reciprocal first, which rounds once more."""
    twins = Twins("Adagrad", [(40,)], torch.float64, lr=0.1, lr_decay=0.5)
    for _ in range(5):
        assert twins.step() == []


def test_a_name_that_holds_a_counter_is_a_number() -> None:
    """`step = _get_value(step_t)` on one line, float64 arithmetic on the next."""
    twins = Twins("Adagrad", [(40,)], torch.float64, lr_decay=0.3, foreach=False)
    for _ in range(3):
        assert twins.step() == []


def test_the_scale_of_a_method_is_not_rounded_to_the_tensors_type() -> None:
    """A tensor as lr, in a for-loop: addcdiv_ takes its value as a float32."""
    twins = Twins(
        "Adagrad", [(67, 41)], torch.bfloat16, lr=torch.tensor(0.003), foreach=False
    )
    assert twins.step() == []


def test_the_larger_of_two_tensors_laid_side_by_side_is_no_reduction() -> None:
    def step(p: Any, q: Any) -> None:
        both = torch.cat([p.mul_(0.9).unsqueeze(0), q.abs().add_(1e-3).unsqueeze_(0)])
        p.copy_(torch.amax(both, 0))
        q.copy_(torch.amin(torch.stack([p, q, p * 2], 1), 1))

    def tensors() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        return [torch.randn(7, 5, generator=generator) for _ in range(2)]

    against_eager(step, tensors)
    for report in fuseopt.reports():
        assert (report.launches, report.externs) == (1, [])


def test_a_stack_that_was_written_is_reduced_as_it_is() -> None:
    def step(p: Any, q: Any) -> None:
        both = torch.stack([p, q])
        both.add_(p)
        p.copy_(torch.amax(both, 0))
        other = torch.stack([p, q])
        q.mul_(-2)
        q.copy_(torch.amax(other, 0))

    against_eager(step, lambda: [torch.linspace(0.1, 3, 7), torch.ones(7)])


def test_complex_tensors_between_calls_and_kernels() -> None:
    """Sums by part, a product that mixes the parts, a view of each, a result."""

    def step(z: Any, x: Any) -> Any:
        z.mul_(0.5).add_(z, alpha=0.25)
        z.mul_(torch.view_as_complex(x))
        x.copy_(torch.view_as_real(z) * 2)
        z[1:].sub_(z[:-1] * 0.5)
        return z * 3

    def tensors() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(6, 4, 2, generator=generator)
        return [torch.view_as_complex(x.flip(0)), x]

    against_eager(step, tensors)
    z, x = tensors()
    got = torch.compile(step, backend=backend)(z, x)
    assert same_bits(got, z * 3)


def test_a_number_that_the_step_computed_and_read() -> None:
    """`.item()` of what the step had written gave the value of before the step; of what
    it computed, all of the step went to eager.
    """

    def step(p: Any, q: Any, t: Any) -> None:
        t += 1
        n = t.item()
        norm = q.norm(2).item() / 3.0
        p.mul_(max(0.5, n**-0.8))
        p.add_(q, alpha=-min(norm, 1 / n**0.5) / max(1.0, norm * 7))
        q.lerp_(p, n**-1.5)

    def tensors() -> list[torch.Tensor]:
        x = torch.linspace(-1, 3, 40)
        return [x.clone(), x.flip(0), torch.tensor(1.0)]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        against_eager(step, tensors)
    for report in fuseopt.reports():
        assert not report.fallback
        assert [name for name, _ in report.externs] in (
            [],
            ["aten.linalg_vector_norm.default"],
        )


def test_a_mask_of_one_element() -> None:
    def step(p: Any, mask: Any) -> None:
        p.mul_(torch.where(mask[:1], 0.5, 2.0))

    against_eager(step, lambda: [torch.ones(2, 3), torch.tensor([True, False])])


def test_a_reduction_that_nobody_reads() -> None:
    def step(p: Any) -> None:
        p.amax()
        p.mul_(2.0)

    against_eager(step, lambda: [torch.ones(2, 3)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_sign_of_a_negated_sum_of_zero(dtype: torch.dtype) -> None:
    """GCC makes -(a * b + c) one instruction, which gave 0.0 for -0.0."""

    def step(p: Any, q: Any) -> None:
        p.addcmul_(q, q, value=-0.3)
        p.neg_()

    against_eager(step, lambda: [torch.zeros(40, dtype=dtype) for _ in range(2)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exponent", [2, 3, 0.5, -0.5, -1, -2])
def test_powers_of_zero_and_infinity(dtype: torch.dtype, exponent: float) -> None:
    """For float16 eager calls pow, for the others sqrt."""

    def step(p: Any) -> None:
        torch._foreach_pow_([p], exponent)

    inf = float("inf")
    values = [0.0, -0.0, inf, -inf, float("nan"), -2.0, 4.0, 1e-7]
    against_eager(step, lambda: [torch.tensor(values).to(dtype)])


def test_a_view_of_memory_that_an_empty_tensor_shares() -> None:
    """An empty tensor has no address; the view was looked for beside it."""

    def step(p: Any, empty: Any, q: Any) -> None:
        p[:1].mul_(2)
        empty.add_(1)
        q.sub_(p[1:])

    def tensors() -> list[torch.Tensor]:
        whole = torch.arange(6.0)
        return [whole[1:5], whole[2:2], torch.ones(3)]

    against_eager(step, tensors)


def test_a_reduction_of_what_no_memory_holds() -> None:
    """A sum over a constant: a lane with elements, but no tensor to load."""

    def step(p: Any, rows: Any) -> None:
        made = torch.zeros(3, 4, 5)
        made.add_(2)
        made.mul_(made.sum())
        p.add_(made.sum())
        rows.copy_(made.sum(-1))

    against_eager(step, lambda: [torch.zeros(2), torch.zeros(3, 4)])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (5, 1)], ids=str)
def test_the_norm_of_one_number_does_not_overflow(shape: tuple[int, ...]) -> None:
    """Eager takes the absolute value, not the root of a square."""

    def step(p: Any, x: Any) -> None:
        p[0] = x.norm()
        p[1] = x.norm(1)
        if x.dim() > 1:
            p[2 : 2 + len(x)] = x.norm(dim=1)  # -1: torch 2.11 gives a wrong shape

    against_eager(
        step, lambda: [torch.zeros(2 + len(shape) * 5), torch.full(shape, -1e30)]
    )


def test_verify_of_factors_that_dynamo_takes_apart() -> None:
    """What runs in place of the parts read a gradient that was dropped with them."""

    def step(p: Any, g: Any, v: Any) -> None:
        v.addcmul_(g, g.conj(), value=0.1)
        p.add_(v)

    fast = torch.compile(step, backend=backend, options={"verify": True})
    p, v = torch.ones(5), torch.zeros(5)
    fast(p, torch.full((5,), 2.0), v)
    assert p[0] == 1 + v[0] > 1


def test_verify_of_a_step_that_draws_random_numbers() -> None:
    """Eager's run drew first, so that the step had other numbers."""

    def step(p: Any) -> None:
        p.add_(torch.bernoulli(torch.full_like(p, 0.5)))

    fast = torch.compile(step, backend=backend, options={"verify": True})
    p, q = torch.ones(50), torch.ones(50)
    torch.manual_seed(7)
    fast(p)
    torch.manual_seed(7)
    step(q)
    assert same_bits(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_runs_in_eager_has_eagers_rounding(dtype: torch.dtype) -> None:
    """What Dynamo writes for a scaled product rounds elsewhere than the method does."""

    def whole(x: Any) -> Any:
        return x + 1

    torch._dynamo.allow_in_graph(whole)  # so the graph cannot be captured

    def step(p: Any, g: Any) -> None:
        p.addcmul_(g, g, value=-0.3)
        p.addcdiv_(g, g + 3, value=-0.7)
        torch._foreach_lerp_([p], [g], 0.1)
        p.copy_(whole(p))

    mine, theirs = (
        [torch.randn(33, generator=torch.Generator().manual_seed(i)).to(dtype)
         for i in range(2)]
        for _ in range(2)
    )  # fmt: skip
    fast = torch.compile(step, backend=backend, options={"fallback": "eager"})
    with pytest.warns(RuntimeWarning, match="a step runs in eager"):
        fast(*mine)
    step(*theirs)
    (report,) = fuseopt.reports()
    assert report.fallback
    assert same_bits(mine[0], theirs[0])


def test_a_tensor_made_of_numbers_that_the_step_changes() -> None:
    """It was taken for a constant, and the graph ran in eager."""

    def step(p: Any, g: Any) -> None:
        total = torch.tensor([0.0])
        total.add_(g.sum())
        p.mul_(total)

    against_eager(step, lambda: [torch.ones(4), torch.arange(4.0)])


@pytest.mark.parametrize("shape", [(6, 5), (5, 6)])
def test_products_of_a_decomposition(shape: tuple[int, int]) -> None:
    """Shape rules gave the strides of a GPU, and a product of other strides differs."""

    def step(p: Any, g: Any) -> Any:
        u, _, vh = torch.linalg.svd(g, full_matrices=False)
        p.add_(u @ vh)
        return vh.mT

    def tensors() -> list[torch.Tensor]:
        rng = torch.Generator().manual_seed(3)
        return [torch.randn(shape, generator=rng) for _ in range(2)]

    against_eager(step, tensors)
    fast = torch.compile(step, backend=backend)
    assert fast(*tensors()).stride() == step(*tensors()).stride()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.nn.functional.softplus(x, beta=50.0),
        torch.nn.functional.softplus,
        torch.nn.functional.leaky_relu,
        torch.nn.functional.hardtanh,
    ],
)
def test_arguments_that_a_call_leaves_out(call: Any) -> None:
    """The rule was given None in place of the default of ATen."""

    def step(p: Any) -> None:
        p.copy_(call(p))

    against_eager(step, lambda: [torch.linspace(-3, 30, 40)])


def test_a_step_that_records_gradients_says_where_its_graph_ends() -> None:
    """Without torch.no_grad around it, it was taken for a closure, and nobody knew."""

    class Branches(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.grad.data.norm() > 0:
                    p.data.sub_(p.grad.data)

    params = [torch.ones(3, requires_grad=True)]
    params[0].grad = torch.ones(3)
    step = torch.compile(Branches(params, {}).step, backend=backend)
    with pytest.warns(RuntimeWarning, match="breaks the graph"):
        step()
    assert params[0].tolist() == [0, 0, 0]


def test_an_exponent_that_is_a_symbol() -> None:
    """Eager takes roots and squares by other formulas: the value decides."""
    torch._dynamo.reset()

    def step(p: Any, power: float) -> None:
        p.abs_().add_(0.1).pow_(power)

    fast = torch.compile(step, backend=backend, options={"fallback": "error"})
    for power in (-0.25, -0.5, 0.5, 2.0, 3.0, 1.7):
        mine = torch.linspace(-3, 3, 49).reshape(7, 7)
        theirs = mine.clone()
        fast(mine, power)
        step(theirs, power)
        assert same_bits(mine, theirs), power


def test_what_autograd_saved_and_a_step_changed_is_noticed() -> None:
    """Versions of tensors without a gradient, such as averaged weights, stayed."""

    def step(average: Any, p: Any) -> None:
        average.lerp_(p, 0.1)

    average, p = torch.ones(4), torch.nn.Parameter(torch.zeros(4))
    fast = torch.compile(step, backend=backend, options={"fallback": "error"})
    with torch.no_grad():
        fast(average, p)
    before = average._version
    loss = (p * average).sum()
    with torch.no_grad():
        fast(average, p)
    assert average._version == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_several_loops_of_pairs_in_a_function(dtype: torch.dtype) -> None:
    """The loops before and after a call of the vector library had one name."""

    def step(p: Any, g: Any) -> None:
        p.add_((g * 2).exp()).mul_((p + 1).abs().pow(g))

    against_eager(step, lambda: [torch.full((37,), 0.5, dtype=dtype) for _ in "pg"])


@pytest.mark.family(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 37), (130, 140), (128, 128, 2)])
def test_only_results_of_a_reduction_ask_for_the_tail(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """A factored second moment in 16 bits: roots of columns, and none of elements."""

    def step(p: Any, g: Any, c: Any) -> None:
        c.lerp_(g.square().mean(0, keepdim=True), 0.1)
        p.add_(g * c.rsqrt())

    def tensors() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        g = torch.randn(shape, generator=generator).to(dtype)
        return [torch.ones(shape, dtype=dtype), g, torch.ones_like(g[:1])]

    against_eager(step, tensors)


def _sum_of_a_flat_view(p: Any, *_: Any) -> None:
    u = p.grad * 2
    p.mul_(1 + 0.01 * u.view(-1).sum())


def _norm_of_a_row(p: Any, *_: Any) -> None:
    u = p.grad * 2
    p.mul_(1 + 0.01 * u[0].norm())


def _norm_of_a_flat_copy(p: Any, *_: Any) -> None:
    u = (p.grad / 2).reshape(p.shape[0], -1)
    p.add_(u.flatten().norm() * 0.01)


def _view_of_a_view(p: Any, *_: Any) -> None:
    u = p.grad.float() * 1.5
    m = u.view(p.shape[0], -1)
    p.sub_((m / m.norm()).view_as(p), alpha=0.1)


@pytest.mark.family(4)
@pytest.mark.parametrize("lanes", [1, 10])
@pytest.mark.parametrize(
    "body",
    [_sum_of_a_flat_view, _norm_of_a_row, _norm_of_a_flat_copy, _view_of_a_view],
)
def test_a_view_that_is_only_read_is_of_the_lane_that_writes_its_memory(
    body: Step, lanes: int
) -> None:
    """Readers were split by shapes, and who wrote was not: every other lane read what
    its own kernel had yet to write.
    """

    steps_alike(body, [(6, 8), (5, 4)] * lanes, [{}] * 3, fallback="error")


@pytest.mark.parametrize("name", ["any", "all"])
@pytest.mark.parametrize("dim", [(), None, (0, 1)])
def test_truth_over_no_dimension(name: str, dim: Any) -> None:
    """Other reductions take an empty list for all dimensions."""

    def step(p: Any, g: Any) -> None:
        p.mul_(torch.where(getattr(torch, name)(g > 0, dim=dim), 0.5, 0.25))

    def tensors() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.ones(5, 4), torch.randn(5, 4)]

    against_eager(step, tensors)


@pytest.mark.parametrize("name", ["amax", "sum"])
def test_a_stack_that_is_seen_as_another_dtype(name: str) -> None:
    """The bits of its numbers are compared, not the numbers."""

    def step(p: Any, g: Any) -> None:
        stacked = torch.stack([g.norm(), -p.norm(), p.sum()])
        p.mul_(1 - getattr(stacked.view(torch.int32), name)(0) * 1e-12)

    def tensors() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(5, 4), torch.randn(5, 4)]

    against_eager(step, tensors)


def test_truth_that_is_made_in_a_step_is_no_integer() -> None:
    """Two of them are true together, and not 2."""

    def step(p: Any) -> None:
        p.mul_(1 + (torch.tensor(True) + torch.tensor(True)))

    against_eager(step, lambda: [torch.ones(3)])


def test_a_stack_in_a_part_of_a_larger_memory() -> None:
    """The other part has its shape and strides, and is no stack."""

    def step(p: Any, g: Any) -> None:
        memory = torch.zeros(6)
        torch.stack([g.norm(), -p.norm(), p.sum()], out=memory[:3])
        memory[3:].fill_(0.5)
        p.mul_(memory[3:].amax(0))

    against_eager(step, lambda: [torch.ones(3), torch.ones(3)])


@pytest.mark.parametrize("whole", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
def test_integers_of_floats_have_no_negative_zero(
    dtype: torch.dtype, whole: torch.dtype
) -> None:
    """GCC took the way there and back for `trunc`, which keeps the sign of zero."""

    def step(p: Any, g: Any) -> None:
        p.copy_(g.to(whole) * 0.5)

    def tensors() -> list[torch.Tensor]:
        g = torch.linspace(-3, 3, 40).to(dtype)
        return [torch.ones_like(g), g]

    against_eager(step, tensors)


@pytest.mark.parametrize(
    "number",
    [
        lambda x, n: int(x),
        lambda x, n: -n,
        lambda x, n: n * -3,
        lambda x, n: -3 * n,
        lambda x, n: n * -3.0,
        lambda x, n: -float(n),
    ],
    ids=["int", "negated", "product", "turned", "float product", "negated float"],
)
def test_whole_numbers_that_a_step_reads_have_no_negative_zero(number: Any) -> None:
    """Floats have one, in Python as well."""

    def step(p: Any, g: Any) -> None:
        x, n = g.mean().item(), (g > 9).sum().item()
        p.mul_(number(x, n))

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        against_eager(step, lambda: [torch.ones(4), torch.full((4,), -0.25)])


@pytest.mark.slow
def test_a_step_that_only_counts() -> None:
    """It has no graph: what the models of its lanes count was written to all lanes."""

    def count(p: Any, state: Any, group: Any) -> None:
        state["n"] = state.get("n", 0) + 1
        if not group["rests"]:
            p.add_(p.grad, alpha=-0.1)

    rests = [True, True, False, True, True, False, False, True]
    steps_alike(count, [(4,), (3, 2)] * 12, [{"rests": x} for x in rests])


def _seen_again(state: Any, p: Any) -> None:
    state["twin"] = state["m"].detach()


def _held_twice(state: Any, p: Any) -> None:
    state["twin"] = state["m"]


def _expanded(state: Any, p: Any) -> None:
    state["twin"] = torch.ones_like(p)
    state["rows"] = torch.zeros_like(p).expand(2, *p.shape)


@pytest.mark.family(6)
@pytest.mark.parametrize("rest", [0, 1])
@pytest.mark.parametrize("more", [_seen_again, _held_twice, _expanded])
def test_new_state_that_shares_memory_and_is_not_yet_used(more: Any, rest: int) -> None:
    """A tensor that depends on no lane was copied for each lane, each name apart: what
    was written by one name was not there by the other.
    """

    def wait(p: Any, state: Any, group: Any) -> None:
        if not state:
            state["n"] = 0
            state["m"] = torch.zeros_like(p)
            more(state, p)
        state["n"] += 1
        p.add_(p.grad, alpha=rest - 1)
        if state["n"] > 1:
            state["m"].add_(p.grad)
            p.add_(state["twin"], alpha=-0.1)

    steps_alike(wait, [(4,), (3, 2)] * 12, [{}] * 4)


@pytest.mark.family(5)
@pytest.mark.parametrize(
    "kept",
    ["p.view(-1)", "p.view(p.shape)", "p[0]", "p.detach().view(-1)", "p.data[1:]"],
)
def test_views_of_parameters_that_state_keeps_require_no_gradients(kept: str) -> None:
    """Those that eager takes under no_grad do, where the parameter does, and Dynamo
    cannot trace a step that reads one which was written.
    """
    view = eval(f"lambda p: {kept}")

    def keep(p: Any, state: Any, group: Any) -> None:
        if "kept" not in state:
            state["kept"] = view(p)
        p.add_(p.grad)

    mine = [torch.nn.Parameter(torch.ones(3, 4)) for _ in range(2)]
    fast = fuseopt.compile(Each(mine, keep), fallback="error")
    for seed in range(3):
        set_grads(mine, mine, seed)
        fast.step()
        for p in mine:
            state = fast.state[p]["kept"]
            assert not state.requires_grad
            assert same_bits(state, view(p.detach()))
            assert copy.deepcopy(state) is not state


@pytest.mark.parametrize("lanes", [2, 12])
def test_two_views_alike_that_state_keeps_are_two_tensors(lanes: int) -> None:
    """What gives one of them other memory leaves the other one alone."""

    def keep(p: Any, state: Any, group: Any) -> None:
        update = p.grad * 2
        state["a"], state["b"] = update[None], update.unsqueeze(0)
        state["same"] = state["a"]
        p.add_(update)

    mine = make_params([(4,), (3, 2)] * lanes)
    fast = fuseopt.compile(Each(mine, keep), fallback="error")
    for seed in range(2):
        set_grads(mine, mine, seed)
        fast.step()
        for p in mine:
            a, b, same = fast.state[p].values()
            assert a is not b
            assert a.data_ptr() == b.data_ptr()
            assert same is a


def _overwritten_norm(p: Any, state: Any, group: Any) -> None:
    norm = p.grad.norm()
    norm.zero_()
    state["kept"] = norm
    p.add_(1.0)


def _overwritten_largest(p: Any, state: Any, group: Any) -> None:
    largest = p.grad.abs().amax()
    largest.fill_(2.0).neg_()
    state["kept"] = largest
    p.add_(p.grad)


def _overwritten_sums(p: Any, state: Any, group: Any) -> None:
    sums = p.grad.sum(-1, keepdim=True)
    sums.fill_(0.5).add_(group["lr"])
    state["kept"] = sums
    p.mul_(sums)


@pytest.mark.family(3)
@pytest.mark.parametrize("lanes", [1, 12])
@pytest.mark.parametrize(
    "body", [_overwritten_norm, _overwritten_largest, _overwritten_sums]
)
def test_results_of_reductions_that_are_overwritten(body: Any, lanes: int) -> None:
    """What overwrote them was stored as a result of a lane that reduced nothing."""
    steps_alike(body, [(6, 8), (5, 4)] * lanes, [{"lr": 0.1}] * 3, fallback="error")


@pytest.mark.family(4)
@pytest.mark.parametrize("lanes", [2, 18])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_whose_strides_change_in_16_bits(
    dtype: torch.dtype, lanes: int
) -> None:
    """Eager's loops over tensors with gaps round alpha's product, its vectors do not;
    what the plan knew of strides was that of the first gradients.
    """
    torch.manual_seed(0)
    weights = [torch.randn(64).to(dtype) for _ in range(lanes)]
    theirs, mine = ([torch.nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    options = {"lr": 0.01, "weight_decay": 0.01, "momentum": 0.9}
    plain = torch.optim.SGD(theirs, **options)  # type: ignore[arg-type]
    fast = fuseopt.compile(torch.optim.SGD(mine, **options))  # type: ignore[arg-type]
    for turn in range(6):
        for p, q in zip(theirs, mine, strict=True):
            grad = torch.randn(64, 2).to(dtype)
            p.grad = q.grad = grad[:, 0] if turn in (2, 3) else grad[:, 0].contiguous()
        plain.step()
        fast.step()
        for p, q in zip(theirs, mine, strict=True):
            assert same_bits(q, p)
            momentum = "momentum_buffer"
            assert same_bits(fast.state[q][momentum], plain.state[p][momentum])
    assert len(fuseopt.reports()) <= 4


def _row_of_a_vector(p: Any, state: Any, group: Any) -> None:
    if p.grad.mean() > 100.0:
        p[:, 1].mul_(0.5)
    p.add_(p.grad)


def _product_that_does_not_fit(p: Any, state: Any, group: Any) -> None:
    if p.grad.abs().amax().item() > 100.0:
        p.addmm_(p.grad, p.grad.new_ones(7, 7))
    p.add_(p.grad)


@pytest.mark.family(4)
@pytest.mark.filterwarnings("ignore:fuseopt")
@pytest.mark.parametrize("lanes", [1, 12])
@pytest.mark.parametrize("body", [_row_of_a_vector, _product_that_does_not_fit])
def test_a_way_that_raises_and_is_never_taken(body: Any, lanes: int) -> None:
    """Both ways of a branch on a tensor are traced; eager takes the other one."""
    steps_alike(body, [(8,), (5,)] * lanes, [{}] * 3)
