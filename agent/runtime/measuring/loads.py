"""Times of loads and speeds of links, without the page cache, of files already hashed."""

from __future__ import annotations

import itertools
import logging
from statistics import median
from typing import TYPE_CHECKING

from agent.core.performance import HOST, SSD
from agent.runtime.measuring.rig import MeasuringRig
from experts.errors import ExpertError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.machine.box import Box
    from experts.packed.weights import SegmentStore

logger = logging.getLogger(__name__)

LOADS = 8
LOADED_FILES = 4  # in turn, against a drive's own cache


def measure_loads(rig: MeasuringRig, copies: Sequence[ExpertCopy], loads: int = LOADS) -> dict[str, float]:
    """Median seconds of loading all bytes of a copy, by source: "ssd", and "host" for split memory.

    Up to LOADED_FILES alternate; copies that cannot be loaded are skipped. Leaves the rig empty. Raises ExpertError
    if none can be loaded.
    """
    turns = list(itertools.islice(itertools.cycle(_loadable(rig, copies, loads)), loads))
    times = {SSD: median([_load_once_s(rig, copy, rig.target) for copy in turns])}
    if rig.target != HOST:
        times[HOST] = median([_copy_once_s(rig, copy) for copy in turns])
    return times


def measure_links(
    box: Box, copies: Sequence[ExpertCopy], segments: SegmentStore, loads: int = LOADS, processor: str | None = None
) -> dict[str, float]:
    """Bytes per second of "ssd", and of "host" for split memory. Empty if no copy can be loaded. ``processor``: that
    runs these copies; None: the fastest."""
    largest_first = sorted({copy.name: copy for copy in copies}.values(), key=lambda copy: -_file_bytes(copy))
    for copy in largest_first:
        in_turn = alike(copy, largest_first)
        try:
            with MeasuringRig(box, processor or box.processors[0], in_turn, segments, threads=1).opened() as rig:
                times = measure_loads(rig, in_turn, loads)
        except ExpertError as error:  # of a copy, or of memories for the largest of them
            logger.warning("cannot_load copy=%s reason=%s", copy.name, error.message)
            continue
        return {source: _file_bytes(copy) / seconds for source, seconds in times.items()}
    return {}


def alike(copy: ExpertCopy, copies: Iterable[ExpertCopy]) -> list[ExpertCopy]:
    """A copy, followed by others of its layout."""
    return [copy, *(each for each in copies if each is not copy and each.packed.layout == copy.packed.layout)]


def _loadable(rig: MeasuringRig, copies: Sequence[ExpertCopy], loads: int) -> list[ExpertCopy]:
    found: list[ExpertCopy] = []
    reasons: list[ExpertError] = []
    for copy in copies:
        try:
            _load_once_s(rig, copy, rig.target)
        except ExpertError as error:
            reasons.append(error)
        else:
            found.append(copy)
        if len(found) == min(LOADED_FILES, loads):
            break
    if not found:
        raise reasons[0]
    return found


def _load_once_s(rig: MeasuringRig, copy: ExpertCopy, pool: str) -> float:
    seconds = rig.load(copy, pool, SSD)
    rig.evict(copy, pool)
    return seconds


def _copy_once_s(rig: MeasuringRig, copy: ExpertCopy) -> float:
    rig.load(copy, HOST)
    seconds = rig.load(copy, rig.target, HOST)
    rig.clear()
    return seconds


def _file_bytes(copy: ExpertCopy) -> int:
    return sum(segment.size_bytes for segment in copy.packed.segments)
