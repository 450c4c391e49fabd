"""Time until an agent takes requests, and its memory: ``coserve serve`` of a line with one tiny classifier.

The agent is a separate process, timed up to the log line that reports it ready. A first start warms up: it packs the
expert, and leaves the files of Python and the runtimes in the page cache.
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import psutil
import yaml

from experts.errors import CoServeError
from profiler.bench.measured import Column, Measured, Target, this_machine
from profiler.workload.generated_line import LineRecipe, generate_line, removed_afterwards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TARGET_READY_S = 10.0
TARGET_RESIDENT_BYTES = 400_000_000
READY = re.compile(r"\bready line=")
START_LIMIT_S = 120.0
SETTLED_S = 5.0  # after READY an agent releases pages; what serving needs of them comes back
STOP_LIMIT_S = 40.0  # an agent drains for 25 s at most
ARCHITECTURE, IMAGE_PX = "squeezenet1_1", 64
LINES_SHOWN = 10
PATTERN = r"(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)\.png"
COLUMNS = (
    Column("starts", "starts", "d"),
    Column("ready s", "ready_s", ".1f"),
    Column("resident MB", "resident_bytes", ".0f", 1e-6),
    Column("anonymous MB", "anonymous_bytes", ".0f", 1e-6),
    Column("stop s", "stop_s", ".1f"),
)


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Medians over ``starts``. ``stop_s``: from SIGTERM to the end of the process. Bytes: SETTLED_S after READY."""

    starts: int
    ready_s: float
    resident_bytes: int
    anonymous_bytes: int
    stop_s: float

    @property
    def targets(self) -> tuple[Target, Target]:
        small, resident = f"at most {TARGET_RESIDENT_BYTES / 1e6:.0f} MB", f"{self.resident_bytes / 1e6:.0f} MB"
        is_soon, is_small = self.ready_s <= TARGET_READY_S, self.resident_bytes <= TARGET_RESIDENT_BYTES
        return (
            Target("the agent is READY within", f"{TARGET_READY_S:.0f} s", f"{self.ready_s:.1f} s", is_soon),
            Target("the agent without experts holds", small, resident, is_small),
        )


def measure_start(directory: Path, starts: int = 3, *, warm: bool = True) -> Measured:
    """Start and stop an agent ``starts`` times. ``warm``: after a start that does not count.

    Files in ``directory`` are removed afterwards, and the agent is ended, also after Ctrl-C and SIGTERM. Raises
    CoServeError, with the last lines of the log, when an agent ends by itself or is not ready in time.
    """
    with removed_afterwards(directory, "bench-start-") as folder:
        line = _line(folder / "line")
        measured = [start_once(line) for _ in range(starts + warm)][warm:]
    times = StartTimes(
        starts,
        statistics.median(each.ready_s for each in measured),
        statistics.median_low(each.resident_bytes for each in measured),
        statistics.median_low(each.anonymous_bytes for each in measured),
        statistics.median(each.stop_s for each in measured),
    )
    note = f"one {ARCHITECTURE}, one watched folder, warm file cache"
    return Measured(this_machine(), COLUMNS, (times,), times.targets, (note,))


def start_once(line: Path) -> StartTimes:
    """Serve a line until it is ready, then end it.

    Raises CoServeError when the agent ends by itself, is not ready in time, or does not end.
    """
    with agent_of(line) as (process, log):
        started = time.perf_counter()
        wait_until_ready(process, log)
        ready_s = time.perf_counter() - started
        drained = threading.Thread(target=log.read, name="log", daemon=True)
        drained.start()  # a full pipe would stop the agent
        time.sleep(SETTLED_S)
        memory = psutil.Process(process.pid).memory_info()
        stopping_s = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise CoServeError(f"the agent did not end within {STOP_LIMIT_S:.0f} s of SIGTERM") from error
        stop_s = time.perf_counter() - stopping_s
        drained.join()
    return StartTimes(1, ready_s, memory.rss, memory.rss - getattr(memory, "shared", 0), stop_s)


def _line(folder: Path) -> Path:
    recipe = LineRecipe(
        classifiers=1, architecture=ARCHITECTURE, requests=1, memory_for=1, classifier_px=IMAGE_PX, images=1
    )
    line = generate_line(folder, recipe).line
    (folder / "inbox").mkdir()
    document = yaml.safe_load(line.read_text())
    document["intake"] = {"folders": [{"path": "./inbox", "pattern": PATTERN}]}
    line.write_text(yaml.safe_dump(document, sort_keys=False))
    return line


@contextmanager
def agent_of(line: Path, **sections: object) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Context: `coserve serve` of a line with these sections instead of the file's, and its log. Killed at the end."""
    overlay = [f"COSERVE__{name.upper()}={json.dumps(section)}" for name, section in sections.items()]
    command = ["env", *overlay, sys.executable, "-m", "coserve", "serve", str(line)]
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    with ThreadPoolExecutor(1) as thread:  # no signal interrupts it between a process's start and its listing
        try:
            process = thread.submit(start).result()
            assert process.stderr is not None
            yield process, process.stderr
        finally:
            thread.shutdown()
            for process in started:
                with process:
                    process.kill()


def wait_until_ready(process: subprocess.Popen[str], log: IO[str]) -> None:
    """Raises CoServeError, with the last lines of the log."""
    too_long = threading.Timer(START_LIMIT_S, process.kill)  # ends the log, and so the loop below
    too_long.start()
    lines: list[str] = []
    try:
        for line in log:
            if READY.search(line):
                return
            lines = [*lines[1 - LINES_SHOWN :], line.rstrip()]
    finally:
        too_long.cancel()
        too_long.join()
    last = "\n".join(lines)
    raise CoServeError(f"the agent was not ready within {START_LIMIT_S:.0f} s, or ended by itself. Its log:\n{last}")
