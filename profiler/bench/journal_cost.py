"""Cost of the journal: a trace whose requests are journaled and stored, alternating with the trace without both.

As for cameras and callers, a request and its image are journaled before submission. A verdict is stored before the
request counts as answered.
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

from agent.records.database import state_held
from agent.records.result_writer import ResultStore
from agent.records.verdict import Result
from agent.runtime.requests import Ended, Requests
from agent.subject import Subject
from profiler.bench.measured import Column, Measured, Plan, at_most, by_turns
from profiler.bench.policy_runs import RunOptions, machine
from profiler.replay.player import experts_of, images_of, player
from profiler.workload.generated_line import removed_afterwards

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from agent.config import LineConfig
    from agent.core.request import Outcome
    from agent.runtime.executor import RequestSource
    from profiler.replay.player import Progress
    from profiler.workload.traces import TracedArrival

TARGET_COST = 0.05
WITHOUT, WITH = "without the journal", "with it"
COLUMNS = (
    Column("requests", "requests", "d"),
    Column("without the journal, images/s", "images_per_s", ".2f"),
    Column("with it", "journaled_images_per_s", ".2f"),
    Column("cost", "cost", ".2%"),
    Column("standard error", "error", ".2%"),
)


@dataclass(frozen=True, slots=True)
class JournalCost:
    """Medians over pairs. ``cost``: share of the images/s; ``error``: its standard error, None for a single pair.

    ``image_bytes``: size of all images, as journaled.
    """

    requests: int
    repeats: int
    image_bytes: int
    images_per_s: float
    journaled_images_per_s: float
    cost: float
    error: float | None


class JournaledRequests(Requests):
    """Requests that are durable before the agent sees them; an outcome is stored before it counts.

    ``contents``: encoded images by the identity of the decoded one.
    """

    def __init__(self, store: ResultStore, contents: dict[int, bytes]) -> None:
        super().__init__()
        self._store = store
        self._contents = contents
        self._sent = 0
        self._entered = threading.Semaphore(0)

    def submit(self, source: RequestSource, *, component: str | None = None, expert: str | None = None) -> None:
        self._sent += 1
        key = f"bench/{self._sent}"
        subject = Subject(key, "bench", key, datetime.now(UTC), component, expert)
        enter = partial(super().submit, source, component=component, expert=expert)

        def accepted(_: object) -> None:
            enter()
            self._entered.release()

        self._store.accept([subject], self._contents[id(source)], accepted)

    def collect(self, progress: Callable[[int, int], None] = lambda *_: None) -> list[Ended]:
        for _ in range(self._sent):
            self._entered.acquire()
        return super().collect(progress)

    def report(self, number: int, outcome: Outcome) -> None:
        now = datetime.now(UTC)
        result = Result(
            Subject(f"bench/{number}", "bench", "", now), line="bench", verdict=outcome.verdict, finished_at=now,
            seconds=0.0, config_sha256="", label=outcome.label, score=outcome.score,
            reason=outcome.reason, experts=tuple(step.expert for step in outcome.steps),
        )  # fmt: skip
        stored = super().report
        self._store.record(result, lambda _: stored(number, outcome), is_urgent=True)


def measure_journal(
    config: LineConfig,
    trace: Sequence[TracedArrival],
    options: RunOptions,
    progress: Progress = lambda *_: None,
) -> Measured:
    """Play a trace with and without the journal, ``repeats`` times each, after a pair to warm up.

    Raises as ``run_line`` does.
    """
    config = options.on(config, *options.precisions)
    images = images_of(trace, config.catalog)
    contents = {id(image): encoded(image) for image in images}
    machines: list[str] = []

    def seconds(journaled: bool) -> float:
        with ExitStack() as ending:
            requests: Requests | None = None
            if journaled:
                folder = ending.enter_context(removed_afterwards(config.state, "bench-journal-"))
                store = ending.enter_context(closing(ResultStore(folder / "results.db")))
                requests = JournaledRequests(store, contents)
            experts = experts_of(trace, config.catalog)
            stage = ending.enter_context(player(config, experts, options.agent_options, requests=requests))
            machines.append(machine(stage.agent))
            return stage.play(trace, images).seconds

    with state_held(config.state):
        plan = Plan(options.repeats, warming_up=1, progress=lambda done, total: progress("journal", done, total))
        runs = by_turns({WITHOUT: lambda: seconds(False), WITH: lambda: seconds(True)}, plan)
    speeds = [
        (len(trace) / plain, len(trace) / journaled)
        for plain, journaled in zip(runs[WITHOUT].results, runs[WITH].results, strict=True)
    ]
    costs = [1 - journaled / plain for plain, journaled in speeds]
    images_per_s, journaled_images_per_s = (statistics.median(each) for each in zip(*speeds, strict=True))
    cost = JournalCost(
        requests=len(trace),
        repeats=len(costs),
        image_bytes=sum(len(contents[id(image)]) for image in images),
        images_per_s=images_per_s,
        journaled_images_per_s=journaled_images_per_s,
        cost=statistics.mean(costs),
        error=statistics.stdev(costs) / len(costs) ** 0.5 if len(costs) > 1 else None,
    )
    note = f"{cost.image_bytes / cost.requests / 1024:.0f} KiB of image each, {cost.repeats} pairs"
    target = at_most("the journal's cost, of the throughput", cost.cost, TARGET_COST)
    return Measured(machines[0], COLUMNS, (cost,), (target,), (note,))


def encoded(image: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", compress_level=1)
    return file.getvalue()
