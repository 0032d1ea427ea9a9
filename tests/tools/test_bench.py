"""The tools that measure: they count right, leave nobody out, go on where they stopped.

No test looks at a time.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from bench import (
    contenders,
    counting,
    imports,
    models,
    optimizers,
    plan,
    report,
    tables,
)
from bench.__main__ import main
from bench.compare import compare
from bench.contenders import CONTENDERS, Unavailable, Work, at_most
from bench.environment import code_version, environment, file_name
from bench.first_step import WAYS
from bench.host import calls_of, moving
from bench.interleave import LEAST_ROUNDS, Turns, interleave, p10, plan_rounds
from bench.missing import measured
from bench.pictures import PICTURES, draw
from bench.reading import Reading, geomean, readings
from bench.results import Results, dumped, read, rounded
from bench.training import ConvNet, Way
from tests import ROOT

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


@pytest.mark.family(2)
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


def test_a_peer_that_takes_gradients_away_gives_them_back(monkeypatch):
    class AdamW(torch.optim.SGD):
        def __init__(self, params, lr, weight_decay):
            super().__init__(params, lr)

        def step(self):
            super().step()
            self.zero_grad()

    monkeypatch.setitem(sys.modules, "heavyball", SimpleNamespace(AdamW=AdamW))
    own = work("AdamW")
    before = own.params[0].detach().clone()
    contenders.ready("heavyball", own).call()
    assert not torch.equal(own.params[0], before)
    assert all(p.grad is not None for p in own.params)
    with pytest.raises(Unavailable, match="heavyball has no LAMB"):
        contenders.ready("heavyball", work("LAMB"))


def test_kept_caches_tell_no_time_of_compiling(monkeypatch, tmp_path):
    seen = []

    def compiled(step):
        seen.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        return step

    monkeypatch.setattr(torch, "compile", compiled)
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    ready = contenders.ready("inductor", work(caches=tmp_path))
    assert ready.figures == {"cached": True, "graph_breaks": 0}
    assert seen == [str(tmp_path)]
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
    assert "first_step_seconds" in contenders.ready("inductor", work()).figures


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
    assert counting.count_eager(lambda: torch._foreach_add_(tensors, 1))[0] == 2
    assert counting.count_eager(lambda: tensors[0].add(1).mul_(2))[0] == 2


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


# ---------------------------------------------------------------- what is measured


@pytest.mark.parametrize("suite", plan.SUITES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_plan_holds_together(suite, device):
    cases = plan.steps(suite, device)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    profiled = {case.model for case in cases if ":" not in case.model}
    assert profiled <= models.profiles().keys()
    assert len(profiled) >= 20
    for case in cases:
        run = plan.contenders(case)
        assert {"fuseopt", "copy", "for-loop"} <= set(run)
        assert set(run) | dict(case.left_out).keys() == CONTENDERS.keys()
    others = [*plan.first_steps(suite), *plan.hosts(suite), *plan.trainings(suite)]
    assert len({case.name for case in others}) == len(others)
    assert {case.way for case in plan.first_steps(suite)} == set(WAYS)
    ways = {}
    for case in plan.first_steps(suite):
        assert models.model_shapes(case.model)
        if not case.small:
            ways.setdefault(case.model, set()).add(case.way)
    # like for like: whatever model, all ways
    assert len(ways) >= 2
    assert all(way == set(WAYS) for way in ways.values())


def test_a_training_step_keeps_its_parts_apart():
    way = Way(ConvNet(4, 1, 3), {"pixel_values": torch.randn(2, 3, 8, 8)}, foreach=True)
    way.train()
    assert all(p.grad is None for p in way.params)
    told = way.result()
    assert 0 < told["tail_seconds"] < told["p50"]
    assert told["rounds"] == 1


@pytest.mark.slow
@pytest.mark.timeout(900)  # two processes, each with a compile
def test_a_run_measures_names_who_is_missing_and_goes_on(tmp_path):
    command = [sys.executable, "-m", "bench", "run", "--into", str(tmp_path)]
    command += ["--models", "2x4,no-model", "--optimizers", "SGD", "-k", "float32"]

    def run():
        # a worker of xdist says so to its children, and those then measure nothing
        env = {k: v for k, v in os.environ.items() if "XDIST" not in k}
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env=env
        )
        assert done.returncode in (0, 5), done.stdout + done.stderr
        (path,) = tmp_path.iterdir()
        return done.stdout, read(path)

    told, content = run()
    case = content["cases"]["step/2x4/SGD/float32"]
    who = case["contenders"]
    assert list(who) == list(CONTENDERS)
    assert (who["fuseopt"]["launches"], who["fuseopt"]["bytes"]) == (1, 160)
    assert who["for-loop"]["p50"] > 0
    assert "short suite" in who["inductor"]["skipped"]
    assert "no-model" in content["cases"]["step/no-model/SGD/float32"]["skipped"]
    assert "figures:" in told
    told, again = run()
    assert again == content
    assert "2 cases were there" in told


# ---------------------------------------------------------------- reports


def made_up():
    """Two models, and one of each other kind of case."""

    def step(tensors, seconds, **more):
        own = {"launches": 1, "builds": 2, "first_step_seconds": 3.0, **more}
        ran = {
            "for-loop": {"p50": 0.02},
            "foreach": {"p50": 0.03, "launches": 14},
            "fused": {"p50": 0.002, "launches": 3},
            "inductor": {"skipped": "not finished in 120 s"},
            "fuseopt": {"p50": seconds, "backend_seconds": 0.5, **own},
            "copy": {"p50": 0.002, "bytes": 1_000_000},
        }
        figures = {"tensors": tensors, "elements": 30_000_000, "contenders": ran}
        return {"least_bytes": 1_000_000, **figures}

    cold = {"first_step_seconds": 4.0, "backend_seconds": 0.6, "build_seconds": 0.4}
    cold |= {"passes": {"capture": 0.2, "build": 0.4}, "dynamo_seconds": 3.4}
    cold |= {"launches": 1}
    ways = {"foreach": 0.2, "fused": 0.12, "inductor": 0.11, "fuseopt": 0.1}
    trained = {w: {"p50": t, "tail_share": t / 2} for w, t in ways.items()}
    whole = {"whole-inductor": {"p50": 0.1, "ready_seconds": 9.0}}
    whole["whole-fuseopt"] = {"p50": 0.08, "ready_seconds": 8.0}
    host = {"foreach": 9.0, "fused": 5.0, "no-op": 1.0, "fuseopt": 3.0, "backend": 4.0}
    host |= {f"{name}, moved": us + 1 for name, us in host.items()}
    host["backend, moved"] = 7.0
    cases = {
        "step/resnet50/AdamW/float32": step(161, 0.001),
        "step/slow/AdamW/float32": step(10, 0.004),
        "first/300/fuseopt.compile": {"tensors": 300, "cold": cold},
        "first/300/backend": {"tensors": 300, "cold": cold, "warm": cold},
        "first/300/inductor": {"tensors": 300, "cold": {"skipped": "not ended in 9 s"}},
        "first/resnet50/fuseopt.compile": {"tensors": 161, "cold": cold},
        "first/resnet50/inductor": {
            "tensors": 161,
            "cold": {"first_step_seconds": 50.0},
        },
        "host/300": {
            "contenders": {n: {"host_microseconds": us} for n, us in host.items()}
        },
        "training/bert": {
            "tensors": 103,
            "elements": 14_000_000,
            "contenders": {**trained, **whole},
        },
    }
    told = {"date": "2026-01-02", "code": "c"}
    now = {**NOW, "device": "cpu", "vector_unit": "AVX2", "triton": "3.7.1"}
    now |= {"python": "3.11.0", "compiler": "g++ 12"}
    return {"environment": now, "cases": {n: told | c for n, c in cases.items()}}


@pytest.fixture
def reading(tmp_path):
    (tmp_path / "cpu.json").write_text(dumped(made_up()))
    (tmp_path / "gpu-some.json").write_text('{"sections": {}}')
    (found,) = readings(tmp_path)
    return found


def cells(made: str, row: str) -> list[str]:
    (line,) = [x for x in made.split("\n") if x.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_slower_step_is_shown_as_slower(reading):
    made = tables.steps(reading, "AdamW", "float32")
    assert cells(made, "slow")[-2:] == ["0.50×", "50 %"]
    assert cells(made, "resnet50")[-2:] == ["2.00×", "200 %"]
    row = cells(tables.summary(reading), "AdamW, float32")
    assert row[1:] == "2|10.00×|15.00×|1.00×|–|1.00×|0.50×|100 %|1".split("|")
    made = " ".join(report.short([reading]).split())
    assert "AdamW in float32, 2 models" in made
    assert "fuseopt is slower on 1." in made


def test_readme_has_at_most_eight_rows():
    """Many tensors, optimizers without a kernel of torch, a tail, a first step."""
    made = report.short(readings())
    rows = [x.strip("| ").split(" | ") for x in made.split("\n") if "| " in x][2:]
    assert len(rows) == 8
    most = max(x.figures["tensors"] for x in readings()[0].steps("AdamW", "float32"))
    assert rows[0][0].endswith(f"({most} tensors)")
    names = [x[0].split()[0] for x in rows[2:6]]
    assert names == ["Lion", "Adafactor", "LAMB", "AdEMAMix"]
    assert {x[2] for x in rows[2:6]} == {"no kernel"}
    assert rows[6][0].startswith("unscale, clip, AdamW step")
    assert all(x.endswith(" s") for x in rows[7][3:])


def test_other_packages_are_compared_with_their_version(reading):
    case = reading.cases["step/slow/AdamW/float32"]["contenders"]
    assert tables.peers(reading).count("\n") == 2
    case["deepspeed"] = {"p50": 0.002, "version": "0.19"}
    row = cells(tables.peers(reading), "deepspeed 0.19")
    assert row[1:] == ["AdamW, float32", "1", "0.50×", "0.50×"]


def test_what_did_not_run_is_in_the_report(reading):
    made = report.long([reading])
    assert "| inductor | not finished in 120 s | 2 |" in made
    assert cells(tables.first_steps(reading), "Inductor")[2] == "not ended in 9 s"


def test_first_steps_of_models_stand_beside_inductors(reading):
    row = cells(tables.models_first(reading), "resnet50")
    assert row == ["resnet50", "161", "50.0", "4.00", "0.60", "12.50×", *("–",) * 3]
    assert list(reading.first("inductor", "cold")) == [300]
    assert "### The first step, each in a new process" in report.long([reading])


def test_host_cost_is_the_least_where_that_is_known(reading):
    assert tables.host_cost({"host_microseconds": 3.0}) == 3.0
    least = {"host_microseconds": 3.0, "host_microseconds_least": 2.0}
    assert tables.host_cost(least) == 2.0
    assert tables.host_cost({"skipped": "why"}) is None


def test_turns_of_the_host_note_how_long_the_thread_was_busy():
    busy: list[float] = []
    turn = calls_of(lambda: time.sleep(0.001), busy)
    begin = time.perf_counter()
    turn()
    passed = time.perf_counter() - begin
    assert len(busy) == 1
    assert 0 < busy[0] < passed / 2


def test_host_cost_is_above_a_backend_that_does_nothing(reading):
    made = tables.hosts(reading)
    assert cells(made, "300")[1:] == ["9", "5", "3", "4", "1", "3"]
    moved = cells(made, "300, gradients elsewhere")[1:]
    assert moved == ["10", "6", "4", "7", "2", "5"]
    made = " ".join(report.short([reading]).split())
    than = "than a no-op backend."
    assert f"parameters takes the host 4 µs, 3 µs more {than}" in made
    assert "new gradient addresses it takes 7 µs, 5 µs more." in made


def test_host_cost_of_a_tail_stands_beside_the_steps(reading):
    (figures,) = reading.host().values()
    figures["contenders"]["tail"] = {"host_microseconds": 6.0}
    made = tables.hosts(reading)
    assert cells(made, "300")[-1] == "6"
    assert cells(made, "300, gradients elsewhere")[-1] == "–"


def test_gradients_move_between_two_places():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones(3)
    seen = []
    step = moving(params)(lambda: seen.append([id(p.grad) for p in params]))
    for _ in range(4):
        step()
    assert seen[0] == seen[2] != seen[1] == seen[3]


def test_training_stands_beside_the_published_claims(reading):
    made = tables.training(reading)
    assert cells(made, "bert")[-4:] == ["10 %", "5 %", "+82 %", "+100 %"]
    assert all(claim in made for _, claim in tables.PUBLISHED)
    assert cells(tables.whole_steps(reading), "bert")[-1] == "+25 %"


def test_sections_without_figures_are_left_out(tmp_path):
    content = made_up()
    content["cases"] = {
        k: v for k, v in content["cases"].items() if k.startswith("host")
    }
    (tmp_path / "r.json").write_text(dumped(content))
    made = report.part(Reading(tmp_path / "r.json"))
    assert [x for x in made.split("\n") if x.startswith("### ")] == [
        "### A call's cost, in microseconds"
    ]


def test_pictures_are_drawn_and_are_the_same_again(reading, tmp_path):
    ways = {"fused": {"p50": 0.03}, "fuseopt": {"p50": 0.02}}
    ways["copy"] = {"p50": 0.01, "bytes": 5_000}
    reading.cases["tail/bert"] = {"least_bytes": 10_000, "contenders": ways}
    first = draw(reading, tmp_path / "a")
    second = draw(reading, tmp_path / "b")
    assert first.keys() == PICTURES.keys()
    for name in first:
        assert first[name].read_bytes() == second[name].read_bytes()


def test_a_page_without_marks_is_an_error():
    with pytest.raises(ValueError, match="0 blocks"):
        report.filled("no marks", "table")


def test_geomean():
    assert geomean([4.0, 1.0, None]) == pytest.approx(2.0)
    assert geomean([None]) is None


# ---------------------------------------------------------------- compare


def test_the_same_file_compares_equal():
    found = compare(made_up(), made_up())
    assert (found.failures, found.warnings, found.cases) == ([], [], 9)


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("step/slow/AdamW/float32", "launches", 2),
        ("step/slow/AdamW/float32", "builds", 3),
        ("first/300/backend", "tensors", 301),
        ("first/300/backend", "cold", {"launches": 2}),
    ],
)
def test_a_count_that_differs_fails(where, key, value, tmp_path, capsys):
    changed = made_up()
    case = changed["cases"][where]
    case = case.get("contenders", {}).get("fuseopt", case)
    case[key] = case[key] | value if isinstance(value, dict) else value
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, content in zip(paths, (made_up(), changed), strict=True):
        path.write_text(dumped(content))
    assert main(["compare", *map(str, paths)]) == 1
    assert "FAILED: " + where in capsys.readouterr().out
    assert main(["compare", str(paths[0]), str(paths[0])]) == 0


def test_what_was_compiled_earlier_is_not_counted():
    changed = made_up()
    changed["cases"]["step/slow/AdamW/float32"]["contenders"]["foreach"] = {
        "p50": 0.03,
        "cached": True,
    }
    assert compare(made_up(), changed).failures == []


def test_a_time_that_moved_only_warns():
    changed = copy.deepcopy(made_up())
    own = changed["cases"]["step/slow/AdamW/float32"]["contenders"]["fuseopt"]
    own["p50"] *= 2
    own["first_step_seconds"] *= 2
    changed["cases"]["step/slow/AdamW/float32"]["contenders"]["fused"] = {
        "skipped": "broken"
    }
    del changed["cases"]["host/300"]
    found = compare(made_up(), changed)
    assert found.failures == []
    told = "\n".join(found.warnings)
    assert "2 -> 4 (2.00x)" in told
    assert "first_step_seconds: 3 -> 6" in told
    assert "fused ran in one of the two: broken" in told
    assert "host/300: not measured any more" in told


@pytest.mark.slow
def test_imports_are_timed_in_processes(capsys):
    imports.main(["--rounds", "1"])
    lines = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
    assert [x["imported"] for x in lines] == [*imports.IMPORTED]
    assert [x["modules"] > 0 for x in lines] == [True] * len(lines)


def test_gradients_that_come_and_go() -> None:
    found = measured("SGD", 18, 2)
    for figures in (found["median"], found["least"]):
        assert figures.keys() == {
            *("eager_all", "eager_some", "fuseopt_all", "fuseopt_some")
        }
        assert min(figures.values()) > 0
