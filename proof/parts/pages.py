"""Cost of the station's pages: a served line's throughput with pages open over that without, pairs by turns.

The agent is `coserve serve`, with state, inbox and address of its own. Images are PNG files, moved into the inbox at
once. A turn's time runs from there to the last verdict. The pages' own processor time counts, too, as they run on this
machine: a browser of another one costs less. Processor time of the agent alone is told, too: other work on the machine
changes it less than the throughput.
"""

from __future__ import annotations

import io
import math
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import psutil
from PIL import Image

from agent.records.result_reader import ResultReader
from experts.errors import ConfigError, CoServeError
from profiler.bench.measured import Column, Measured, Plan, Target, by_turns, this_machine
from profiler.replay.player import images_of
from profiler.workload.generated_line import removed_afterwards
from proof.parts.starting import agent_of, wait_until_ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.records.verdict import Result
    from profiler.workload.traces import TracedArrival

PAGES, TARGET = 3, 0.98
T_975 = {1: 12.71, 2: 4.303, 4: 2.776, 7: 2.365, 9: 2.262, 11: 2.201, 15: 2.131, 23: 2.069}  # Student's, by freedom
PATTERN = r"(?P<board>[^@]+)@(?P<component>[^@]+)@(?P<ref>[^@]+)\.png"
TURN_LIMIT_S, SETTLE_S, POLLED_S = 600.0, 1.0, 0.1
BROWSER_S = 8.0  # of a browser's start, which is no page's cost
COLUMNS = (
    Column("pages", "pages"),
    Column("pairs", "pairs", "d"),
    Column("images", "images", "d"),
    Column("without, images/s", "images_per_s", ".2f"),
    Column("with", "images_per_s_with", ".2f"),
    Column("ratio", "ratio", ".4f"),
    Column("from", "low", ".4f"),
    Column("to", "high", ".4f"),
    Column("agent's CPU", "cpu_ratio", ".4f"),
)


@dataclass(frozen=True, slots=True)
class PagesCost:
    """``ratio``: geometric mean over pairs; ``low``, ``high``: its 95 % interval. ``cpu_ratio``: the agent's processor
    time with pages over that without, median of pairs. Others are medians of turns."""

    pages: str
    pairs: int
    images: int
    images_per_s: float
    images_per_s_with: float
    ratio: float
    low: float
    high: float
    cpu_ratio: float


class FedTurn(NamedTuple):
    images_per_s: float
    cpu_s: float  # of the agent's processors


class FedAgent:
    """A running agent, and the files that it judges turn by turn."""

    def __init__(self, folder: Path, files: Sequence[tuple[str, bytes]]) -> None:
        self._folder, self._files = folder, files
        self._turns = self._seq = 0
        self._reader = ResultReader(folder / "state" / "results.db")

    def turn(self, agent: psutil.Process) -> FedTurn:
        """Raises CoServeError if a turn takes too long."""
        self._turns += 1
        aside, inbox = self._folder / "aside", self._folder / "inbox"
        aside.mkdir(exist_ok=True)
        for name, content in self._files:
            (aside / f"T{self._turns}-{name}").write_bytes(content)
        time.sleep(SETTLE_S)
        began_s, before = time.time(), agent.cpu_times()
        for file in sorted(aside.iterdir()):
            file.rename(inbox / file.name)
        rows: list[Result] = []
        while len(rows) < len(self._files):
            if time.time() - began_s > TURN_LIMIT_S:
                raise CoServeError(f"{len(rows)} of {len(self._files)} images were judged in {TURN_LIMIT_S:.0f} s")
            time.sleep(POLLED_S)
            page = self._reader.after(self._seq, 0, len(self._files)).results
            rows += page
            self._seq = page[-1].seq if page else self._seq
        after, ended_s = agent.cpu_times(), max(row.finished_at.timestamp() for row in rows)
        cpu_s = after.user + after.system - before.user - before.system
        return FedTurn(len(rows) / (ended_s - began_s), cpu_s)


def measure_pages(
    config: LineConfig,
    trace: Sequence[TracedArrival],
    pairs: int,
    browser: str | None,
    progress: Callable[[int, int], None],
) -> Measured:
    """Each turn judges the trace's images in its order. ``browser``: a Chromium whose pages are open
    instead of clients that ask as pages do. Raises CoServeError."""
    if any(arrival.component is None for arrival in trace):
        raise ConfigError("pages are measured over components - give a trace that names no expert")
    config.state.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with removed_afterwards(config.state, "bench-pages-") as folder:
        fed = FedAgent(folder, _files(config, trace))
        answers: list[str] = []
        with ExitStack() as ending:
            process, log = ending.enter_context(agent_of(config.document.file, **_sections(config, folder, address)))
            wait_until_ready(process, log)
            threading.Thread(target=log.read, name="log", daemon=True).start()  # a full pipe would stop the agent

            agent = psutil.Process(process.pid)

            def seen() -> FedTurn:
                with _open_pages(address, folder, browser, answers):
                    return fed.turn(agent)

            plan = Plan(pairs, warming_up=1, progress=progress)
            runs = by_turns({"without": lambda: fed.turn(agent), "with": seen}, plan)
    name = f"{PAGES} of Chromium" if browser else f"{PAGES} clients"
    cost = _cost(name, len(trace), runs["without"].results, runs["with"].results)
    found = f"{cost.ratio:.4f} [{cost.low:.4f}, {cost.high:.4f}]"
    target = Target("throughput with pages over without", f"at least {TARGET}", found, cost.ratio >= TARGET)
    notes = (f"line {config.line}", *(f"answers of the last turn: {each}" for each in answers[-1:]))
    return Measured(this_machine(), COLUMNS, (cost,), (target,), notes)


def _cost(pages: str, images: int, plain: Sequence[FedTurn], seen: Sequence[FedTurn]) -> PagesCost:
    pairs = list(zip(plain, seen, strict=True))
    logs = [math.log(after.images_per_s / before.images_per_s) for before, after in pairs]
    t = T_975[max(known for known in T_975 if known < len(logs))]
    mean, half = statistics.mean(logs), t * statistics.stdev(logs) / math.sqrt(len(logs))
    return PagesCost(
        pages=pages,
        pairs=len(pairs),
        images=images,
        images_per_s=statistics.median(turn.images_per_s for turn in plain),
        images_per_s_with=statistics.median(turn.images_per_s for turn in seen),
        ratio=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        cpu_ratio=statistics.median(after.cpu_s / before.cpu_s for before, after in pairs),
    )


def _files(config: LineConfig, trace: Sequence[TracedArrival]) -> list[tuple[str, bytes]]:
    """Names and contents; as many parts in a row are a board as the first board type has."""
    quantities = next((board.quantities for board in config.boards.values()), {})
    parts = sum(quantities.values()) or len(trace)
    files = []
    for number, (arrival, image) in enumerate(zip(trace, images_of(trace, config.catalog), strict=True)):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG", compress_level=1)
        files.append((f"B{number // parts}@{arrival.component}@P{number:04d}.png", file.getvalue()))
    return files


def _sections(config: LineConfig, folder: Path, address: str) -> dict[str, object]:
    """The line's own experts and device profile, and nothing else of its state, intake or outbox."""
    state, inbox = folder / "state", folder / "inbox"
    state.mkdir()
    inbox.mkdir()
    if config.packed_folder.exists():
        (state / config.packed_folder.name).symlink_to(config.packed_folder)
    if config.profile_file.exists():
        shutil.copy(config.profile_file, state)
    return {
        "state": str(state), "api": {"grpc": [], "http": address}, "outbox": {},
        "intake": {"folders": [{"path": str(inbox), "pattern": PATTERN, "settle_ms": 0}]},
    }  # fmt: skip


@contextmanager
def _open_pages(address: str, folder: Path, browser: str | None, answers: list[str]) -> Iterator[None]:
    """``answers``: receives the clients' counts."""
    if browser is None:
        command = [sys.executable, "-m", "proof.parts.page_clients", address, str(PAGES)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
            yield
            answers.append(clients.communicate()[0].strip())
        if '"state' not in answers[-1]:
            raise CoServeError(f"no page was answered: {answers[-1]}")
        return
    with ExitStack() as ending:
        for number in range(PAGES):
            profile = f"--user-data-dir={folder / f'browser-{number}'}"
            command = [
                browser, "--headless=new", "--no-sandbox", "--remote-debugging-port=0", profile, f"http://{address}/",
            ]  # fmt: skip
            page = ending.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            ending.callback(page.terminate)
        time.sleep(BROWSER_S)
        yield
