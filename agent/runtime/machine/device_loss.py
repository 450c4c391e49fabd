"""Classification of errors: a lost accelerator, a lack of memory, or a failed batch or load.

After some errors (an illegal access, an uncorrectable ECC error) the device fails for every expert, and only a new
process gets a working context: such an error blames no expert. It ends the agent, or the device's executors. An error
that names such a cause is a loss; after any other error of an executor or a memory of the device, the device is probed.

The error of a lost context is sticky: registrations and probes fail or hang until the process ends. So after the first
loss, found by an error, a probe or the watchdog, nothing registers, unregisters or probes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agent.core.performance import HOST, tier_of
from agent.faults.errors import DeviceLost
from agent.runtime.machine.box import exclusive

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.runtime.machine.box import Box
    from experts.errors import CoServeError

SPEAKERS = ("cuda error", "cuda failure", "cuda driver error", "hip error")  # torch, ONNX Runtime, torch again
LOSSES = (  # texts of cudaGetErrorString
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "hardware stack error",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out and was terminated",
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "context is destroyed",
    "busy or unavailable",
    "no cuda-capable device",
    "driver shutting down",
)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Posted instead of the answer of this executor or load, whose device is lost. Else the agent must end."""

    error: Exception
    executor: int | None = None
    load: int | None = None


class DeviceContext:
    """An agent's view of this process's context on its accelerator. A loss is final. Thread-safe."""

    def __init__(self) -> None:
        self.is_lost = False

    def lose(self) -> None:
        self.is_lost = True


class DeviceWatch:
    """``probe`` waits for the device and raises if the device fails; None without an accelerator.

    ``outlives``: the watched memory serves the CPU after a loss, so that later errors are its own.
    """

    def __init__(
        self,
        device: str = "cpu",
        probe: Callable[[], None] | None = None,
        context: DeviceContext | None = None,
        *,
        outlives: bool = False,
    ) -> None:
        self._device = device
        self._probe = probe
        self._context = context or DeviceContext()
        self._outlives = outlives

    def lost_by(self, error: Exception) -> CoServeError | None:
        lost = self._found_by(error)
        if lost is not None:
            self._context.lose()
        return lost

    def _found_by(self, error: Exception) -> CoServeError | None:
        if names_a_loss(error):
            return DeviceLost(self._device, _text_of(error))
        if self._probe is None:
            return None
        if self._context.is_lost:
            return None if self._outlives else DeviceLost(self._device, f"it was lost before {_text_of(error)}")
        try:
            self._probe()
        except torch.OutOfMemoryError:
            return None
        except Exception as refusal:  # noqa: BLE001 - the device does not work
            return DeviceLost(self._device, f"{_text_of(refusal)} (after {_text_of(error)})")
        return None


NO_ACCELERATOR = DeviceWatch()


def watch_of(processor: str, context: DeviceContext | None = None, *, outlives: bool = False) -> DeviceWatch:
    """Watch of an executor of this processor. An executor of the CPU probes no device."""
    probes: dict[str, Callable[[], None]] = {"cuda": torch.cuda.synchronize, "mps": _finish_metal}
    return DeviceWatch(tier_of(processor), probes.get(tier_of(processor)), context, outlives=outlives)


def _finish_metal() -> None:
    with exclusive("mps"):
        torch.mps.synchronize()


def watch_of_memory(box: Box, pool: str, context: DeviceContext | None = None) -> DeviceWatch:
    """Watch of the loads into a memory: the fastest processor's, if that runs from the memory."""
    fastest = box.processors[0]
    is_its = box.pool_of(fastest) == tier_of(pool)
    return watch_of(fastest if is_its else "cpu", context, outlives=tier_of(pool) == HOST)


def names_a_loss(error: Exception) -> bool:
    text = str(error).lower()
    speaks = isinstance(error, torch.AcceleratorError) or any(speaker in text for speaker in SPEAKERS)
    return speaks and any(loss in text for loss in LOSSES)


def _text_of(error: Exception) -> str:
    """First line of an error: torch appends advice for programmers."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
