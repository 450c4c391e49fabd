"""What the journal costs: a trace whose requests are journaled and stored, against the same trace without both.

Each request is accepted in the journal, its image with it, before the agent sees it, and its verdict is stored before
it counts as answered: as cameras and callers have it. Runs go both ways round in turn, so that a machine that slows
down touches both alike; the first pair counts for nothing.
"""

from __future__ import annotations

import io
import statistics
import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from PIL import Image

from agent.deployment.build import AgentOptions
from agent.records.database import StateLock
from agent.records.result_writer import ResultStore
from agent.records.results import Result
from agent.runtime.loop import LoopOptions
from agent.runtime.requests import Ended, Requests
from agent.subject import Subject
from profiler.bench.policy_runs import RunOptions, machine
from profiler.replay.images import experts_of, images_of
from profiler.replay.player import player
from profiler.tables import text_table
from profiler.targets import Target, at_most, targets_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from agent.config import LineConfig
    from agent.core.request import Outcome
    from agent.runtime.executor import RequestSource
    from profiler.replay.player import Progress
    from profiler.workload.traces import TracedArrival

TARGET_COST = 0.05
FILE = "bench-journal.db"


@dataclass(frozen=True, slots=True)
class JournalCost:
    """Medians over ``repeats`` pairs. ``cost``: by how much fewer images a second are judged with the journal;
    ``error``: its standard error, by how much pairs differ; None for a single one."""

    machine: str
    requests: int
    repeats: int
    image_bytes: int  # of all images, as they are journaled
    images_per_s: float
    journaled_images_per_s: float
    cost: float
    error: float | None

    @property
    def target(self) -> Target:
        return at_most("the journal's cost, of the throughput", self.cost, TARGET_COST)


class JournaledRequests(Requests):
    """Requests that are durable before the agent sees them, and whose end is stored before it is told."""

    def __init__(self, store: ResultStore, contents: dict[int, bytes]) -> None:
        super().__init__()
        self._store = store
        self._contents = contents  # by the identity of the image
        self._sent = 0
        self._entered = threading.Semaphore(0)
        self._keys: dict[int, str] = {}

    def submit(self, source: RequestSource, *, component: str | None = None, expert: str | None = None) -> None:
        """As ``Requests.submit``, once it is accepted."""
        self._sent += 1
        key = f"bench/{self._sent}"
        subject = Subject(key, "bench", key, datetime.now(UTC), component, expert)
        enter = partial(self._enter, source, component, expert)
        self._store.accept([subject], self._contents[id(source)], enter)

    def collect(self, progress: Callable[[int, int], None] = lambda *_: None) -> list[Ended]:
        for _ in range(self._sent):
            self._entered.acquire()
        return super().collect(progress)

    def tell(self, number: int, outcome: Outcome) -> None:
        """An outcome has come: it counts once it is stored."""
        now = datetime.now(UTC)
        result = Result(
            Subject(f"bench/{number}", "bench", "", now), line="bench", verdict=outcome.verdict, finished_at=now,
            seconds=0.0, config_sha256="", label=outcome.label, score=outcome.score,
            reason=outcome.reason, experts=tuple(step.expert for step in outcome.steps),
        )  # fmt: skip
        stored = super().tell
        self._store.record(result, lambda _: stored(number, outcome), is_urgent=True)

    def _enter(self, source: RequestSource, component: str | None, expert: str | None, _: object) -> None:
        super().submit(source, component=component, expert=expert)
        self._entered.release()


def measure_journal(
    config: LineConfig,
    trace: Sequence[TracedArrival],
    options: RunOptions | None = None,
    progress: Progress = lambda *_: None,
) -> JournalCost:
    """Play a trace with and without the journal, ``repeats`` times each, after one pair that counts for nothing.

    Raises what ``run_line`` raises.
    """
    options = options or RunOptions()
    config = options.on(config)
    images = images_of(trace, config.catalog)
    contents = {id(image): encoded(image) for image in images}
    speeds: list[tuple[float, float]] = []
    box_text = ""
    with ExitStack() as ending:
        if not options.is_locked:
            ending.enter_context(StateLock(config.state))
        for number in range(1 + options.repeats):
            progress("journal", number, 1 + options.repeats)
            pair = {}
            for is_journaled in (False, True) if number % 2 == 0 else (True, False):
                pair[is_journaled], box_text = _played(config, trace, images, contents, options, is_journaled)
            speeds.append((pair[False], pair[True]))
    progress("journal", 1 + options.repeats, 1 + options.repeats)
    size_bytes = sum(len(contents[id(image)]) for image in images)
    return _cost(box_text, len(trace), size_bytes, speeds[1:])


def report(cost: JournalCost) -> str:
    error = "" if cost.error is None else f", standard error {cost.error:.2%}"
    rows = [
        ("", "images/s"),
        ("without the journal", f"{cost.images_per_s:.2f}"),
        ("with it", f"{cost.journaled_images_per_s:.2f}"),
    ]
    note = (
        f"{cost.machine}\n{cost.requests} requests, {cost.image_bytes / cost.requests / 1024:.0f} KiB of image each, "
        f"{cost.repeats} pairs{error}"
    )
    return f"{note}\n\n{text_table(rows)}\n\n{targets_text([cost.target])}"


def encoded(image: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _played(
    config: LineConfig,
    trace: Sequence[TracedArrival],
    images: Sequence[NDArray[np.uint8]],
    contents: dict[int, bytes],
    options: RunOptions,
    is_journaled: bool,
) -> tuple[float, str]:
    agent_options = AgentOptions(loop=LoopOptions(ssd_bytes_per_s=options.ssd_bytes_per_s))
    with ExitStack() as ending:
        requests = None
        if is_journaled:
            path = config.state / FILE
            _remove(path)
            ending.callback(_remove, path)
            store = ending.enter_context(closing(ResultStore(path)))
            requests = JournaledRequests(store, contents)
        stage = ending.enter_context(
            player(config, experts_of(trace, config.catalog), agent_options, requests=requests)
        )
        return len(trace) / stage.play(trace, images).seconds, machine(stage.agent)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _cost(box_text: str, requests: int, size_bytes: int, speeds: Sequence[tuple[float, float]]) -> JournalCost:
    costs = [1 - journaled / plain for plain, journaled in speeds]
    error = statistics.stdev(costs) / len(costs) ** 0.5 if len(costs) > 1 else None
    plain, journaled = (statistics.median(each) for each in zip(*speeds, strict=True))
    return JournalCost(box_text, requests, len(costs), size_bytes, plain, journaled, statistics.mean(costs), error)
