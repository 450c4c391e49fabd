"""One process of ``spinning``: an expert's batches of one and of its maximum, timed over the agent's own path.

It prints one JSON object. How long its threads wait, its environment says: nothing here sets it.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

from agent.config import read_line
from agent.deployment.build import detect_box
from agent.deployment.packed_copies import copy_name, packed_manifests
from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.measuring.rig import MeasuringRig
from experts.expert import Precision
from experts.packed.weights import SegmentStore
from profiler.microbench.batches import ImageCycle
from profiler.microbench.fits import typical_s
from profiler.workload.samples import LineSamples

WARM_RUNS = 2
LEAST_RUNS = 5
LIMIT_S = 0.8  # for each of the two sizes, as long as LEAST_RUNS take less
MOST_RUNS = 60


def main(line: Path, expert: str, precision: Precision, largest: int, threads: int) -> None:
    config = read_line(line)
    (packed,) = (each.packed for each in packed_manifests(config)[expert] if each.packed.precision == precision)
    copy = ExpertCopy(copy_name(expert, precision), config.catalog.experts[expert], packed)
    samples = LineSamples.find(config, None).of(expert)
    times: dict[int, list[float]] = {1: [], largest: []}
    with closing(SegmentStore(config.packed_folder)) as segments:
        rig = MeasuringRig(detect_box(config), "cpu", [copy], segments, threads)
        with rig.opened():
            rig.bring(copy)
            images = ImageCycle(rig, copy, samples)
            for size in [*times] * WARM_RUNS:
                rig.timed_s(copy, images.next(size))
            while open_sizes := [size for size, seconds in times.items() if _goes_on(seconds)]:
                for size in open_sizes:
                    times[size].append(rig.timed_s(copy, images.next(size)))
    print(json.dumps({"one_s": typical_s(times[1]), "largest_s": typical_s(times[largest])}))  # noqa: T201  # its answer


def _goes_on(seconds: list[float]) -> bool:
    return len(seconds) < LEAST_RUNS or (sum(seconds) < LIMIT_S and len(seconds) < MOST_RUNS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Precision(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
