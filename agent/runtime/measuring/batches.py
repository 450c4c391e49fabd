"""Batches of growing size on one expert, timed and weighed: the runs behind a kind's curve.

Guarantees: sizes are tried upwards until the average latency has not improved for STOP_AFTER sizes. Trials also end
when the next size would not fit into the time or into MEMORY_FRACTION of the free memory, or fails for memory. Times
are of whole rounds over all sizes, upwards and downwards in turn; trials count only where no round fitted in. The
smallest size, which an agent runs most often, is run again between the others for at most EXTRA_FRACTION of a round's
time.

Images are prepared before their batches, once each; each image of a batch has separate memory, as in an agent.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.core.events import BatchFailed
from agent.device_profile.records import BatchTimes
from agent.runtime.measuring.fits import typical_s
from agent.runtime.measuring.rig import noise
from experts.backends import backend_for
from experts.errors import LoadError
from experts.expert import Precision, Rejected

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.images.sources import ImageSource
    from agent.runtime.measuring.meter import WorkspaceMeter
    from agent.runtime.measuring.rig import MeasuringRig, TimedBatch
    from experts.backends.base import Prepared

logger = logging.getLogger(__name__)

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
STOP_AFTER = 3
PEAK_RUNS = 2  # weighings of each batch size; the largest counts. They also warm up
TRIAL_RUNS = 2  # timings of each size while sizes grow; the fastest decides whether to go on
LEAST_ROUNDS = 3  # that must fit into the time for a size to be tried, unless fewer are wanted
EXTRA_RUNS = 4  # of the smallest size in a round, at most
EXTRA_FRACTION = 0.08  # of a round's time that they may take
MEMORY_FRACTION = 0.5
NEARLY = 0.9  # of the limit: ``why_no_larger`` has only times of rounds, and first runs are slower


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """``limit_s``: for all batches of one kind; the smallest size is always run. ``repeats``: rounds, at most."""

    sizes: tuple[int, ...] = SIZES
    repeats: int = 7
    limit_s: float = 60.0
    peak_runs: int = PEAK_RUNS

    def needed_s(self, size: int, tried: Iterable[int], average_s: float) -> float:
        """Seconds of a size's first runs and of the rounds that must fit in after them."""
        rounds = min(LEAST_ROUNDS, self.repeats) * (size + sum(tried))
        return ((self.peak_runs + TRIAL_RUNS) * size + rounds) * average_s


def why_no_larger(batches: Sequence[BatchTimes], options: BatchOptions, free_bytes: int) -> str:
    """Reason why no larger size than these, ascending, was run while the average latency still fell.

    The rules of ``BatchRuns`` are applied to the measured times, and to the memory that is free now.
    """
    largest = batches[-1]
    following = min((size for size in options.sizes if size > largest.batch_size), default=None)
    if following is None:
        return "no larger ones are tried"
    times = {batch.batch_size: typical_s(batch.seconds) for batch in batches}
    spent_s = (options.peak_runs + TRIAL_RUNS) * sum(times.values())
    average_s = times[largest.batch_size] / largest.batch_size
    if spent_s + options.needed_s(following, times, average_s) > NEARLY * options.limit_s:
        return f"those of {following} would not fit into the {options.limit_s:g} s that a kind is measured for"
    if largest.workspace_bytes * following / largest.batch_size > MEMORY_FRACTION * free_bytes:
        return f"those of {following} would need more than half of the free memory"
    return "memory did not suffice, or an earlier version tried no larger ones: --fresh measures them again"


class ImageCycle:
    """Prepared images for batch after batch, in a cycle: these, or noise.

    All are prepared at once, on an open rig. Raises LoadError where memory does not suffice.
    """

    def __init__(self, rig: MeasuringRig, copy: ExpertCopy, sources: Sequence[ImageSource] = ()) -> None:
        try:
            self._endless = itertools.cycle(rig.prepared(copy, sources or [noise(copy)]))
        except MemoryError as error:
            raise LoadError(copy.expert.id, "there is no memory to prepare its images") from error

    def next(self, count: int) -> list[Prepared | Rejected]:
        """Next ``count`` images, each in separate memory. Raises MemoryError."""
        try:
            return [
                image if isinstance(image, Rejected) else replace(image, tensor=image.tensor.clone())
                for image in itertools.islice(self._endless, count)
            ]
        except RuntimeError as error:  # torch's, of its allocator
            raise MemoryError(str(error)) from error


class BatchRuns:
    """Runs of one expert, which the rig holds ready. ``meter`` was made after ``images``, before the first batch.

    ``free_bytes``: free in the memory that the processor runs from.
    """

    def __init__(
        self,
        rig: MeasuringRig,
        copy: ExpertCopy,
        images: ImageCycle,
        meter: WorkspaceMeter | None,
        free_bytes: int,
        options: BatchOptions,
    ) -> None:
        self._rig = rig
        self._copy = copy
        self._images = images
        self._meter = meter
        self._most_bytes = free_bytes * MEMORY_FRACTION
        self._options = options
        self._workspaces: dict[int, int] = {}
        self._trials: dict[int, list[float]] = {}
        self._spent_s = 0.0

    def measure(self) -> tuple[BatchTimes, ...]:
        """Ascending by size. Raises LoadError when not even the smallest batch runs."""
        for size in sorted(self._options.sizes):
            if self._trials and not self._is_worth_trying(size):
                break
            if not self._try(size):
                break
        times: dict[int, list[float]] = {size: [] for size in self._trials}
        round_s = sum(min(trials) for trials in self._trials.values())
        rounds = 0
        while rounds < self._options.repeats and self._spent_s + round_s <= self._options.limit_s:
            left_s = self._options.limit_s - self._spent_s - max(LEAST_ROUNDS - rounds, 1) * round_s
            smallest_s = min(self._trials[min(self._trials)])
            extra = max(min(EXTRA_RUNS, int(EXTRA_FRACTION * round_s / smallest_s), int(left_s / smallest_s)), 0)
            for size in _round_of(sorted(self._trials), extra, downwards=rounds % 2 == 1):
                times[size].append(self._time(size))
            rounds += 1
        return tuple(
            BatchTimes(size, tuple(times[size] or trials), self._workspaces[size])
            for size, trials in self._trials.items()
        )

    def _is_worth_trying(self, size: int) -> bool:
        """True where this size fits into time and memory, and may still make an image cheaper."""
        averages = [min(times) / tried for tried, times in self._trials.items()]
        since_best = len(averages) - 1 - averages.index(min(averages))
        largest = max(self._trials)
        needed_s = self._options.needed_s(size, self._trials, averages[-1])
        reasons = {
            "average": since_best >= STOP_AFTER,
            "time": self._spent_s + needed_s > self._options.limit_s,
            "memory": self._workspaces[largest] * size / largest > self._most_bytes,
        }
        for reason in (reason for reason, applies in reasons.items() if applies):
            logger.debug("sizes_end copy=%s largest=%d reason=%s", self._copy.name, largest, reason)
            return False
        return True

    def _try(self, size: int) -> bool:
        """Weigh and time a size for the first time. False where memory did not suffice for it."""
        peaks = []
        for _ in range(self._options.peak_runs):
            peak_bytes = self._peak_bytes(size)
            if peak_bytes is None:
                return False
            peaks.append(peak_bytes)
            if self._spent_s > self._options.limit_s:
                break
        times = [self._time(size)]
        while len(times) < TRIAL_RUNS and self._spent_s + times[0] <= self._options.limit_s:
            times.append(self._time(size))
        self._workspaces[size], self._trials[size] = max(peaks), times
        return True

    def _peak_bytes(self, size: int) -> int | None:
        """The workspace of one batch, measured or estimated; None where memory did not suffice for it."""
        answers: list[TimedBatch | BatchFailed] = []
        try:
            images = self._images.next(size)
        except MemoryError as error:
            self._end_growing(str(error))
            return None

        def run() -> None:
            answers.append(self._rig.attempt(self._copy, images))

        if self._meter is not None:
            peak_bytes = self._meter.peak_bytes(run)
        else:
            run()
            expert, packed = self._copy.expert, self._copy.packed
            backend = backend_for(expert.architecture)
            peak_bytes = backend.workspace_bytes(expert, Precision(packed.precision), size)
        (answer,) = answers
        if isinstance(answer, BatchFailed):
            if answer.out_of_memory:
                self._end_growing(answer.reason)
                return None
            raise LoadError(self._copy.expert.id, answer.reason)
        self._spent_s += answer.seconds
        return peak_bytes

    def _end_growing(self, reason: str) -> None:
        """Memory did not suffice: no larger size is tried. Raises LoadError where not even the smallest has run."""
        if not self._trials:
            raise LoadError(self._copy.expert.id, reason)
        logger.debug("sizes_end copy=%s largest=%d reason=out of memory", self._copy.name, max(self._trials))

    def _time(self, size: int) -> float:
        seconds = self._rig.timed_s(self._copy, self._images.next(size))
        self._spent_s += seconds
        return seconds


def _round_of(sizes: Sequence[int], extra: int, *, downwards: bool) -> list[int]:
    """Sizes of a round: each once, in ascending order, and the smallest ``extra`` times more, evenly spread."""
    order = list(reversed(sizes)) if downwards else list(sizes)
    for number in range(extra, 0, -1):
        order.insert(number * len(sizes) // (extra + 1), sizes[0])
    return order
