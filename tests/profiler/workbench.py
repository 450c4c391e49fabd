"""Experts of one line's store, packed one by one, with samples: what tests of microbenchmarks measure."""

import json
import shutil

import numpy as np
from PIL import Image

from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.machine.detection import detect
from experts.expert import Expert, InputSpec
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore
from profiler.microbench.bench import Bench
from profiler.workload.samples import LineSamples, Sample

LABELS = ("ok", "bad")


class Workbench:
    """A line's store and samples; packs experts in one precision or another, from one file or another.

    Each is packed on its own and its files are brought together: a line would keep one file for an expert.
    """

    def __init__(self, folder):
        self.folder = folder
        self.store = SegmentStore(folder / "packed")

    def copy(self, expert, precision):
        alone = SegmentStore(self.folder / f"{expert.weights.stem}-{precision}")
        packed = pack_line([expert], lambda _: {precision}, alone).packed[expert.id][precision]
        alone.close()
        shutil.copytree(alone.directory, self.store.directory, dirs_exist_ok=True)
        return ExpertCopy(f"{expert.id}@{precision}", expert, packed)

    def fake(self, name, precision, label=None):
        weights = self.folder / f"{name}-{label}.yaml"
        weights.write_text(json.dumps({"weight_bytes": 5000, "label": label}))
        return self.copy(Expert(f"cls/{name}", "fake", weights, LABELS, InputSpec(8, 8)), precision)

    def images(self, name, count):
        """Samples of an expert, each of another colour."""
        samples = []
        for number in range(count):
            path = self.folder / f"{name}-{number}.png"
            Image.fromarray(np.full((12, 12, 3), 10 + 40 * number % 240, np.uint8)).save(path)
            samples.append(Sample(path, name, None, "inbox"))
        return tuple(samples)

    def bench(self, **samples):
        by_expert = {f"cls/{name}": listed for name, listed in samples.items()}
        return Bench(detect("cpu"), "cpu", self.store, LineSamples(by_expert))
