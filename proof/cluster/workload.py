"""Line and trace of the benchmark: experts that declare the bytes and times of a ResNet101 on the paper's GPU.

Weights and the SSD's rate are smaller by one factor, so that 120 experts fit on any disk and a load takes its true
time. A batch sleeps for its true time: the cores of one machine do not compute for three. The images are tiny.
"""

from __future__ import annotations

import io
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml
from PIL import Image

from agent.config import read_line
from experts.packed.weights import slot_bytes
from profiler.workload.generated_line import EVERY_S, drawn_quantities
from profiler.workload.traces import TracedArrival
from proof.cluster.nodes import BOX
from proof.paper.devices import paper_devices

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from agent.config import LineConfig

SHRINK = 10
IMAGE_PX = 8
WORKSPACE_BYTES = 1000  # of an image; it bounds batches to the GPU's largest one
LABEL = "ok"


@dataclass(frozen=True, slots=True)
class Device:
    """A worker's device. ``weight_bytes``, ``ssd_bytes_per_s``: smaller by SHRINK."""

    weight_bytes: int
    ssd_bytes_per_s: float
    K_s: float
    B_s: float
    max_batch: int

    @property
    def load_s(self) -> float:
        return self.weight_bytes / self.ssd_bytes_per_s

    @property
    def most_images_per_s(self) -> float:
        return self.max_batch / (self.K_s * self.max_batch + self.B_s)


def paper_device() -> Device:
    numa = paper_devices()[0]
    resnet = numa.architectures["resnet101"]
    weight_bytes = slot_bytes(round(resnet.weight_bytes.value / SHRINK))  # as memories and budgets count them
    rate = numa.links.ssd_bytes_per_s.value / SHRINK
    gpu = resnet.gpu
    return Device(weight_bytes, rate, gpu.K_s.value, gpu.B_s.value, gpu.max_batch.value)


@dataclass(frozen=True, slots=True)
class Workload:
    """``experts`` component types of one expert each, with a heavy-tailed usage; ``images`` for all of them."""

    device: Device
    experts: int = 120
    workers: int = 3
    held_each: int = 20  # experts that a worker holds where not all fit
    images: int = 3000
    seed: int = 0

    @property
    def quantities(self) -> dict[str, int]:
        """Images of each component on the line's board; also of its expert."""
        return drawn_quantities(self.experts, self.seed)

    @property
    def by_usage(self) -> list[str]:
        return sorted(self.quantities, key=lambda name: -self.quantities[name])

    def trace(self, components: Collection[str], workers: int, every_s: float = EVERY_S) -> list[TracedArrival]:
        """Arrivals for these components: one every ``every_s`` for all workers, and less for fewer."""
        weights = [quantity for name, quantity in self.quantities.items() if name in components]
        count = self.images * workers // self.workers
        drawn = random.Random(self.seed + 1).choices(sorted(components), weights, k=count)
        return [TracedArrival(number * every_s * self.workers / workers, name) for number, name in enumerate(drawn)]

    def write_experts(self, folder: Path) -> None:
        fake = {
            "weight_bytes": self.device.weight_bytes, "K_s": self.device.K_s, "B_s": self.device.B_s,
            "workspace_bytes": WORKSPACE_BYTES, "label": LABEL,
        }  # fmt: skip
        (folder / "fake.yaml").write_text(json.dumps(fake))

    def line(self, folder: Path, address: str, workers: int, held: int, components: Collection[str]) -> LineConfig:
        """Line of all experts, of which each worker has memory for ``held``; its board has these components."""
        workspace_bytes = self.device.max_batch * WORKSPACE_BYTES
        expert = {
            "architecture": "fake", "weights": "fake.yaml", "labels": [LABEL, "bad"],
            "input": {"size": [IMAGE_PX, IMAGE_PX]},
        }  # fmt: skip
        kind = {
            "count": workers, "device": "cpu", "executors": {"cpu": 1}, "resources": {BOX: 1},
            "memory": {
                "host": f"{held * self.device.weight_bytes + workspace_bytes}B", "workspace": f"{workspace_bytes}B",
            },
        }  # fmt: skip
        document = {
            "line": "bench-cluster",
            "state": "./state",
            "experts": {expert_of(name): expert for name in self.quantities},
            "routes": {name: [{"expert": expert_of(name), "pass": [LABEL]}] for name in self.quantities},
            "boards": {"b": {"components": {name: self.quantities[name] for name in components}, "takt_s": 180}},
            "cluster": {"address": address, "workers": [kind]},
        }
        path = folder / "line.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return read_line(path, environment={})


def expert_of(component: str) -> str:
    return f"cls/{component}"


def tiny_image() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (IMAGE_PX, IMAGE_PX)).save(file, "PNG")
    return file.getvalue()
