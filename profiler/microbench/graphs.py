"""Gain of CUDA graphs: small batches and iterations of one kind, kernel by kernel and by graphs in turns."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from agent.deployment.executors import GRAPHS_BYTES
from agent.runtime.executor import model_of
from agent.runtime.measuring.batches import ImageCycle
from agent.runtime.measuring.rig import seconds_of
from agent.runtime.measuring.text_times import TextTimer, on_executor_thread
from experts.backends.base import Prepared
from experts.devices.graphs import RUNS_BEFORE, DeviceGraphs, Recorder, using_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.measuring.rig import MeasuringRig
    from experts.backends.base import Skeleton
    from profiler.microbench.bench import Bench

SIZES = (1, 2, 4)  # images, or texts
TURNS = RUNS_BEFORE + 6  # the fastest counts, which captures nothing


def measure_graphs(bench: Bench, copy: ExpertCopy) -> tuple[float, float]:
    """Seconds of all SIZES without graphs, and with them. Raises ExpertError."""

    def measured() -> tuple[float, float]:
        graphs, eager_s, graphs_s = DeviceGraphs(Recorder(), GRAPHS_BYTES), 0.0, 0.0
        for size in SIZES:
            with _running(rig, copy, skeleton, size) as run:
                turns = [(_seconds(run, None), _seconds(run, graphs)) for _ in range(TURNS)]
            eager_s, graphs_s = eager_s + min(turn[0] for turn in turns), graphs_s + min(turn[1] for turn in turns)
        return eager_s, graphs_s

    with bench.rig([copy]).opened() as rig:
        rig.bring(copy)
        with rig.skeleton_of(copy) as skeleton:
            return on_executor_thread(measured, rig.device, rig.threads)


@contextmanager
def _running(rig: MeasuringRig, copy: ExpertCopy, skeleton: Skeleton, size: int) -> Iterator[Callable[[], object]]:
    if copy.expert.takes_texts:
        with TextTimer(copy.expert.id, model_of(skeleton), 0.0).writing(size) as write:
            yield write
    else:
        images = [each for each in ImageCycle(rig, copy).next(size) if isinstance(each, Prepared)]
        yield lambda: skeleton.infer(copy.expert, images)


def _seconds(run: Callable[[], object], graphs: DeviceGraphs | None) -> float:
    with using_graphs(graphs):
        return seconds_of(run)
