"""Loads over the real path: files, buffers and threads; and every way in which one comes to nothing."""

import hashlib
import os
from contextlib import ExitStack, closing
from queue import SimpleQueue

import pytest
import torch

from agent.core.effects import StartLoad
from agent.core.events import Loaded, LoadFailed
from agent.faults.errors import DeviceLost
from agent.runtime.machine.device_loss import Breakdown
from agent.runtime.machine.memories import EmulatedMemory, HostMemory
from agent.runtime.weights.drive import Drive, PacedLink, staging_bytes
from agent.runtime.weights.skeletons import SkeletonShelf
from agent.runtime.weights.slots import SlotStore
from agent.runtime.weights.transfer import Transfers, load_threads
from experts import errors
from experts.backends import backend_for
from experts.expert import Precision
from experts.packed.weights import Segment, SegmentStore
from tests.experts.conftest import packed_in

ROOMY = 64 * 1024 * 1024
PATIENCE_S = 30.0


class Yard:
    def __init__(self, line, device_bytes=ROOMY, ssd_bytes_per_s=None, device=None, staging=None, host_bytes=ROOMY):
        self.line = line
        self.shelf = SkeletonShelf(line.segments)
        self.host = SlotStore(HostMemory(), ROOMY, ("cpu",), self.shelf)
        self.device = SlotStore(device or EmulatedMemory(device_bytes), device_bytes, ("cpu",), self.shelf)
        self.answers = SimpleQueue()
        drive = Drive(line.segments, staging or HostMemory(), PacedLink(ssd_bytes_per_s), staging_bytes(host_bytes))
        stores = {"host": self.host, "device": self.device}
        self.transfers = Transfers(drive, stores, line.copies, self.answers.put, load_threads(4, 1))
        self.loads = 0

    def start(self, name, source="ssd", pool="host"):
        self.loads += 1
        expert = f"cls/{name}"
        self.transfers.start_load(StartLoad(self.loads, expert, f"{expert}@fp32", source, pool, 0))
        return self.loads

    def answer(self):
        return self.answers.get(timeout=PATIENCE_S)

    def answer_to(self, *load):
        self.start(*load)
        return self.answer()

    def load(self, name, source="ssd", pool="host"):
        started = self.start(name, source, pool)
        assert self.answer() == Loaded(started)

    def evict(self, name, pool="host"):
        {"host": self.host, "device": self.device}[pool].evict(f"cls/{name}@fp32")

    def predictions(self, name, store, image):
        expert = self.line.copy(name).expert
        with store.using(f"cls/{name}@fp32") as slot:
            prepared = backend_for(expert.architecture).prepare(expert, image)
            return slot.skeleton("cpu").infer(expert, [prepared])[0]

    def close(self):
        self.transfers.stop()
        assert self.answers.empty(), "a load was answered twice"
        self.host.close()
        self.device.close()


@pytest.fixture
def yard_of():
    with ExitStack() as opened:
        yield lambda line, **options: opened.enter_context(closing(Yard(line, **options)))


@pytest.fixture
def yard(yard_of, line):
    return yard_of(line)


@pytest.fixture
def breakable(yard_of, breakable_line):
    return yard_of(breakable_line)


@pytest.mark.parametrize("name", ["own-0", "twin-1", "wide"])
def test_expert_answers_equally_from_every_tier(yard, line, name):
    image = line.pixels(7)
    expected = line.predict(name, image)
    yard.load(name, "ssd", "host")
    yard.load(name, "host", "device")
    assert yard.predictions(name, yard.host, image) == expected
    assert yard.predictions(name, yard.device, image) == expected
    yard.evict(name, "host")
    yard.evict(name, "device")
    yard.load(name, "ssd", "device")
    assert yard.predictions(name, yard.device, image) == expected
    assert yard.transfers.statistics().loads == {"ssd_host": 1, "host_device": 1, "ssd_device": 1}


def test_large_segment_passes_whole_through_the_small_staging_buffer(line):
    content = bytes(torch.randint(0, 256, (41 * 1024 * 1024 + 4096,), dtype=torch.uint8).numpy())
    segment = Segment(hashlib.sha256(content).hexdigest(), len(content), ())
    line.segments.segment_path(segment.sha256).write_bytes(content)
    staging = HostMemory().allocate(3 * 8 * 1024 * 1024)
    target = torch.zeros(segment.size_bytes, dtype=torch.uint8)

    def keep(part):
        piece = staging.tensor("cpu")[part.at_bytes : part.at_bytes + len(part.content)]
        target[part.start_bytes : part.start_bytes + len(part.content)] = piece

    for _ in ("hashed on the way", "known to be sound"):
        target.zero_()
        line.segments.stream(segment, staging.buffer, "cls/large", keep)
        assert target.numpy().tobytes() == content
    line.segments.segment_path(segment.sha256).unlink()
    staging.close()


def damage_by_cutting(file):
    os.truncate(file, file.stat().st_size // 2)


def damage_by_flipping(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def unreadable(file):
    file.unlink()
    file.symlink_to(file)  # ELOOP: as of any file that is there and cannot be read


@pytest.mark.parametrize("lose", [os.unlink, unreadable])
@pytest.mark.parametrize("pool", ["host", "device"])
def test_missing_weights_are_a_transient_failure(breakable, breakable_line, lose, pool):
    file = breakable_line.file_of("own-1")
    content = file.read_bytes()
    lose(file)
    answer = breakable.answer_to("own-1", "ssd", pool)
    assert (answer.permanent, answer.is_away) == (False, True)
    assert str(file) in answer.reason
    file.unlink(missing_ok=True)
    file.write_bytes(content)
    breakable.load("own-1", "ssd", pool)


@pytest.mark.parametrize("damage", [damage_by_cutting, damage_by_flipping])
@pytest.mark.parametrize("pool", ["host", "device"])
def test_corrupt_packed_file_is_dropped_and_packed_again(breakable, breakable_line, damage, pool, caplog):
    line, yard = breakable_line, breakable
    file = line.file_of("own-1")
    damage(file)
    answer = yard.answer_to("own-1", "ssd", pool)
    assert answer.permanent
    assert f"{file} was not what was packed and has been removed" in answer.reason
    assert not file.exists()
    assert f"corrupt_file_dropped expert=cls/own-1 file={file}" in caplog.text
    assert "load_failed expert=cls/own-1" in caplog.text
    with closing(SegmentStore(line.segments.directory)) as store:
        packed_in(store, [copy.expert for copy in line.copies.values()], Precision.FP32)
    yard.load("own-1", "ssd", pool)


def test_file_found_sound_on_a_second_look_stays_and_its_load_is_retried(breakable, breakable_line, monkeypatch):
    def misread(store, segment, buffer, expert):
        raise errors.WeightsCorrupt(expert, f"{store.segment_path(segment.sha256)} does not have the sha256")

    monkeypatch.setattr(SegmentStore, "read", misread)
    answer = breakable.answer_to("own-1")
    assert not answer.permanent
    assert "sound" in answer.reason
    assert breakable_line.file_of("own-1").exists()


def test_corrupt_file_stays_while_packing_is_under_way_and_is_retried(breakable, breakable_line):
    damage_by_flipping(breakable_line.file_of("own-1"))
    with SegmentStore(breakable_line.segments.directory).locked():
        answer = breakable.answer_to("own-1")
    assert not answer.permanent
    assert "delete it and start again" in answer.reason
    assert breakable_line.file_of("own-1").exists()


def test_corrupt_file_that_cannot_be_removed_is_reported(breakable, breakable_line, monkeypatch, caplog):
    damage_by_flipping(breakable_line.file_of("own-1"))

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(type(breakable_line.file_of("own-1")), "unlink", refuse)
    answer = breakable.answer_to("own-1")
    assert answer.permanent
    assert "delete it and start again" in answer.reason
    assert "Read-only file system" in caplog.text


def test_load_of_a_resident_copy_is_retriable_and_of_an_unpacked_one_is_not(yard):
    assert yard.answer_to("unknown").permanent
    yard.load("own-0")
    assert not yard.answer_to("own-0").permanent
    yard.evict("own-0")


def test_full_device_is_no_fault_of_the_weights(yard_of, line):
    yard = yard_of(line, device_bytes=line.copy("own-0").packed.own.slot_bytes)
    yard.load("own-0", "ssd", "device")
    answer = yard.answer_to("own-1", "ssd", "device")
    assert isinstance(answer, LoadFailed)
    assert not answer.permanent
    assert yard.device.ready() == ("cls/own-0@fp32",)


class FailingMemory(EmulatedMemory):
    def __init__(self, error):
        super().__init__(ROOMY)
        self.error = error

    def fill(self, region, offset_bytes, source):
        raise self.error


@pytest.mark.parametrize("source", ["ssd", "host"])
def test_lost_device_during_a_load_is_not_a_failed_load(yard_of, line, source):
    yard = yard_of(line, device=FailingMemory(torch.AcceleratorError("CUDA error: unspecified launch failure")))
    yard.load("own-0")
    answer = yard.answer_to("own-0", source, "device")
    assert isinstance(answer, Breakdown)
    assert isinstance(answer.error, DeviceLost)
    assert yard.transfers.statistics().failed == 0


def test_stop_answers_the_loads_that_still_wait(yard_of, line):
    yard = yard_of(line, ssd_bytes_per_s=1.0)
    yard.start("own-0")
    yard.start("own-1")
    yard.transfers.stop()
    answers = [yard.answer(), yard.answer()]
    assert [type(answer) for answer in answers] == [LoadFailed, LoadFailed]
    assert yard.host.statistics().used_bytes == 0
    assert isinstance(yard.answer_to("own-2"), LoadFailed)


class CountedMemory(HostMemory):
    def __init__(self):
        super().__init__()
        self.taken_bytes = 0

    def allocate(self, size_bytes):
        self.taken_bytes += size_bytes
        return super().allocate(size_bytes)


@pytest.mark.parametrize("host_bytes", [1, 1024 * 1024, 20 * 1024 * 1024])
def test_staging_buffers_stay_within_their_share_of_host_memory(yard_of, line, host_bytes):
    staging = CountedMemory()
    yard = yard_of(line, staging=staging, host_bytes=host_bytes)
    names = [name.removeprefix("cls/").removesuffix("@fp32") for name in line.copies]
    started = {yard.start(name, pool="device") for name in names}
    answers = [yard.answer() for _ in names]
    assert {answer.load for answer in answers if isinstance(answer, Loaded)} == started
    assert 0 < staging.taken_bytes <= staging_bytes(host_bytes)
