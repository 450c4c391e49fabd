"""The devices that the paper's tasks are simulated on, by name: one of the paper's own, or a box that was profiled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agent.device_profile.store import read_profile
from experts.errors import ConfigError
from proof.paper.devices import read_device
from proof.paper.measured_device import SUFFIX, device_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proof.paper.devices import PaperDevice

DEVICES = Path(__file__).parents[2] / "configs" / "devices"
DEVICE_FILES = {"numa": "numa-rtx3080ti.yaml", "uma": "uma-apple-m2.yaml"}


def task_devices(names: Sequence[str]) -> tuple[PaperDevice, ...]:
    """These devices, each named as ``task_device`` has it. Raises ConfigError, also for two that are called alike."""
    found = tuple(task_device(name) for name in dict.fromkeys(names))
    called = [device.device for device in found]
    for name in called:
        if called.count(name) > 1:
            raise ConfigError(f"--device: {called.count(name)} of these are {name} - give one of them at a time")
    return found


def task_device(name: str) -> PaperDevice:
    """One of DEVICE_FILES by its name, or the box that a profile (PROFILE.db) was measured on. Raises ConfigError."""
    if name in DEVICE_FILES:
        return read_device(DEVICES / DEVICE_FILES[name])
    if not name.endswith(SUFFIX):
        known = ", ".join(DEVICE_FILES)
        raise ConfigError(f"--device: {name!r} is none of {known}, and no profile of a box (PROFILE{SUFFIX})")
    return device_of(read_profile(Path(name)), Path(name))
