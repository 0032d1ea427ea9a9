"""The tools that measure: they count right, leave nobody out, go on where they stopped.

No test looks at a time.
"""

from __future__ import annotations

import json
import platform
import signal
import time

import pytest
import torch

from bench import contenders, counting, models, optimizers
from bench.contenders import CONTENDERS, Unavailable, Work, at_most
from bench.environment import code_version, environment, file_name
from bench.interleave import LEAST_ROUNDS, Turns, interleave, p10, plan_rounds
from bench.results import Results, dumped, read, rounded

NOW = {"processor": "Some CPU", "threads": 2, "torch": "2.13.0+cpu"}


def work(name="AdamW", shapes=((8, 3), (5,)), **more):
    params = models.make_params(shapes)
    return Work(optimizers.RECIPES[name], params, **more)


# ---------------------------------------------------------------- models


def test_all_profiles_have_their_elements():
    for name, profile in models.profiles().items():
        shapes = models.model_shapes(name)
        assert len(shapes) == profile["params"]
        assert models.elements(shapes) == profile["elements"], name


def test_small_tensors_by_name():
    assert models.model_shapes("3x8") == [(8,), (8,), (8,)]


def test_a_model_of_transformers_is_built_without_memory():
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = models.build("transformers:bert", "meta", torch.bfloat16, **config)
    assert {(p.device.type, p.dtype) for p in made.parameters()} == {
        ("meta", torch.bfloat16)
    }
    assert len(models.model_shapes("transformers:gpt2")) == 148


@pytest.mark.parametrize("name", ["no-such-model", "nolibrary:model"])
def test_a_missing_model_is_named(name):
    with pytest.raises(models.ModelMissing, match="no"):
        models.model_shapes(name)


def test_gradients_are_leaves_of_the_dtype():
    (p,) = models.make_params([(2, 3)], torch.bfloat16)
    assert p.is_leaf
    assert p.grad is not None
    assert p.grad.dtype == p.dtype == torch.bfloat16


# ---------------------------------------------------------------- turns


def test_turns_rotate_and_the_slow_have_fewer():
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = interleave(calls, rounds=4, every={"c": 2})
    assert order == ["a", "b", "c", "b", "a", "c", "a", "b", "a", "b"]
    assert {name: len(taken) for name, taken in seconds.items()} == {
        "a": 4,
        "b": 4,
        "c": 2,
    }


def test_one_may_be_called_elsewhere():
    turns = Turns({"own": lambda: None, "other": lambda: None})
    turns.round(but="own")
    assert (len(turns.seconds["own"]), len(turns.seconds["other"])) == (0, 1)


def test_rounds_fit_the_budget():
    rounds, every = plan_rounds({"fast": 0.01, "slow": 1.0}, budget=4.0, most=50)
    assert (rounds, every) == (50, {"slow": 16})
    assert plan_rounds({"only": 100.0}, budget=1.0, most=50) == (LEAST_ROUNDS, {})


def test_p10():
    assert p10([float(i) for i in range(100, 0, -1)]) == 10.0
    assert p10([3.0]) == 3.0


# ---------------------------------------------------------------- contenders


def test_all_share_the_state():
    shared = work()
    one, two = shared.optimizer(foreach=True), shared.optimizer(fused=True)
    for p in shared.params:
        assert one.state[p]["exp_avg"] is two.state[p]["exp_avg"]
        assert one.state[p]["step"] is not two.state[p]["step"]


@pytest.mark.parametrize("name", optimizers.RECIPES)
def test_accesses_are_no_more_than_the_kernel_has(name):
    """What is called the least a step must move is no more than what one does move."""
    ready = contenders.ready("fuseopt", work(name, [(64, 32)] * 3))
    assert ready.figures["externs"] == 0
    assert work(name, [(64, 32)] * 3).least_bytes <= ready.figures["bytes"]


def test_a_contender_that_cannot_run_says_so():
    own = work("Lion")
    for name, reason in {
        "foreach": "no foreach form",
        "fused": "no fused Lion",
        "inductor-graphs": "not on cpu",
        "deepspeed": "deepspeed",
        "torchao": "torchao",
    }.items():
        with pytest.raises(Unavailable, match=reason):
            contenders.ready(name, own)


def test_a_contender_that_fails_is_named_and_does_not_end_the_run(monkeypatch):
    def broken(_):
        raise ValueError("no such kernel\nand more")

    broken_one = contenders.Contender("broken", "", broken)
    monkeypatch.setitem(CONTENDERS, "broken", broken_one)
    with pytest.raises(Unavailable, match=r"ValueError: no such kernel$"):
        contenders.ready("broken", work())


def test_time_is_up_and_the_alarm_before_it_is_kept():
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        with pytest.raises(Unavailable, match=r"in 0\.05 s"), at_most(0.05):
            time.sleep(5)
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] < 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_the_copy_moves_as_much_as_the_step():
    own = work(shapes=[(1000,)])
    moved = contenders.ready("copy", own).figures["bytes"]
    assert own.least_bytes == 28_000
    assert abs(moved - own.least_bytes) < 12


# ---------------------------------------------------------------- counts


def test_eager_calls_count_lists_by_their_tensors():
    tensors = [torch.ones(2), torch.ones(2)]
    assert counting.count_eager(lambda: torch._foreach_add_(tensors, 1)) == 2
    assert counting.count_eager(lambda: tensors[0].add(1).mul_(2)) == 2


def test_peak_memory_sees_a_temporary():
    wanted = 64 * 2**20
    peak = counting.peak_bytes(lambda: torch.ones(wanted // 4))
    if peak is None:
        pytest.skip("the system does not tell")
    assert wanted * 0.9 < peak < wanted * 2


# ---------------------------------------------------------------- results


def test_a_case_is_written_at_once_and_kept(tmp_path):
    path = tmp_path / "r.json"
    first = Results(path, NOW, "code1")
    first.put("step/a", {"contenders": {"x": {"p50": 0.123456}}})
    again = Results(path, NOW, "code1")
    assert again.done("step/a")
    assert not again.done("step/b")
    assert again.cases["step/a"]["contenders"]["x"]["p50"] == 0.1235
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_other_code_measures_again_and_keeps_the_rest(tmp_path):
    path = tmp_path / "r.json"
    Results(path, NOW, "code1").put("a", {})
    later = Results(path, NOW, "code2")
    assert not later.done("a")
    later.put("b", {})
    cases = read(path)["cases"]
    assert {name: case["code"] for name, case in cases.items()} == {
        "a": "code1",
        "b": "code2",
    }


def test_another_environment_keeps_nothing(tmp_path):
    path = tmp_path / "r.json"
    Results(path, NOW, "code").put("a", {})
    assert not Results(path, {**NOW, "threads": 4}, "code").done("a")


def test_the_environment_names_no_host():
    found = environment()
    assert platform.node() not in json.dumps(found)
    assert found["torch"] == torch.__version__
    assert file_name(NOW) == "some-cpu-2-threads-torch-2.13.0+cpu.json"


def test_the_code_version_follows_what_measures(tmp_path):
    for name in ("fuseopt/a.py", "bench/measure.py", "bench/report.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    before = code_version(tmp_path)
    (tmp_path / "bench/report.py").write_text("2")
    assert code_version(tmp_path) == before
    (tmp_path / "fuseopt/a.py").write_text("2")
    assert code_version(tmp_path) != before


def test_numbers_keep_four_digits_and_counts_all():
    assert rounded({"a": [1.23456, 123456]}) == {"a": [1.235, 123456]}


def test_a_dump_is_json_with_a_line_for_each_contender():
    content = {"environment": NOW, "cases": {"c": {"contenders": {"x": {"p": 1}}}}}
    assert json.loads(dumped(content)) == content
    assert '"x": {"p": 1}\n' in dumped(content)
