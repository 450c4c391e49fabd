"""The box and the drive of a folder as Linux shows them, and one contract for every memory."""

import os
import re
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from agent.core.performance import HOST
from agent.runtime.machine import detection, memories
from agent.runtime.machine.box import MemorySize, exclusive
from agent.runtime.machine.detection import detect, drive_of, has_nvidia_gpu, host_memory
from agent.runtime.machine.device_loss import DeviceContext
from experts.errors import BackendUnavailable, MemoryExceeded

MIB = 1024 * 1024
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
NEEDS_MPS = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no Apple GPU here")
MEMORIES = [
    pytest.param(memories.HostMemory, "cpu", id="host"),
    pytest.param(lambda: memories.EmulatedMemory(8 * MIB), "cpu", id="emulated"),
    pytest.param(lambda: memories.HostMemory(pinned=True), "cpu", id="pinned", marks=[pytest.mark.gpu, NEEDS_CUDA]),
    pytest.param(lambda: memories.CudaMemory(8 * MIB), "cuda", id="cuda", marks=[pytest.mark.gpu, NEEDS_CUDA]),
    pytest.param(lambda: memories.MpsMemory(8 * MIB), "mps", id="mps", marks=[pytest.mark.mps, NEEDS_MPS]),
]


@pytest.mark.parametrize(("make", "device"), MEMORIES)
def test_region_holds_the_bytes_copied_into_it(make, device):
    memory = make()
    region = memory.allocate(MIB)
    source = torch.arange(4096, dtype=torch.int64).view(torch.uint8)
    memory.fill(region, 4096, source)
    held = region.tensor(device)
    assert (region.size_bytes, held.numel(), held.dtype) == (MIB, MIB, torch.uint8)
    assert torch.equal(held[4096 : 4096 + source.numel()].cpu(), source)
    region.close()
    region.close()


def test_emulated_arena_is_bounded_and_reuses_closed_regions():
    memory = memories.EmulatedMemory(2 * MIB)
    first, second = memory.allocate(MIB), memory.allocate(MIB)
    with pytest.raises(MemoryExceeded) as refused:
        memory.allocate(1)
    assert (refused.value.wanted_bytes, refused.value.free_bytes) == (1, 0)
    first.close()
    first.close()
    assert memory.held_bytes == MIB
    memory.allocate(MIB).close()
    second.close()
    assert memory.held_bytes == 0


def test_slid_region_keeps_its_bytes_though_the_places_overlap():
    memory = memories.EmulatedMemory(3 * MIB)
    below, above = memory.allocate(4096), memory.allocate(2 * MIB)
    source = torch.arange(2 * MIB // 8, dtype=torch.int64).view(torch.uint8)
    memory.fill(above, 0, source)
    assert memory.slide(below) is below
    below.close()
    moved = memory.slide(above)
    assert torch.equal(moved.tensor("cpu"), source)
    assert memory.regions() == (moved,)
    with pytest.raises(ValueError, match="moved"):
        above.tensor("cpu")
    above.close()
    assert memory.held_bytes == 2 * MIB


def test_torch_s_allocator_is_bounded_by_arena_and_workspaces():
    gib = 1024 * MIB
    assert memories.allocator_fraction(4 * gib, 1 * gib, 8 * gib) == pytest.approx((4 + 1.25 + 1 / 16 + 1 / 128) / 8)
    assert memories.allocator_fraction(7 * gib, 1 * gib, 8 * gib) == 1.0


def test_jetson_s_bound_is_of_its_own_device_and_counts_keys_and_values(monkeypatch):
    bounds, gib = [], 2**30
    shown = SimpleNamespace(total_memory=8 * gib)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", bounds.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: {1: shown}[device])
    box = replace(detect("integrated"), name="jetson", host=MemorySize(4 * gib, 4 * gib))  # of a control group
    for lease_bytes in (0, gib):
        memories.memory_for(box, HOST, 2 * gib, gib, lease_bytes)
    assert bounds == [memories.allocator_fraction(each * gib, gib, 8 * gib) for each in (0, 1)]


@pytest.mark.gpu
@NEEDS_CUDA
def test_memory_for_measuring_keeps_the_bound_of_the_one_beside_it():
    serving = memories.CudaMemory(8 * MIB, 64 * MIB)
    bound = torch.cuda.get_per_process_memory_fraction()
    memories.CudaMemory(8 * MIB).close()
    assert torch.cuda.get_per_process_memory_fraction() == bound < 1.0
    serving.close()
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


class FakeCudaRuntime:
    """CUDA's calls on host memory. ``fails_with``: status of each call; ``last_error``: what torch would raise next."""

    def __init__(self, monkeypatch):
        self.calls, self.fails_with, self.last_error = [], 0, 0
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(memories, "cuda_runtime", lambda: self)

    def cudaHostRegister(self, address, size_bytes, flags):
        return self._answered("register")

    def cudaHostUnregister(self, address):
        return self._answered("unregister")

    def cudaGetErrorString(self, status):
        return {700: "an illegal memory access was encountered", 801: "operation not supported"}[status]

    def cudaGetLastError(self):
        found, self.last_error = self.last_error, 0
        return found

    def _answered(self, call):
        self.calls.append(call)
        self.last_error = self.fails_with
        return self.fails_with


def test_shortage_of_pinned_memory_lowers_the_budget_and_leaves_no_error(monkeypatch):
    runtime = FakeCudaRuntime(monkeypatch)
    memory = memories.HostMemory(pinned=True)
    runtime.fails_with = 2
    with pytest.raises(MemoryExceeded, match=f"host: {MIB} bytes wanted"):
        memory.allocate(MIB)
    assert runtime.last_error == 0
    runtime.fails_with = 0
    memory.allocate(MIB).close()
    assert runtime.calls == ["register", "register", "unregister"]


def test_registration_that_the_runtime_refuses_names_its_reason_and_leaves_no_error(monkeypatch):
    runtime = FakeCudaRuntime(monkeypatch)
    runtime.fails_with = 801
    with pytest.raises(BackendUnavailable, match="cudaHostRegister: operation not supported"):
        memories.HostMemory(pinned=True).allocate(MIB)
    assert (runtime.calls, runtime.last_error) == (["register"], 0)


@pytest.mark.parametrize("finder", ["registration", "release", "watchdog"])
def test_lost_context_registers_and_releases_nothing_more_and_loads_go_on(monkeypatch, finder):
    runtime, context = FakeCudaRuntime(monkeypatch), DeviceContext()
    memory, other = (memories.HostMemory(pinned=True, context=context) for _ in range(2))
    before, kept = memory.allocate(MIB), memory.allocate(MIB)
    pinned = {each.tensor("cpu").data_ptr() for each in (before, kept)}
    runtime.fails_with = 700
    if finder == "watchdog":
        context.lose()
    elif finder == "release":
        before.close()
    else:
        memory.allocate(MIB)
    assert (context.is_lost, runtime.last_error) == (True, 0)
    runtime.calls.clear()
    for each in (memory, other):
        region = each.allocate(MIB)
        each.fill(region, 0, torch.ones(MIB, dtype=torch.uint8))
        assert bool(region.tensor("cpu").all())
        region.close()
    kept.close()
    used_again = memory.allocate(MIB // 2)  # its pages are still pinned, so others would come on top
    assert (used_again.tensor("cpu").data_ptr() in pinned, used_again.tensor("cpu").numel()) == (True, MIB // 2)
    used_again.close()
    before.close()
    assert runtime.calls == []


def test_cuda_s_runtime_is_the_one_that_torch_has_loaded():
    if torch.version.cuda is None:
        with pytest.raises(BackendUnavailable, match="device: cpu"):
            memories.cuda_runtime()
    else:
        assert memories.cuda_runtime().cudaHostGetDevicePointer is not None


def test_unknown_or_absent_device_is_an_error_with_a_remedy():
    with pytest.raises(BackendUnavailable, match="auto, cpu, cuda, mps, emulated"):
        detect("tpu")
    with pytest.raises(BackendUnavailable, match="cpu"):
        detect("cpu").pool_of("cuda")
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailable, match="device: cpu"):
            detect("cuda")


class CountingMemory(memories.EmulatedMemory):
    copies = 0

    def _copy(self, pairs):
        for pair in pairs:
            self.copies += 1
            super()._copy([pair])


def test_slide_by_one_page_takes_few_long_copies():
    memory = CountingMemory(24 * MIB)
    small, large = memory.allocate(4096), memory.allocate(20 * MIB)
    content = torch.arange(20 * MIB // 8).view(torch.uint8)
    memory.fill(large, 0, content)
    small.close()
    memory.copies = 0
    assert torch.equal(memory.slide(large).tensor("cpu"), content)
    assert memory.copies <= 6


def test_copy_to_metal_waits_while_an_executor_computes(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    memory = memories.MpsMemory(MIB)
    region, source = memory.allocate(4096), torch.ones(4096, dtype=torch.uint8)
    copying = threading.Thread(target=memory.fill, args=(region, 0, source), daemon=True)
    with exclusive("mps"):
        copying.start()
        copying.join(0.1)
        assert copying.is_alive()
    copying.join()
    assert torch.equal(region.tensor("mps"), source)


@pytest.mark.parametrize("is_lost", [False, True])
def test_copy_to_a_gpu_is_awaited_asleep_and_a_lost_one_is_not_asked_at_the_end(monkeypatch, is_lost):
    told, empty, context = [], torch.empty, DeviceContext()

    def event(**options):
        return SimpleNamespace(record=lambda _: None, synchronize=lambda: told.append(options))

    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    fakes = {"Stream": object, "stream": nullcontext, "Event": event, "empty_cache": lambda: told.append("emptied")}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    memory = memories.CudaMemory(MIB, context=context)
    region, source = memory.allocate(4096), torch.ones(4096, dtype=torch.uint8)
    memory.fill(region, 0, source)
    assert torch.equal(region.tensor("cuda"), source)
    context.is_lost = is_lost
    memory.close()
    assert told == [{"blocking": True}, *["emptied"] * (not is_lost)]


def hang(_):
    threading.Event().wait()


def fail(device):
    raise RuntimeError(f"{device} driver version is insufficient\nadvice for programmers")


@pytest.mark.parametrize(("work", "reason"), [(fail, "cuda driver version is insufficient"), (hang, "not answered")])
def test_broken_accelerator_leaves_the_cpu_serving_unless_it_is_asked_for(monkeypatch, work, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(detection, "_multiply", work)
    monkeypatch.setattr(detection, "ANSWER_S", 0.2)
    box = detect("auto")
    assert (box.name, box.processors) == ("cpu", ("cpu",))
    assert re.search(f"cuda: .*{reason}.*driver", box.fault)
    with pytest.raises(BackendUnavailable, match=f"{reason}.*device: cpu"):
        detect("cuda")


def test_tightest_control_group_limits_the_host(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/machine/unit\n")
    unit = tmp_path / "groups" / "machine" / "unit"
    unit.mkdir(parents=True)
    (unit / "memory.max").write_text("max\n")
    (unit.parent / "memory.max").write_text(f"{64 * MIB}\n")
    (unit.parent / "memory.current").write_text(f"{40 * MIB}\n")
    (unit.parent / "memory.stat").write_text(f"anon 1\ninactive_file {10 * MIB}\n")
    size = host_memory(tmp_path / "groups", membership)
    assert (size.total_bytes, size.available_bytes) == (64 * MIB, 34 * MIB)


@pytest.mark.parametrize(
    ("vendor", "kind", "is_one"),
    [
        ("0x10de", "0x030000", True), ("0x10de", "0x030200", True), ("0x10de", "0x040300", False),
        ("0x8086", "0x030000", False),
    ],
)  # fmt: skip
def test_gpu_is_recognised_by_vendor_and_class(tmp_path, vendor, kind, is_one):
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "vendor").write_text(f"{vendor}\n")
    (tmp_path / "0000:01:00.0" / "class").write_text(f"{kind}\n")
    (tmp_path / "0000:02:00.0").mkdir()
    assert has_nvidia_gpu(tmp_path, tmp_path / "none") is is_one


@pytest.fixture
def numbers(tmp_path):
    """Block devices by number, and this folder's device among them."""
    system = tmp_path / "sys"
    device = os.stat(tmp_path).st_dev

    def made(block):
        (system / "numbers").mkdir(exist_ok=True)
        (system / "numbers" / f"{os.major(device)}:{os.minor(device)}").symlink_to(system / block)
        return system / "numbers"

    for disk, serial in (("nvme0n1", "S1"), ("nvme1n1", "S2")):
        (system / disk / "device").mkdir(parents=True)
        (system / disk / "device" / "model").write_text("Samsung 990  \n")
        (system / disk / "device" / "serial").write_text(serial)
        (system / disk / f"{disk}p1").mkdir()
    (system / "dm-0" / "slaves").mkdir(parents=True)
    for disk in ("nvme0n1", "nvme1n1"):
        (system / "dm-0" / "slaves" / disk).symlink_to(system / disk / f"{disk}p1")
    return made


@pytest.mark.parametrize(
    ("block", "drive"),
    [
        ("nvme0n1", "Samsung 990 S1"),
        ("nvme1n1/nvme1n1p1", "Samsung 990 S2"),
        ("dm-0", "Samsung 990 S1 + Samsung 990 S2"),
        ("absent", ""),
    ],
    ids=["disk", "partition", "volume", "unknown"],
)
def test_drive_of_a_folder_is_named_by_model_and_serial_number(tmp_path, numbers, block, drive):
    assert drive_of(tmp_path / "state" / "packed", numbers(block)) == drive
