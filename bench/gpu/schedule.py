"""In: sections and a deadline. Out: their cases done by processes, until then.

Each process does some cases of one section (bench.gpu.worker). One that dies loses the
case it was at, and another takes over the rest; one that hangs is ended. Sections of a
group start together; those that measure take turns, one process at a time, when nobody
prepares any more. When much of the time is over, those that are ready measure all the
same, and the others stand still meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.gpu.place import Place
from bench.results import Figures

#: When a process is ended, it is given so many seconds to be gone.
GRACE = 5.0
#: This share of a group's time may pass before those that are ready measure.
PREPARING = 0.55


@dataclasses.dataclass
class Section:
    """A module with `cases`, `prepare`, `summary`, `ALONE`, `CAP`; its cases' results.

    processes: how many share its cases. done: figures by case, or {"failed": ...}.
    """

    name: str
    module: Any
    place: Place
    processes: int = 1
    done: dict[str, Figures] = dataclasses.field(default_factory=dict)
    expected: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    error: str = ""

    @property
    def state(self) -> str:
        """How the section ended, in a word or two."""
        if self.error:
            return "failed"
        if len(self.done) < len(self.expected):
            return "out of time"
        return "done"

    def content(self) -> Figures:
        """What the results file has of it; a case that was not done is named."""
        missing = [name for name in self.expected if name not in self.done]
        return {
            "state": self.state,
            "seconds": round(self.seconds, 1),
            **({"error": self.error} if self.error else {}),
            **({"not_run": missing} if missing else {}),
            "cases": self.done,
        }


def partition(cases: Sequence[dict[str, Any]], parts: int) -> list[list[Any]]:
    """The cases in at most so many lists of about the same weight, in each those that
    are to be `early` first: time may run out.
    """
    lists: list[list[Any]] = [[] for _ in range(max(1, min(parts, len(cases))))]
    weights = [0.0] * len(lists)
    for case in sorted(cases, key=lambda c: -float(c.get("weight", 1))):
        k = weights.index(min(weights))
        lists[k].append(case)
        weights[k] += float(case.get("weight", 1))
    for part in lists:
        part.sort(key=lambda case: not case.get("early"))
    return [part for part in lists if part]


class _Process:
    """A worker, and what it says: lines go into a queue with the worker itself."""

    def __init__(
        self, section: Section, cases: list[Any], said: queue.Queue[Any], command: Any
    ) -> None:
        self.section = section
        self.left = {case["name"]: case for case in cases}
        self.at = ""
        self.since = time.monotonic()
        self.ready = self.over = self.measuring = self.still = False
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.noise: list[str] = []
        task = {
            "place": dataclasses.asdict(section.place),
            "module": section.module.__name__,
            "cases": cases,
        }
        self.tell(json.dumps(task))
        self.listener = threading.Thread(target=self._listen, args=(said,), daemon=True)
        self.listener.start()

    def tell(self, line: str) -> None:
        assert self.child.stdin is not None
        with contextlib.suppress(OSError):  # it is gone: its end will be heard
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()

    def _listen(self, said: queue.Queue[Any]) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            try:
                content = json.loads(line)
            except ValueError:
                content = None
            if isinstance(content, dict):
                said.put((self, content))
            else:
                self.noise = [*self.noise[-30:], line.rstrip()]
        self.child.stdout.close()
        self.child.wait()
        said.put((self, None))

    def stand_still(self, still: bool) -> None:
        """Stop it where it is, or let it go on; that time does not count."""
        if self.still != still and self.child.poll() is None:
            self.child.send_signal(signal.SIGSTOP if still else signal.SIGCONT)
            self.still, self.since = still, time.monotonic()

    def end(self) -> None:
        """End it, if it runs."""
        if self.child.poll() is None:
            self.child.kill()
        try:
            self.child.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.noise.append(f"did not end in {GRACE:g} s")
        self.listener.join(GRACE)
        if self.child.stdin is not None:
            with contextlib.suppress(OSError):
                self.child.stdin.close()


class Group:
    """Sections that run together until a deadline."""

    def __init__(
        self,
        sections: Sequence[Section],
        deadline: float,
        changed: Callable[[], None],
        command: Sequence[str] = (sys.executable, "-u", "-m", "bench.gpu.worker"),
    ) -> None:
        self.sections = sections
        self.deadline = deadline
        self.changed = changed
        self.command = list(command)
        self.said: queue.Queue[Any] = queue.Queue()
        self.processes: list[_Process] = []
        self.begin = time.monotonic()

    def run(self) -> None:
        """Do all cases, or what the time allows."""
        try:
            for section in self.sections:
                self._start(section)
            while self._unfinished() and time.monotonic() < self.deadline:
                self._hear()
                self._end_hung()
                self._give_turn()
        finally:
            for process in self.processes:
                process.end()
            self.changed()

    def _start(self, section: Section) -> None:
        try:
            cases = section.module.cases(section.place)
        except Exception as error:
            section.error = f"{type(error).__name__}: {error}"[:1000]
            return
        section.expected = [case["name"] for case in cases]
        for part in partition(cases, section.processes):
            self._launch(section, part)

    def _launch(self, section: Section, cases: list[Any]) -> None:
        self.processes.append(_Process(section, cases, self.said, self.command))

    def _unfinished(self) -> list[_Process]:
        return [p for p in self.processes if not p.over]

    def _hear(self) -> None:
        """Take one message, if there is one."""
        try:
            process, content = self.said.get(timeout=0.1)
        except queue.Empty:
            return
        section = process.section
        section.seconds = time.monotonic() - self.begin
        process.since = time.monotonic()
        if content is None:
            self._ended(process)
        elif "begin" in content:
            process.at = content["begin"]
        elif "ready" in content:
            process.ready, process.at = True, ""
        elif "case" in content:
            name = content.pop("case")
            section.done[name] = content.pop("figures", None) or content
            process.left.pop(name, None)
            self.changed()

    def _ended(self, process: _Process, why: str = "") -> None:
        """A process is gone: what it was at failed, the rest goes to another one."""
        if process.over:
            return
        process.over = True
        left = process.left
        if not left:
            return
        name = process.at if process.at in left else next(iter(left))
        text = why or f"the process ended with code {process.child.returncode}"
        process.section.done[name] = {
            "failed": text,
            "trace": "\n".join(process.noise)[-1500:],
        }
        rest = [case for key, case in left.items() if key != name]
        if rest:
            self._launch(process.section, rest)
        self.changed()

    def _end_hung(self) -> None:
        """End who has said nothing for longer than its section's cap."""
        now = time.monotonic()
        for process in self._unfinished():
            waits = process.still or (process.ready and not process.measuring)
            if waits or now - process.since < process.section.module.CAP:
                continue
            process.end()
            self._ended(process, f"not finished in {process.section.module.CAP:g} s")

    def _give_turn(self) -> None:
        """Let the next one measure, when nobody measures, and nobody prepares or it is
        late.
        """
        running = self._unfinished()
        if any(p.measuring for p in running):
            return
        ready = [p for p in running if p.ready]
        late = time.monotonic() - self.begin > PREPARING * (self.deadline - self.begin)
        alone = bool(ready) and (late or len(ready) == len(running))
        for process in running:
            process.stand_still(alone and not process.ready)
        if alone:
            ready[0].measuring = True
            ready[0].since = time.monotonic()
            ready[0].tell("go")
