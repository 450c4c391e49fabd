"""Lower bound of a trace's time on this box, by its work and its bytes.

    compute   every step of the trace's requests, run by the same executors with every expert resident and all requests
              queued at once, so that batches are as large as the profile allows
    io        the bytes of needed experts that no memory held at the start, over the present speed of direct reads of
              the line's packed files, or the rate that loads are held to
    roofline  the larger of the two

If memory cannot hold all experts, requests of the least used ones run on others of their kind, which take as long.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING

from agent.deployment.build import AgentOptions
from agent.deployment.deployment import Overrides
from experts.errors import ConfigError
from experts.packed.direct_reads import DirectReader
from experts.packed.weights import ALIGNMENT_BYTES, AlignedBuffer
from profiler.replay.player import player
from profiler.workload.traces import TracedArrival

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from agent.deployment.build import Agent
    from agent.line_file.machine import PolicyName
    from experts.expert import InputSpec
    from experts.packed.weights import Segment
    from profiler.replay.player import Played, Progress

    Kind = tuple[frozenset[str], InputSpec]

RAM_FRACTION = 0.7  # of what is available, for experts that all stay resident
POLICY: PolicyName = "coserve"  # its assignment keeps all executors busy
PASSES = 3  # at most, until one loads nothing
READ_BYTES = 1_500_000_000  # enough to measure the drive's speed


@dataclass(frozen=True, slots=True)
class TraceWork:
    """Expert and image of each step of each request of a trace."""

    experts: tuple[str, ...]
    images: tuple[NDArray[np.uint8], ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """Work with every expert resident. ``loads``: loads in the counted pass, 0 unless memory is too small.

    ``substituted``: steps that ran on another expert of the same kind.
    """

    seconds: float
    loads: int
    substituted: int

    @property
    def note(self) -> str:
        parts = []
        if self.substituted:
            parts.append(f"{self.substituted} steps ran on other experts of their kind: memory cannot hold all")
        if self.loads:
            parts.append(f"{self.loads} loads in it")
        return "; ".join(parts)


def work_of(played: Played, images: Sequence[NDArray[np.uint8]]) -> TraceWork:
    steps = [
        (step.expert, image) for outcome, image in zip(played.outcomes, images, strict=True) for step in outcome.steps
    ]
    return TraceWork(tuple(expert for expert, _ in steps), tuple(image for _, image in steps))


def measure_compute(agent: Agent, work: TraceWork, progress: Progress = lambda *_: None) -> Compute:
    """Run the work with every expert resident, on the executors of this agent, which may have ended.

    One request of each expert goes first, which loads it. Raises ConfigError when nothing was run, or memory cannot
    hold one expert of each kind.
    """
    if not work.experts:
        raise ConfigError(f"{agent.config.document.file}: no request of the trace was judged: nothing to compare with")
    sizes: Counter[str] = Counter()  # bytes of all copies of an expert, shared parts counted for each
    layouts: defaultdict[str, set[str]] = defaultdict(set)
    for packed in agent.packed.values():
        sizes[packed.expert] += sum(segment.slot_bytes for segment in packed.segments)
        layouts[packed.expert].add(packed.layout)
    pixels = {expert: agent.config.catalog.experts[expert].pixels for expert in layouts}
    kinds = {expert: (frozenset(found), pixels[expert]) for expert, found in layouts.items()}  # as long to run
    held = _held(agent, work, sizes, kinds)
    turns = {
        kind: cycle([expert for expert in reversed(held) if kinds[expert] == kind])
        for kind in {kinds[expert] for expert in held}
    }
    stands_for = {
        expert: expert if expert in held else next(turns[kinds[expert]]) for expert in dict.fromkeys(work.experts)
    }
    trace = [TracedArrival(0.0, expert=stands_for[expert]) for expert in work.experts]
    first_uses = {arrival.expert: (arrival, image) for arrival, image in zip(trace, work.images, strict=True)}
    bytes_held = sum(sizes[expert] for expert in held)
    overrides = Overrides(
        agent.setup.executors,
        [replace(pool, expert_bytes=max(bytes_held, pool.expert_bytes)) for pool in agent.setup.pools],
        {expert: float(expert in held) for expert in agent.config.catalog.experts},  # no other takes their room
    )
    options = AgentOptions(profile=agent.stored, overrides=overrides)
    with player(agent.config.having(policy=POLICY), held, options, progress) as stage:
        stage.play([arrival for arrival, _ in first_uses.values()], [image for _, image in first_uses.values()])
        for _ in range(PASSES):
            played = stage.play(trace, work.images)
            loads = sum(played.loads().values())
            if not loads:
                break
    substituted = sum(stands_for[expert] != expert for expert in work.experts)
    return Compute(played.seconds, loads, substituted)


def io_bytes(agent: Agent, played: Played, work: TraceWork) -> int:
    """Bytes of the distinct experts that a trace needed and no memory held at its start, shared parts once."""
    copies = agent.packed
    there = {copies[name].expert for name in played.resident_at_start}
    held = {segment.sha256 for name in played.resident_at_start for segment in copies[name].segments}
    missing: dict[str, int] = {}
    for expert in set(work.experts) - there:
        forms = [packed for packed in copies.values() if packed.expert == expert]
        smallest = min(forms, key=lambda packed: sum(segment.size_bytes for segment in packed.segments))
        missing |= {segment.sha256: segment.size_bytes for segment in smallest.segments}
    return sum(size_bytes for sha256, size_bytes in missing.items() if sha256 not in held)


def measure_bandwidth(agent: Agent) -> float:
    """Bytes per second of direct reads over the line's own packed files, the largest first, one after another."""
    segments: dict[str, tuple[Segment, str]] = {}
    for packed in agent.packed.values():
        segments |= {segment.sha256: (segment, packed.expert) for segment in packed.segments}
    largest_first = sorted(segments.values(), key=lambda each: -each[0].size_bytes)
    read_bytes, seconds = 0, 0.0
    with closing(DirectReader()) as reader, closing(AlignedBuffer(largest_first[0][0].size_bytes)) as buffer:
        buffer.tensor.zero_()  # the first access to untouched memory would count its page faults
        for segment, expert in largest_first:
            path, target = agent.segments.segment_path(segment.sha256), buffer.view[: segment.size_bytes]
            started = time.perf_counter()
            reader.read(path, target, expert)
            seconds += time.perf_counter() - started
            read_bytes += segment.size_bytes
            if read_bytes >= READ_BYTES:
                break
    return read_bytes / seconds


def reads_directly(file: Path) -> bool:
    """True where the filesystem of a packed file allows reads past the page cache."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return hasattr(fcntl, "F_NOCACHE")
    try:
        with (
            closing(AlignedBuffer(ALIGNMENT_BYTES)) as buffer,
            open(file, "rb", 0, opener=lambda path, flags: os.open(path, flags | flag)) as opened,
        ):
            os.preadv(opened.fileno(), [buffer.view], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _held(agent: Agent, work: TraceWork, sizes: Mapping[str, int], kinds: Mapping[str, Kind]) -> list[str]:
    capacity_bytes = int(RAM_FRACTION * min(agent.box.size_of(pool).available_bytes for pool in agent.box.pools))
    by_use = [expert for expert, _ in Counter(work.experts).most_common()]
    firsts = list({kinds[expert]: expert for expert in reversed(by_use)}.values())
    needed_bytes = sum(sizes[expert] for expert in firsts)
    if needed_bytes > capacity_bytes:
        raise ConfigError(
            f"one expert of each kind needs {needed_bytes} bytes, {capacity_bytes} are free for measuring what they "
            "cost to run: end what else runs here, or take an architecture off the trace"
        )
    held, left_bytes = set(firsts), capacity_bytes - needed_bytes
    for expert in by_use:
        if expert not in held and sizes[expert] <= left_bytes:
            held.add(expert)
            left_bytes -= sizes[expert]
    return [expert for expert in by_use if expert in held]
