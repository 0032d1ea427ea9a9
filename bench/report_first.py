"""In: the JSON of `make bench`. Out: bench/results/cpu-first.json, README's table.

    python -m bench.report_first [bench/out/latest.json]

The results file keeps medians, ratios and what they depend on: no single rounds, no
name of the machine. The table is made from the results file alone, so that a test can
hold the two against each other.
"""

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MEASURED = HERE / "out" / "latest.json"
RESULTS = HERE / "results" / "cpu-first.json"
README = HERE.parent / "README.md"
BLOCK = re.compile(r"(<!-- table:begin -->\n).*?(<!-- table:end -->)", re.DOTALL)

Results = dict[str, Any]
ENVIRONMENT = ("torch", "threads", "vector_unit", "compiled_with", "gpu")
STATS = ("median", "min", "max", "rounds")
NAMES = {"AdamW": "AdamW", "SGD": "SGD-momentum"}


def main() -> None:
    """Read, trim, write; say which files."""
    parser = argparse.ArgumentParser(description="results file and README's table")
    parser.add_argument("measured", nargs="?", type=Path, default=MEASURED)
    results = trimmed(json.loads(parser.parse_args().measured.read_text()))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    README.write_text(filled(README.read_text(), table(results)))
    print(f"{RESULTS}\n{README}")


def trimmed(measured: dict[str, Any]) -> Results:
    """Return what the figures are and depend on, without what names the machine."""
    info = measured["machine_info"]
    environment = {key: info[key] for key in ENVIRONMENT if key in info}
    environment["processor"] = info["cpu"].get("brand_raw", info["machine"])
    environment["python"] = info["python_version"]
    environment["date"] = measured["datetime"][:10]
    benchmarks = {
        entry["name"]: {
            "seconds": {key: rounded(entry["stats"][key]) for key in STATS},
            **{key: rounded(value) for key, value in entry["extra_info"].items()},
        }
        for entry in measured["benchmarks"]
    }
    return {"environment": environment, "benchmarks": benchmarks}


def rounded(value: Any) -> Any:
    """Return a float with the four digits that a measurement may have."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def filled(text: str, content: str) -> str:
    """Return README's text with this table between its marks."""
    made, count = BLOCK.subn(lambda m: f"{m[1]}{content}{m[2]}", text)
    if count != 1:
        raise SystemExit(f"{README} has {count} blocks for the table instead of one")
    return made


def table(results: Results) -> str:
    """Return the table, and the line that says where and how it was measured."""
    benchmarks = results["benchmarks"]
    rows = [
        "| | eager foreach | torch `fused=True` | fuseopt | |",
        "|---|---:|---:|---:|---|",
    ]
    rows += [
        step_row(name, benchmarks[f"test_resnet50_step[{name}]"]) for name in NAMES
    ]
    rows += [first_step_row(params, benchmarks) for params in (50, 300, 1000)]
    rows.append(host_row(benchmarks["test_call_of_300_small_parameters"]))
    return "\n".join(rows) + "\n\n" + conditions(results["environment"]) + "\n"


def step_row(name: str, entry: Results) -> str:
    """Return the row of one optimizer's step at ResNet-50's shapes."""
    others = (entry["eager_foreach_seconds"], entry["torch_fused_seconds"])
    own = entry["seconds"]["median"]
    launches = entry["launches"]
    cells = " | ".join(f"{1e3 * s:.1f} ms" for s in (*others, own))
    copy = 1e3 * entry["copy_of_the_same_bytes_seconds"]
    return (
        f"| {NAMES[name]} step, ResNet-50 | {cells} | {launches} "
        f"launch{'es' * (launches != 1)}; a copy of as many bytes: {copy:.1f} ms |"
    )


def first_step_row(params: int, benchmarks: Results) -> str:
    """Return the row of the backend's seconds, cold and warm, beside Dynamo's."""
    cold, warm = (
        benchmarks[f"test_first_step[{params}-{cache}]"] for cache in ("cold", "warm")
    )
    seconds = cold["backend_seconds"], warm["backend_seconds"]
    return (
        f"| compiling for-loop AdamW, {params:,} parameters | | | "
        f"{seconds[0]:.2f} s cold, {seconds[1]:.2f} s with a warm cache | "
        f"and Dynamo's own {cold['dynamo_seconds']:.1f} s |"
    )


def host_row(entry: Results) -> str:
    """Return the row of a call's own cost."""
    above, floor = (
        entry["microseconds_above_no_op"],
        entry["no_op_microseconds_per_call"],
    )
    return (
        f"| a call, 300 small parameters | | | {above:+.0f} µs | above a backend that "
        f"does nothing ({floor:.0f} µs) |"
    )


def conditions(environment: Results) -> str:
    """Return where and how the figures were measured."""
    processor, threads, unit, torch, date = (
        environment[key]
        for key in ("processor", "threads", "vector_unit", "torch", "date")
    )
    line = (
        f"Medians; contenders of a row took turns in one run. {processor}, {threads} "
        f"threads, {unit}, torch {torch}, {date}. Again: `make bench`, then "
        "`python -m bench.report_first`."
    )
    return textwrap.fill(line, 88)


if __name__ == "__main__":
    main()
