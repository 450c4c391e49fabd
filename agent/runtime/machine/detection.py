"""Detection of the box: processors, memories within their control groups, libraries."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

import psutil
import torch

from agent.runtime.machine.box import Box, MemorySize
from experts.backends.capabilities import JETSON, capabilities_of
from experts.backends.control_groups import GROUPS, MEMBERSHIP, cores, own_groups, text_of
from experts.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARIES = ("torch", "torchvision", "ultralytics", "onnxruntime")
PREFERENCES = ("auto", "cpu", "cuda", "mps", "emulated", "integrated")
NVIDIA, DISPLAY = "0x10de", "0x03"  # vendor, and prefix of the class, of a PCI device
PROCESSORS = {"cuda": ("cuda", "cpu"), "jetson": ("cuda", "cpu"), "mps": ("mps",)}
ANSWER_S = 60.0  # of a device: the first call loads its libraries
EMULATED_FRACTION = 0.25  # arbitrary: of the host's available memory, if no size is configured


def detect(preference: str = "auto") -> Box:
    """Detect the box by ``preference``, one of PREFERENCES. "auto" is the CPU where an accelerator does not work.

    Raises BackendUnavailable, with the remedy, for a missing or broken device.
    """
    if preference not in PREFERENCES:
        raise BackendUnavailable(preference, f"no such device: choose one of {', '.join(PREFERENCES)}")
    if preference == "auto":
        return _best_box()
    if preference == "cuda":
        return _cuda_box()
    if preference == "mps":
        return _mps_box()
    if preference == "emulated":
        host = host_memory()
        size = int(host.available_bytes * EMULATED_FRACTION)
        return _box("emulated", _cpu_model(), ("emulated", "cpu"), host, MemorySize(size, size))
    processors = ("integrated", "cpu") if preference == "integrated" else ("cpu",)
    return _box(processors[0], _cpu_model(), processors, host_memory(), None)


def _best_box() -> Box:
    fault = ""
    for is_there, box in ((torch.cuda.is_available, _cuda_box), (torch.backends.mps.is_available, _mps_box)):
        try:
            if is_there():
                return box()
        except Exception as error:  # noqa: BLE001 - of a driver: the CPU serves, and an alarm says why
            fault = _first_line(error)
    if not fault and has_nvidia_gpu():
        fault = "torch does not see this box's NVIDIA GPU: see to nvidia-smi"
    return replace(detect("cpu"), fault=fault)


def has_nvidia_gpu(devices: Path = Path("/sys/bus/pci/devices"), release: Path = JETSON) -> bool:
    """True for a Jetson, and if the PCI bus has an NVIDIA GPU, even without a driver."""
    return release.exists() or any(
        text_of(device / "vendor") == NVIDIA and text_of(device / "class").startswith(DISPLAY)
        for device in devices.glob("*")
    )


def host_memory(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> MemorySize:
    """Host memory, within the limits of this process's control groups (systemd unit, container)."""
    memory = psutil.virtual_memory()
    total_bytes, available_bytes = int(memory.total), int(memory.available)
    for group in own_groups(groups, membership):
        limit_bytes = _read_bytes(group / "memory.max")
        if limit_bytes is None:
            continue
        used_bytes = (_read_bytes(group / "memory.current") or 0) - _reclaimable_bytes(group / "memory.stat")
        total_bytes = min(total_bytes, limit_bytes)
        available_bytes = min(available_bytes, max(limit_bytes - used_bytes, 0))
    return MemorySize(total_bytes, available_bytes)


def _read_bytes(file: Path) -> int | None:
    text = text_of(file)
    return int(text) if text.isdigit() else None


def _reclaimable_bytes(statistics: Path) -> int:
    """Page cache that the kernel drops first."""
    lines = text_of(statistics).splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def gpus_for_ranks() -> int:
    """GPUs of this box, if ranks of one model may exchange tensors between them."""
    can_exchange = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return int(torch.cuda.device_count()) if can_exchange else 0


def _cuda_box() -> Box:
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "cuda", "torch sees no CUDA device: check nvidia-smi and that torch is a CUDA build, or set device: cpu"
        )
    _check_answers("cuda")
    model = torch.cuda.get_device_name()
    if not capabilities_of("cuda").has_own_memory:
        return box_with("jetson", model, host_memory())
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return box_with("cuda", model, host_memory(), MemorySize(total_bytes, free_bytes))


def box_with(name: str, model: str, host: MemorySize, device: MemorySize | None = None) -> Box:
    """This box with a device of PROCESSORS. An Apple has no CPU executors: they need a second copy of their experts."""
    return _box(name, model, PROCESSORS[name], host, device)


def _mps_box() -> Box:
    if not torch.backends.mps.is_available():
        raise BackendUnavailable("mps", "torch sees no Apple GPU: set device: cpu")
    _check_answers("mps")
    return box_with("mps", _cpu_model(), host_memory())


def _check_answers(device: str) -> None:
    """Raises BackendUnavailable for a device that does not compute, or hangs."""
    found = SimpleQueue[str | None]()
    Thread(target=lambda: found.put(_fault(lambda: _multiply(device))), name=f"try-{device}", daemon=True).start()
    try:
        fault = found.get(timeout=ANSWER_S)
    except Empty:
        fault = f"it has not answered for {ANSWER_S:.0f} s"
    if fault is not None:
        raise BackendUnavailable(device, f"{fault}: see to its driver and dmesg, or set device: cpu")


def _box(name: str, model: str, processors: tuple[str, ...], host: MemorySize, device: MemorySize | None) -> Box:
    cpu = _cpu_model()
    return Box(name, model, processors, cores(), host, device, _versions(), cpu="" if cpu == model else cpu)


def drive_of(folder: Path, numbers: Path = Path("/sys/dev/block")) -> str:
    """Model and serial number of the drives that hold a folder, or will; empty if the system does not name them."""
    with suppress(OSError):
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        device = there.stat().st_dev
        return _drive((numbers / f"{os.major(device)}:{os.minor(device)}").resolve())
    return ""


def _drive(block: Path) -> str:
    if parts := sorted((block / "slaves").glob("*")):  # of a logical volume or an array
        return " + ".join(filter(None, (_drive(part.resolve()) for part in parts)))
    disk = block if (block / "device").exists() else block.parent  # of a partition
    names = (text_of(disk / "device" / "model"), text_of(disk / "device" / "serial") or text_of(disk / "serial"))
    return " ".join(filter(None, names))


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _versions() -> tuple[tuple[str, str], ...]:
    found = [("python", platform.python_version())]
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found.append((name, version(name)))
    return tuple(found)


def check_runtimes(box: Box) -> dict[str, str | None]:
    """Fault of each runtime; None: the runtime works. Mismatched libraries fail at their first use."""
    from experts.backends.ort.session import try_runtime

    tried: dict[str, Callable[[], None]] = {"torchvision": _suppress_boxes, "onnxruntime": try_runtime}
    if "cuda" in box.processors:
        tried["cuda"] = lambda: _multiply("cuda")
    if "mps" in box.processors:
        tried["mps"] = lambda: _multiply("mps")
    tried["torch"] = lambda: _multiply("cpu")
    return {name: _fault(work) for name, work in sorted(tried.items())}


def _fault(work: Callable[[], None]) -> str | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001  # the finding
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _multiply(device: str) -> None:
    square = torch.ones((64, 64), device=device)
    if float((square @ square).sum().cpu()) != 64.0**3:
        raise ArithmeticError(f"{device} does not multiply as it should")


def _suppress_boxes() -> None:
    """Call an operator that is missing if torch and torchvision do not match."""
    from experts.backends.modules.vision import ops

    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
    if ops.nms(boxes, torch.tensor([0.9, 0.8]), 0.5).tolist() != [0]:
        raise ArithmeticError("torchvision's nms does not suppress")
