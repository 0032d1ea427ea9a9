"""`python -m bench.gpu`: sections within a budget; JSON as it goes, a table last."""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu.place import REHEARSALS, Place
from bench.gpu.schedule import Group, Section
from bench.results import FOLDER, Figures, dumped

#: (section, module, share of the budget, processes), in groups that run together.
GROUPS: tuple[tuple[tuple[str, str, float, int], ...], ...] = (
    (("machine", "machine", 0.06, 1),),
    (("correctness", "correctness", 0.40, 14),),
    (
        ("steps", "steps", 0.34, 12),
        ("tails", "tails", 0.0, 4),
        ("launches", "profiled", 0.0, 1),
        ("host", "host", 0.0, 5),
        ("where", "where", 0.0, 1),
        ("extras", "extras", 0.0, 5),
    ),
    (("large", "large", 0.10, 1),),
    (("tuning", "tuning", 0.12, 9),),
    (("tools", "tools", 0.06, 1),),
)
SECTIONS = [name for group in GROUPS for name, _, _, _ in group]
#: Seconds: nine minutes, less what it takes to end. Those before torch was imported
#: are counted.
BUDGET = 510.0
OUT = FOLDER.parent / "out"


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, write, print. 1 where something differs from eager, failed, or did
    not come to its first case.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument(
        "--sections", default=",".join(SECTIONS), help="names, by comma"
    )
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds in all")
    parser.add_argument(
        "--out", type=Path, help="the JSON file, or a folder (else $OUT)"
    )
    parser.add_argument("--rehearse", choices=REHEARSALS, help="where no GPU is")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    chosen = parser.parse_args(arguments)
    wanted = [name for name in chosen.sections.split(",") if name]
    unknown = set(wanted) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {sorted(unknown)}; there are: {', '.join(SECTIONS)}")
    place = Place(chosen.rehearse or "cuda", tiny=bool(chosen.rehearse))
    if not chosen.rehearse and not _has_gpu():
        print(
            f"no GPU; to rehearse: --rehearse {'|'.join(REHEARSALS)}", file=sys.stderr
        )
        return 2
    # a cache of our own: nothing is installed, and nothing left where users keep theirs
    for name in ("FUSEOPT_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.setdefault(name, str(OUT / name.split("_")[0].lower()))
    run = Run(place, chosen.out)
    run.all(wanted, chosen.budget, chosen.processes)
    run.table()
    return 1 if run.bad else 0


def age() -> float:
    """Seconds since this process began: importing torch may take many of them."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, AttributeError, IndexError):
        return 0.0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


class Run:
    """Sections and the file they are written to."""

    def __init__(self, place: Place, out: Path | None = None) -> None:
        self.place = place
        self.out = out
        self.sections: list[Section] = []
        self.begin = time.monotonic() - age()
        now = datetime.datetime.now(datetime.timezone.utc)
        self.head: Figures = {"date": now.strftime("%Y-%m-%d %H:%M")}

    def all(
        self, wanted: list[str], budget: float, processes: int, **more: Any
    ) -> None:
        """Run the wanted sections; time that one leaves goes to the next ones."""
        self.head |= {"budget": budget, "place": self.place.name}
        groups = [
            [x for x in group if x[0] in wanted]
            for group in GROUPS
            if any(x[0] in wanted for x in group)
        ]
        shares = [sum(share for _, _, share, _ in group) or 0.1 for group in groups]
        for k, group in enumerate(groups):
            sections = [self._section(name, module, min(n, processes))
                        for name, module, _, n in group]  # fmt: skip
            self.sections += sections
            left = self.begin + budget - time.monotonic()
            deadline = time.monotonic() + left * shares[k] / sum(shares[k:])
            self._note(f"{', '.join(s.name for s in sections)} ...")
            ready = [s for s in sections if not s.error]
            Group(ready, deadline, self.write, **more).run()
            for section in sections:
                self._note(
                    f"{section.name}: {section.state}, {len(section.done)} of "
                    f"{len(section.expected)} cases"
                )
        self.write()

    def _section(self, name: str, module: str, processes: int) -> Section:
        section = Section(name, None, self.place, processes)
        try:
            section.module = importlib.import_module(f"bench.gpu.{module}")
        except Exception as error:
            section.error = f"{type(error).__name__}: {error}"[:1000]
        return section

    def _note(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:6.1f} s  {text}", flush=True)

    @property
    def bad(self) -> bool:
        """Did a section or a case fail, or has a section no case done? A tool that is
        not there is no failure.
        """
        return any(
            s.error or not s.done or any("failed" in f for f in s.done.values())
            for s in self.sections
        )

    def path(self) -> Path:
        """Where the results go: one file for each GPU and torch version."""
        if self.out is not None and self.out.suffix == ".json":
            return self.out
        found = self._environment()
        name = re.sub(r"[^a-z0-9]+", "-", str(found.get("gpu", "unknown")).lower())
        version = str(found.get("torch", "unknown")).replace("+", "-")
        name = f"gpu-{name.strip('-')}-torch{version}.json"
        if self.place.tiny:
            name = f"rehearsal-{self.place.name}.json"
        given = os.environ.get("OUT")  # a machine that is lent gives it back
        folder = Path(given) if given else OUT if self.place.tiny else FOLDER
        return (self.out or folder) / name

    def _environment(self) -> Figures:
        for section in self.sections:
            found = section.done.get("environment", {})
            if "torch" in found:
                return found
        import torch

        return {"torch": torch.__version__}

    def write(self) -> None:
        """Write all that is known, whole."""
        path = self.path()
        content = {
            **self.head,
            "seconds": round(time.monotonic() - self.begin, 1),
            "sections": {s.name: s.content() for s in self.sections},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(dumped(content))
        unfinished.replace(path)

    def table(self) -> None:
        """Print what was found, shortly, and where the rest is."""
        for section in self.sections:
            print(f"\n== {section.name}: {section.state}, {section.seconds:.0f} s")
            if section.error:
                print(f"  {section.error}")
                continue
            missing = [n for n in section.expected if n not in section.done]
            try:
                for line in section.module.summary(section.done):
                    print(f"  {line}")
            except Exception as error:
                print(f"  no summary: {type(error).__name__}: {error}")
            if missing:
                print(f"  not run: {len(missing)} ({', '.join(missing[:4])} ...)")
        print(f"\n{self.path()}")


if __name__ == "__main__":
    sys.exit(main())
