"""Steps of state in 8 bits: the bits of unpack, step, pack, in one launch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt import Storage
from fuseopt.errors import UnsupportedInput
from fuseopt.offload import MasterOptimizer
from tests.storage.reference import (
    Params,
    Reference,
    assert_same,
    give_grads,
    turn_grads,
)
from tests.storage.test_bits import ADAMW, Make, case, last_report

#: Whole blocks, a part of one, several sizes, none.
SIZES = ((50, 80), (16,), (3, 37), (300, 7), (256,), (1,), (1000,))
FORMATS = ["8bit/256", "fp8-e4m3", "fp8-e5m2/128"]
EVERY = [
    *FORMATS,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("8bit-signed/64", "8bit-unsigned/4096", "fp8-e5m2", "fp8-e4m3/64")
    ),
]


def params_of(n: int) -> Params:
    """Parameters of all sizes, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    sizes = [SIZES[i % len(SIZES)] for i in range(n)]
    return [torch.nn.Parameter(torch.randn(x, generator=generator)) for x in sizes]


def run(
    make: Make, formats: Any, n: int, steps: int = 5, missing: int = 0, **options: Any
) -> Any:
    """Steps of both, compared after each; returns the compiled optimizer."""
    theirs, ours = params_of(n), params_of(n)
    reference = Reference(make(theirs), formats)
    names = formats if isinstance(formats, dict) else {None: formats}
    storage = [Storage(x, keys=key, least=0) for key, x in names.items()]
    optimizer = fuseopt.compile(make(ours), storage=storage, **options)
    for step in range(steps):
        give_grads(step, theirs, ours, missing=missing if step > 1 else 0)
        reference.step()
        optimizer.step()
        assert_same(reference, theirs, ours, optimizer)
    return optimizer


@pytest.mark.family(12)
@pytest.mark.parametrize("n", [4, 24])
@pytest.mark.parametrize("name", ["AdamW", "Lion", "ADOPT", "AdEMAMix", "RMSprop"])
@pytest.mark.parametrize("storage", EVERY)
def test_bits(storage: str, name: str, n: int) -> None:
    run(case(name)[0], storage, n)
    report = last_report()
    assert report.fallback == ""
    assert report.launches == 1


@pytest.mark.family(9)
@pytest.mark.parametrize("storage", FORMATS)
def test_reductions_and_products(storage: str) -> None:
    run(lambda p: torch.optim.Adafactor(p), storage, 12, steps=4)
    matrices = lambda params: torch.optim.Muon(  # noqa: E731
        [p for p in params if p.dim() == 2]
    )
    run(matrices, storage, 12, steps=4)
    assert last_report().fallback == ""


def test_formats_beside_each_other() -> None:
    formats = {"exp_avg": "8bit/256", "exp_avg_sq": "bf16-stochastic"}
    run(ADAMW, formats, 18)
    assert last_report().launches == 1


#: Formats of the two states: sizes apart and near, either way around, mixed kinds.
TWO_SIZES = [
    ("8bit/256", "8bit/1024"),
    pytest.param(("8bit/4096", "8bit/64"), marks=pytest.mark.slow),
    pytest.param(("fp8-e4m3/64", "8bit-unsigned/128"), marks=pytest.mark.slow),
    pytest.param(("8bit-signed/512", "fp8-e5m2/256"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("names", TWO_SIZES)
def test_blocks_of_two_sizes_take_one_launch(names: tuple[str, str]) -> None:
    run(ADAMW, dict(zip(("exp_avg", "exp_avg_sq"), names, strict=True)), 18)
    assert last_report().launches == 1


@pytest.mark.slow
def test_blocks_of_three_sizes_take_one_launch() -> None:
    keys = "exp_avg", "exp_avg_sq", "exp_avg_slow"
    names = dict(zip(keys, ("8bit/64", "8bit/1024", "fp8-e4m3/256"), strict=True))
    run(case("AdEMAMix")[0], names, 14)
    assert last_report().launches == 1


def test_bytes_of_blocks_of_two_sizes() -> None:
    """Each scale counts as often as its size of blocks has it."""
    params = [torch.nn.Parameter(torch.ones(256, 100)) for _ in range(20)]
    storage = {"exp_avg": "8bit/128", "exp_avg_sq": "8bit/512"}
    optimizer = fuseopt.compile(ADAMW(params), storage=storage)
    for step in range(3):
        give_grads(step, params)
        optimizer.step()
    n, report = 20 * 25600, last_report()
    assert report.bytes == n * (12 + 4) + (n // 128 + n // 512) * 8
    assert report.launches == 1


def test_sizes_that_parameters_choose_take_one_launch() -> None:
    """A rule by size or name gives parameters of one optimizer several sizes."""
    names = [f"{'ab'[k % 2]}.{k}" for k in range(14)]
    theirs, ours = params_of(14), params_of(14)
    storage = [Storage("8bit/64", names="a.*", least=0), Storage("8bit/1024", least=0)]
    optimizer = fuseopt.compile(ADAMW(zip(names, ours, strict=True)), storage=storage)
    halves = [
        Reference(ADAMW(theirs[k::2]), f"8bit/{n}") for k, n in ((0, 64), (1, 1024))
    ]
    for step in range(4):
        give_grads(step, theirs, ours)
        optimizer.step()
        for k, reference in enumerate(halves):
            reference.step()
            assert_same(reference, theirs[k::2], ours[k::2], optimizer)
    assert last_report().launches == 1


def test_gradients_may_be_missing() -> None:
    run(ADAMW, "8bit/64", 21, steps=10, missing=3)


@pytest.mark.family(3)
@pytest.mark.parametrize("storage", FORMATS)
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_and_threads_change_no_bit(threads: int, storage: str) -> None:
    """Blocks do not begin where chunks do."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    sizes = (1001, 300_007, 70_000)
    try:
        theirs, ours = (
            [torch.nn.Parameter(torch.ones(n)) for n in sizes] for _ in range(2)
        )
        reference = Reference(ADAMW(theirs), storage)
        kept = Storage(storage, least=0)
        optimizer = fuseopt.compile(ADAMW(ours), storage=kept)
        for step in range(3):
            give_grads(step, theirs, ours)
            reference.step()
            optimizer.step()
            assert_same(reference, theirs, ours, optimizer)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("storage", FORMATS)
def test_a_gradient_of_other_strides(storage: str) -> None:
    theirs, ours = params_of(9), params_of(9)
    reference = Reference(ADAMW(theirs), storage)
    optimizer = fuseopt.compile(ADAMW(ours), storage=Storage(storage, least=0))
    for step in range(5):
        give_grads(step, theirs, ours)
        if step > 1:
            turn_grads(theirs, ours)
        reference.step()
        optimizer.step()
        assert_same(reference, theirs, ours, optimizer)


def test_bytes_of_a_step() -> None:
    params = [torch.nn.Parameter(torch.ones(256, 100)) for _ in range(20)]
    optimizer = fuseopt.compile(ADAMW(params), storage="8bit")
    for step in range(3):
        give_grads(step, params)
        optimizer.step()
    n = 20 * 25600
    report = last_report()
    # weight twice, gradient, two codes twice; two scales twice for 256 elements
    assert report.bytes == n * (12 + 4) + n // 256 * 16
    assert report.launches == 1


def test_a_trace_of_torchs_has_the_schedule() -> None:
    """TORCH_TRACE and `dump_dir` print it; numbers of blocks are stored there too."""
    texts: list[str] = []

    class Listens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(str(getattr(record, "payload", "")))

    torch_trace, handler = logging.getLogger("torch.__trace"), Listens()
    torch_trace.addHandler(handler)
    try:
        run(ADAMW, "8bit/64", 4, steps=2, fallback="error")
    finally:
        torch_trace.removeHandler(handler)
    assert any("once per block:" in text for text in texts)


# ---------------------------------------------------------------- choices


def keys_of(optimizer: Any) -> list[set[str]]:
    return [{*state} - {"step"} for state in optimizer.state.values()]


def stepped(params: Any, storage: Any) -> Any:
    optimizer = fuseopt.compile(torch.optim.AdamW(params), storage=storage)
    every = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(3):
        give_grads(step, every)
        optimizer.step()
    return optimizer


PLAIN = {"exp_avg", "exp_avg_sq"}


def test_small_tensors_stay_as_they_are() -> None:
    params = [torch.nn.Parameter(torch.ones(n)) for n in (4095, 4096)]
    packed = {"exp_avg@8bit/256", "exp_avg@8bit/256.scale"}
    packed |= {"exp_avg_sq@8bit/256", "exp_avg_sq@8bit/256.scale"}
    assert keys_of(stepped(params, "8bit")) == [PLAIN, packed]


def test_the_first_choice_that_fits_counts() -> None:
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Linear(8, 8), "head": torch.nn.Linear(8, 8)}
    )
    storage = [
        Storage("fp32", names="embed.*"),
        Storage("bf16", keys="exp_avg"),
        Storage("8bit", least=64),
    ]
    optimizer = stepped(model.named_parameters(), storage)
    scales = {"exp_avg_sq@8bit/256", "exp_avg_sq@8bit/256.scale"}
    assert keys_of(optimizer) == [
        PLAIN,
        PLAIN,
        {"exp_avg@bf16", *scales},
        {"exp_avg@bf16", "exp_avg_sq"},
    ]
    again = fuseopt.compile(optimizer, storage=[Storage("fp32")])
    again.step()
    assert keys_of(again) == [PLAIN] * 4


def test_names_that_parameters_have_not() -> None:
    with pytest.raises(UnsupportedInput, match="named_parameters"):
        stepped(
            [torch.nn.Parameter(torch.ones(4))],
            [Storage("bf16", names=lambda name: name == "x")],
        )


@pytest.mark.parametrize(
    ("storage", "what"),
    [
        ([1], "list of Storages"),
        (Storage("bf16", least=-1), "no number of elements"),
        (Storage("9bit"), "no such format"),
        ("8bit/77", "blocks have 64"),
        ({1: "bf16"}, "no key of a state"),
    ],
)
def test_what_is_no_choice(storage: Any, what: str) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))])
    with pytest.raises(UnsupportedInput, match=what):
        fuseopt.compile(optimizer, storage=storage)


class Counting(torch.optim.SGD):
    """Counts the steps of each element."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "count" not in state:
                state["count"] = torch.zeros_like(p, dtype=torch.int32)
            state["count"].add_(1)
        return super().step(closure)


def test_integers_are_not_kept_in_8_bits() -> None:
    params = [torch.nn.Parameter(torch.ones(5000)) for _ in range(2)]
    optimizer = fuseopt.compile(Counting(params, 0.1), storage={"count": "8bit"})
    give_grads(0, params)
    with pytest.raises(UnsupportedInput, match=r"only torch\.float32 is packed"):
        optimizer.step()


def test_masters_beside_blocks() -> None:
    """Split masters and state in 8 bits: one launch, with the bits of eager."""
    every: list[Params] = []
    steps: list[Any] = []
    for _ in range(2):
        several = [p for p in params_of(12) if p.numel() > 1]
        params = [torch.nn.Parameter(p.detach().bfloat16()) for p in several]
        every.append(params)
        optimizer = MasterOptimizer(
            params,
            torch.optim.AdamW,
            master="split",
            storage=Storage("8bit", least=0),
            lr=1e-2,
        )
        steps.append(optimizer.step)
    for step in range(4):
        give_grads(step, *every)
        steps[0]()
        with torch.compiler.set_stance("force_eager"):
            steps[1]()
        assert all(torch.equal(p, q) for p, q in zip(*every, strict=True))
    assert last_report().launches == 1
