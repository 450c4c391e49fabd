"""A device of the paper's tasks from a profile of this box: measured constants in the place of the paper's.

The box's accelerator stands for the paper's GPU. Loads are those of packed weights for every policy: Samba-CoE does not
pay the framework's load that the paper's does, so ratios over it come out smaller.

Guarantees: each constant says what it was measured on and in which file, or that it is not in the profile. A box
without an accelerator beside its CPU, or an incomplete profile, is refused with the missing entries.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from agent.core.performance import DEVICE, HOST, SSD
from experts.errors import ConfigError
from proof.paper.devices import CPU, GPU, PaperDevice
from proof.paper.tasks import CLASSIFIER, DETECTORS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from agent.device_profile.records import KindProfile, StoredProfile

SUFFIX = ".db"  # of a profile's file
MEASURED, ABSENT = "measured", "not in the profile"
ARCHITECTURES = (CLASSIFIER, *DETECTORS)
LINKS = {SSD: "direct reads from the SSD", HOST: "copies from host memory to the device's"}
INSTEAD = "measure the tasks scaled down on this box: `coserve bench tasks --experts N`"
LOADS = (
    "loads are those of packed weights for every policy, Samba-CoE's too, which pays for a framework's in the paper: "
    "ratios over it come out smaller"
)
SHARED_CORES = "an emulated device runs on the CPU's cores, which the simulation gives to both: too many images/s"
EMULATED = "emulated"  # the name of such a box
PROFILE_IT = "profile a line of all three with `coserve profile LINE.yaml`"


def device_of(profile: StoredProfile, file: Path) -> PaperDevice:
    """The device that was profiled, for the paper's tasks. ``file``: where the profile is from.

    Raises ConfigError for a box without an accelerator, and for a profile without its links, or without resnet101,
    yolov5m and yolov5l on the accelerator and on the CPU.
    """
    return _Reading(profile, file).device()


def device_notes(names: Iterable[str]) -> list[str]:
    return [f"{name}: {text}" for name in names for text in (LOADS, *([SHARED_CORES] if name == EMULATED else []))]


class _Reading:
    def __init__(self, profile: StoredProfile, file: Path) -> None:
        self._profile = profile
        self._file = file
        self._links = profile.link_bytes_per_s
        self._is_split = profile.box.device_bytes is not None
        self._sources = (SSD, HOST) if self._is_split else (SSD,)

    def device(self) -> PaperDevice:
        box = self._profile.box
        accelerator = next((name for name in box.processors if name != CPU), None)
        if accelerator is None or CPU not in box.processors:
            raise ConfigError(
                f"{self._file}: this profile is of a box with {' and '.join(box.processors)} alone ({box.model}), and "
                f"the tasks need an accelerator beside a CPU - {INSTEAD}"
            )
        pairs = self._kinds(accelerator)
        self._require([f"the speed of the {link} link" for link in self._sources if link not in self._links])
        sizes = {HOST: box.host_bytes} | ({} if box.device_bytes is None else {DEVICE: box.device_bytes})
        document = {
            "device": box.device,
            "name": box.model,
            "layout": "split" if self._is_split else "unified",
            "memories": {pool: self._memory(pool, size_bytes) for pool, size_bytes in sizes.items()},
            "links": {f"{link}_bytes_per_s": self._measured(self._links[link], LINKS[link]) for link in self._sources},
            "cores": self._measured(box.cores, "the box"),
            "processors": {GPU: self._processor(accelerator), CPU: self._processor(CPU)},
            "architectures": {name: self._architecture(*pair) for name, pair in pairs.items()},
        }
        try:
            return PaperDevice.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{self._file}: {key}: {first['msg']} - {PROFILE_IT} anew") from error

    def _kinds(self, accelerator: str) -> dict[str, tuple[KindProfile, KindProfile]]:
        """One kind of each architecture, on the accelerator and on the CPU, as the agent runs it there.

        Where there are several, such as two input sizes, the slowest is taken: no figure flatters the box.
        """
        chosen = self._profile.chosen_kinds
        found, lacking = {}, []
        for architecture in ARCHITECTURES:
            there = {
                name: {
                    kind.kind: kind for kind in chosen if (kind.architecture, kind.processor) == (architecture, name)
                }
                for name in (accelerator, CPU)
            }
            both = [(kind, there[CPU][name]) for name, kind in there[accelerator].items() if name in there[CPU]]
            if both:
                found[architecture] = max(both, key=lambda pair: (pair[0].K_s + pair[0].B_s, pair[0].kind))
            elif all(there.values()):
                lacking.append(f"{architecture} with one input size on both {accelerator} and {CPU}")
            lacking += [f"{architecture} on {name}" for name, kinds in there.items() if not kinds]
        self._require(lacking)
        return found

    def _require(self, lacking: Sequence[str]) -> None:
        if lacking:
            raise ConfigError(f"{self._file}: the profile lacks {', '.join(lacking)} - {PROFILE_IT}, or {INSTEAD}")

    def _memory(self, pool: str, size_bytes: int) -> dict[str, Any]:
        """A memory, of which executors may have what the profiled line might."""
        budget_bytes = self._profile.allocation.budget_bytes.get(pool, size_bytes)
        size_bytes = max(size_bytes, budget_bytes)  # a line file may give more than there is
        return {
            "size_bytes": self._measured(size_bytes, f"the {pool} memory"),
            "system_bytes": self._measured(size_bytes - budget_bytes, f"without the line's budget of {budget_bytes}"),
        }

    def _processor(self, processor: str) -> dict[str, Any]:
        factors = self._profile.speedups.get(processor)
        alone = _assumed((1.0,), "assumed; executors that run at once take turns")
        return {
            "executor_bytes": _assumed(0, "assumed; executors are threads of one process, which no budget holds"),
            "speedups": self._measured(factors, f"executors of {processor} at once") if factors else alone,
        }

    def _architecture(self, gpu: KindProfile, cpu: KindProfile) -> dict[str, Any]:
        self._require(
            [f"load times of {gpu.architecture} from {link}" for link in self._sources if link not in gpu.load_s]
        )
        host_s = gpu.load_s.get(HOST) if self._is_split else None
        least_s = (host_s or 0.0) + gpu.weight_bytes / self._links[SSD]  # or the CPU would load for nothing
        is_measured = not self._is_split or gpu.load_s[SSD] >= least_s
        loaded = f"packed {gpu.kind} in {gpu.precision} to {gpu.processor}"
        over = loaded if is_measured else f"{loaded}, at the speeds of its links"
        packed = f"packed {gpu.kind}, the larger of {gpu.precision} and {cpu.precision}"
        return {
            "weight_bytes": self._measured(max(gpu.weight_bytes, cpu.weight_bytes), packed),
            "framework_load_s": {
                "ssd": self._measured(gpu.load_s[SSD] if is_measured else least_s, f"{over}, from the SSD"),
                "host": None if host_s is None else self._measured(host_s, f"{loaded}, from host memory"),
            },
            GPU: self._times(gpu),
            CPU: self._times(cpu),
        }

    def _times(self, kind: KindProfile) -> dict[str, Any]:
        where = f"{kind.kind} on {kind.processor} in {kind.precision}"
        base_bytes = kind.workspace_base_bytes / kind.max_batch
        return {
            "K_s": self._measured(kind.K_s, where),
            "B_s": self._measured(kind.B_s, where),
            "max_batch": self._measured(kind.max_batch, where),
            "workspace_bytes": self._measured(
                max(ceil(kind.workspace_bytes + base_bytes), 1), f"{where}, an image in a batch of {kind.max_batch}"
            ),
        }

    def _measured(self, value: object, what: str) -> dict[str, object]:
        return {"value": value, "source": MEASURED, "derived": f"{what}; {self._file}"}


def _assumed(value: object, why: str) -> dict[str, object]:
    return {"value": value, "source": ABSENT, "derived": why}
