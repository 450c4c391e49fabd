"""Loads over the real path: files, buffers and threads; and every way in which one comes to nothing."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import closing
from queue import SimpleQueue

import psutil
import pytest
import torch

from agent.core.effects import Evict, EvictionDecision, StartLoad
from agent.core.events import Loaded, LoadFailed
from agent.runtime.device_loss import Breakdown, DeviceWatch
from agent.runtime.machine.memories import EmulatedMemory, HostMemory
from agent.runtime.slots import SkeletonShelf, SlotStore
from agent.runtime.transfer import PacedLink, Transfers
from experts import errors
from experts.backends import backend_for
from experts.expert import Precision
from experts.packed.packing import pack_line
from experts.packed.weights import Segment, SegmentStore

ROOMY = 64 * 1024 * 1024
PATIENCE_S = 30.0


class Yard:
    """Host and device memory with the transfers between them, driven by hand."""

    def __init__(self, line, segments=None, device_bytes=ROOMY, ssd_bytes_per_s=None, device=None, watch=None):
        self.line = line
        self.shelf = SkeletonShelf(line.segments)
        self.host = SlotStore(HostMemory(), ROOMY, ("cpu",), self.shelf)
        self.device = SlotStore(device or EmulatedMemory(device_bytes), device_bytes, ("cpu",), self.shelf)
        self.answers = SimpleQueue()
        self.transfers = Transfers(
            {"host": self.host, "device": self.device},
            segments or line.segments,
            line.copies,
            HostMemory(),
            self.answers.put,
            link=PacedLink(ssd_bytes_per_s),
            watch=watch,
        )
        self.loads = 0

    def start(self, name, source="ssd", pool="host"):
        self.loads += 1
        expert = f"cls/{name}"
        self.transfers.start_load(StartLoad(self.loads, expert, f"{expert}@fp32", source, pool, 0))
        return self.loads

    def answer(self):
        return self.answers.get(timeout=PATIENCE_S)

    def load(self, name, source="ssd", pool="host"):
        started = self.start(name, source, pool)
        assert self.answer() == Loaded(started)

    def evict(self, name, pool="host"):
        expert = f"cls/{name}"
        self.transfers.evict(Evict(expert, f"{expert}@fp32", pool, 0, 0, EvictionDecision("", 0, ())))

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
def yard(line):
    yard = Yard(line)
    yield yard
    yard.close()


@pytest.mark.parametrize("name", ["own-0", "twin-1", "wide"])
def test_an_expert_runs_from_every_tier_as_its_owner_would_run_it(yard, line, name):
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


def test_every_byte_of_a_large_segment_passes_through_the_small_staging_buffer(yard, line, tmp_path):
    segment, content = large_segment(line.segments)
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


def large_segment(segments):
    """A segment of more parts than the staging buffer holds, the last one short."""
    content = bytes(torch.randint(0, 256, (41 * 1024 * 1024 + 4096,), dtype=torch.uint8).numpy())
    sha256 = hashlib.sha256(content).hexdigest()
    segments.segment_path(sha256).write_bytes(content)
    return Segment(sha256, len(content), ()), content


def test_a_shared_part_is_read_once_for_loads_in_flight_together(yard, line):
    for name in ("twin-0", "twin-1", "twin-2"):
        yard.start(name)
    assert {yard.answer() for _ in range(3)} == {Loaded(1), Loaded(2), Loaded(3)}
    packed = [line.copy(f"twin-{number}").packed for number in range(3)]
    trunk_bytes = sum(segment.size_bytes for segment in packed[0].shared)
    assert yard.transfers.statistics().bytes_read == trunk_bytes + sum(each.own.size_bytes for each in packed)


class StutteringStore(SegmentStore):
    """Fails the first read of a segment, then reads."""

    def __init__(self, directory, sha256):
        super().__init__(directory)
        self._awkward = {sha256}

    def read(self, segment, buffer, expert):
        if segment.sha256 in self._awkward:
            self._awkward.discard(segment.sha256)
            raise errors.LoadError(expert, "the drive hiccuped")
        super().read(segment, buffer, expert)


def test_when_the_reader_of_a_shared_part_fails_the_next_one_reads_it(line):
    trunk = line.copy("twin-0").packed.shared[0]
    segments = StutteringStore(line.segments.directory, trunk.sha256)
    yard = Yard(line, segments)
    yard.start("twin-0")
    yard.start("twin-1")
    answers = [yard.answer(), yard.answer()]
    failed = [answer for answer in answers if isinstance(answer, LoadFailed)]
    assert [answer.permanent for answer in failed] == [False]
    assert "hiccuped" in failed[0].reason
    good = next(answer.load for answer in answers if isinstance(answer, Loaded)) - 1
    image = line.pixels(3)
    assert yard.predictions(f"twin-{good}", yard.host, image) == line.predict(f"twin-{good}", image)
    yard.close()
    segments.close()


def damage_by_cutting(file):
    os.truncate(file, file.stat().st_size // 2)


def damage_by_flipping(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damage_by_removing(file):
    file.unlink()


@pytest.mark.parametrize("damage", [damage_by_cutting, damage_by_flipping])
@pytest.mark.parametrize("pool", ["host", "device"])
def test_damaged_weights_fail_for_good_and_leave_their_room(breakable_line, damage, pool):
    yard = Yard(breakable_line)
    damage(breakable_line.file_of("own-1"))
    yard.start("own-1", "ssd", pool)
    answer = yard.answer()
    assert isinstance(answer, LoadFailed)
    assert answer.permanent
    assert "segments" in answer.reason
    assert yard.host.statistics().used_bytes == yard.device.statistics().used_bytes == 0
    yard.load("own-0", "ssd", pool)
    yard.close()


def unreadable(file):
    file.unlink()
    file.symlink_to(file)  # ELOOP: as of any file that is there and cannot be read


@pytest.mark.parametrize("lose", [damage_by_removing, unreadable])
@pytest.mark.parametrize("pool", ["host", "device"])
def test_weights_that_are_not_there_may_come_back(breakable_line, lose, pool):
    yard = Yard(breakable_line)
    file = breakable_line.file_of("own-1")
    content = file.read_bytes()
    lose(file)
    yard.start("own-1", "ssd", pool)
    answer = yard.answer()
    assert (answer.permanent, answer.is_away) == (False, True)
    assert str(file) in answer.reason
    file.unlink(missing_ok=True)
    file.write_bytes(content)
    yard.load("own-1", "ssd", pool)
    yard.close()


def test_weights_that_go_bad_after_they_were_read_once_are_found_out(breakable_line):
    yard = Yard(breakable_line)
    yard.load("own-1")
    yard.evict("own-1")
    damage_by_flipping(breakable_line.file_of("own-1"))
    yard.start("own-1")
    answer = yard.answer()
    assert isinstance(answer, LoadFailed)
    assert answer.permanent
    yard.close()


def is_packed_whole(line, name):
    """Do all files of an expert lie there with the bytes they were packed with?"""
    packed = line.copy(name).packed
    for segment in packed.segments:
        line.segments.verify(segment, packed.expert)
    return True


@pytest.mark.parametrize("damage", [damage_by_cutting, damage_by_flipping])
@pytest.mark.parametrize("pool", ["host", "device"])
def test_a_packed_file_found_corrupt_is_dropped_and_the_next_packing_makes_it_anew(
    breakable_line, damage, pool, caplog
):
    line = breakable_line
    yard = Yard(line)
    file = line.file_of("own-1")
    damage(file)
    yard.start("own-1", "ssd", pool)
    answer = yard.answer()
    assert answer.permanent
    assert f"{file} was not what was packed and has been removed" in answer.reason
    assert not file.exists()
    assert f"corrupt_file_dropped expert=cls/own-1 file={file}" in caplog.text
    assert "load_failed expert=cls/own-1" in caplog.text
    assert not pack_again(line).failed
    assert is_packed_whole(line, "own-1")
    yard.load("own-1", "ssd", pool)
    yard.close()


def test_a_shared_file_found_corrupt_is_made_anew_for_all_that_share_it(breakable_line):
    line = breakable_line
    yard = Yard(line)
    trunk = line.segments.segment_path(line.copy("twin-0").packed.shared[0].sha256)
    damage_by_flipping(trunk)
    for number in range(3):
        yard.start(f"twin-{number}")
    reasons = [yard.answer().reason for _ in range(3)]
    assert all(str(trunk) in reason for reason in reasons)
    assert not trunk.exists()
    own = [line.file_of(f"twin-{number}") for number in range(3)]
    assert all(file.exists() for file in own)
    assert not pack_again(line).failed
    for number in range(3):
        assert is_packed_whole(line, f"twin-{number}")
        yard.load(f"twin-{number}")
    yard.close()


class MisreadingStore(SegmentStore):
    """Finds bytes wrong that lie on the disk as they should."""

    def read(self, segment, buffer, expert):
        raise errors.WeightsCorrupt(expert, f"{self.segment_path(segment.sha256)} does not have the sha256")


def test_a_file_that_is_sound_when_it_is_looked_at_again_stays_and_its_load_is_tried_again(breakable_line):
    segments = MisreadingStore(breakable_line.segments.directory)
    yard = Yard(breakable_line, segments)
    yard.start("own-1")
    answer = yard.answer()
    assert not answer.permanent
    assert "sound" in answer.reason
    assert breakable_line.file_of("own-1").exists()
    yard.close()
    segments.close()


def test_while_somebody_packs_a_corrupt_file_stays_and_is_tried_again(breakable_line):
    yard = Yard(breakable_line)
    damage_by_flipping(breakable_line.file_of("own-1"))
    with SegmentStore(breakable_line.segments.directory).locked():
        yard.start("own-1")
        answer = yard.answer()
    assert not answer.permanent
    assert "delete it and start again" in answer.reason
    assert breakable_line.file_of("own-1").exists()
    yard.close()


def test_a_corrupt_file_that_the_disk_does_not_let_go_is_told(breakable_line, monkeypatch, caplog):
    yard = Yard(breakable_line)
    damage_by_flipping(breakable_line.file_of("own-1"))

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(type(breakable_line.file_of("own-1")), "unlink", refuse)
    yard.start("own-1")
    answer = yard.answer()
    assert answer.permanent
    assert "delete it and start again" in answer.reason
    assert "Read-only file system" in caplog.text
    yard.close()


def pack_again(line):
    experts = [copy.expert for copy in line.copies.values()]
    with closing(SegmentStore(line.segments.directory)) as store:
        return pack_line(experts, lambda _: {Precision.FP32}, store)


def test_a_copy_that_nobody_packed_fails_for_good(yard):
    yard.start("unknown")
    assert yard.answer().permanent


def test_a_load_of_what_is_there_already_fails_and_harms_nothing(yard, line):
    yard.load("own-0")
    yard.start("own-0")
    assert not yard.answer().permanent
    yard.evict("own-0")


def test_a_full_device_is_no_fault_of_the_weights(line):
    yard = Yard(line, device_bytes=line.copy("own-0").packed.own.slot_bytes)
    yard.load("own-0", "ssd", "device")
    yard.start("own-1", "ssd", "device")
    answer = yard.answer()
    assert isinstance(answer, LoadFailed)
    assert not answer.permanent
    assert yard.device.statistics().slots == 1
    yard.close()


class FailingMemory(EmulatedMemory):
    """A device whose copies fail."""

    def __init__(self, error):
        super().__init__(ROOMY)
        self.error = error

    def fill(self, region, offset_bytes, source):
        raise self.error


@pytest.mark.parametrize("source", ["ssd", "host"])
def test_a_load_that_finds_its_device_lost_is_not_failed(line, source):
    yard = Yard(line, device=FailingMemory(torch.AcceleratorError("CUDA error: unspecified launch failure")))
    yard.load("own-0")
    yard.start("own-0", source, "device")
    answer = yard.answer()
    assert isinstance(answer, Breakdown)
    assert isinstance(answer.error, errors.DeviceLost)
    assert yard.transfers.statistics().failed == 0
    yard.close()


@pytest.mark.parametrize("is_lost", [False, True])
def test_after_an_unclear_error_of_a_load_the_device_is_asked(line, is_lost):
    def ask():
        if is_lost:
            raise torch.AcceleratorError("CUDA error: unknown error")

    refused = errors.BackendUnavailable("cuda", "cudaHostRegister failed with status 2")
    yard = Yard(line, device=FailingMemory(refused), watch=DeviceWatch("cuda", ask))
    yard.start("own-0", "ssd", "device")
    assert isinstance(yard.answer(), Breakdown if is_lost else LoadFailed)
    yard.close()


def test_stopping_answers_the_loads_that_still_wait(line):
    yard = Yard(line, ssd_bytes_per_s=1.0)
    yard.start("own-0")
    yard.start("own-1")
    yard.transfers.stop()
    answers = [yard.answer(), yard.answer()]
    assert [type(answer) for answer in answers] == [LoadFailed, LoadFailed]
    assert yard.host.statistics().used_bytes == 0
    yard.start("own-2")
    assert isinstance(yard.answer(), LoadFailed)
    yard.close()


def test_a_paced_link_lets_bytes_through_one_after_another_and_saves_nothing_up():
    now = 100.0
    link = PacedLink(1000.0, lambda: now)
    assert link.reserve(500) == 100.5
    assert link.reserve(500) == 101.0
    now = 200.0
    assert link.reserve(2000) == 202.0


def test_an_unpaced_link_is_free_at_once():
    assert PacedLink(None, lambda: 5.0).reserve(10**12) == 5.0


def test_no_load_is_faster_than_the_rate_it_is_held_to(line):
    size_bytes = line.copy("own-0").packed.own.size_bytes
    yard = Yard(line, ssd_bytes_per_s=size_bytes / 0.2)
    started = time.monotonic()
    yard.start("own-0")
    yard.start("own-1")
    yard.answer()
    yard.answer()
    assert time.monotonic() - started >= 0.4
    assert yard.transfers.statistics().ssd_bytes_per_s == size_bytes / 0.2
    yard.close()


@pytest.mark.slow
def test_a_thousand_switches_leave_memory_flat_and_make_no_module(line):
    yard = Yard(line)
    names = ["own-0", "own-1", "own-2", "own-3"]
    for turn in range(40):
        switch(yard, names, turn)
    process = psutil.Process()
    before, made = process.memory_info().rss, (yard.shelf.constructed, yard.host.statistics().binds)
    for turn in range(1000):
        switch(yard, names, turn)
    after = process.memory_info().rss
    assert (yard.shelf.constructed, yard.host.statistics().binds) == made == (1, 1)
    assert yard.host.statistics().regions_allocated == 1
    assert after < before * 1.03
    image = line.pixels(5)
    yard.load("own-2")
    assert yard.predictions("own-2", yard.host, image) == line.predict("own-2", image)
    yard.close()


def switch(yard, names, turn):
    name = names[turn % len(names)]
    yard.load(name)
    yard.evict(name)
