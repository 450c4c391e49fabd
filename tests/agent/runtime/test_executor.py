"""A batch's way through an executor's thread: every request has its answer, whatever its image or weights are."""

from __future__ import annotations

import io
import threading
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from PIL import Image

from agent.core.events import BatchFailed, Finished
from agent.core.performance import ExecutorSpec
from agent.core.request import Batch, Rejected
from agent.runtime.device_loss import Breakdown, DeviceWatch
from agent.runtime.executor import (
    BatchExecutor,
    checked,
    is_out_of_memory,
    judge,
)
from agent.runtime.machine.box import threads_per_executor
from agent.runtime.machine.detection import detect
from agent.runtime.machine.memories import HostMemory
from agent.runtime.preparation import ByteGate, Preparation
from agent.runtime.slots import SkeletonShelf, SlotStore
from experts.errors import DeviceLost, MemoryExceeded, OutputInvalid
from experts.expert import BoundingBox, Prediction

ROOMY = 64 * 1024 * 1024
PATIENCE_S = 30.0


class Desk:
    """One executor over a host memory, driven by hand."""

    def __init__(self, line, watch=None):
        self.line = line
        self.store = SlotStore(HostMemory(), ROOMY, ("cpu",), SkeletonShelf(line.segments))
        self.answers = SimpleQueue()
        self.preparation = Preparation(2, max_pixels=1_000_000)
        spec = ExecutorSpec(0, "cpu", "host")
        self.executor = BatchExecutor(spec, self.store, self.preparation, self.answers.put, threads=1, watch=watch)
        self.executor.start()
        self.batches = 0

    def load(self, name):
        copy = self.line.copy(name)
        slot = self.store.reserve(copy)
        self.store.materialise(slot)
        for segment in copy.packed.segments:
            self.line.segments.read(segment, slot.region_of(segment).buffer, copy.expert.id)
        self.store.commit(slot)
        return slot

    def run(self, name, *images):
        self.batches += 1
        copy = self.line.copy(name)
        batch = Batch(self.batches, 0, copy.expert.id, copy.name, tuple(range(len(images))), 0)
        self.executor.start_batch(batch, copy.expert, images)
        return self.answers.get(timeout=PATIENCE_S)

    def close(self):
        self.executor.stop()
        self.preparation.stop()
        assert self.answers.empty(), "a batch was answered twice"
        self.store.close()


@pytest.fixture
def desk(line):
    desk = Desk(line)
    yield desk
    desk.close()


def encoded(image, form="png"):
    file = io.BytesIO()
    Image.fromarray(image).save(file, form)
    return file.getvalue()


def test_results_come_in_the_order_of_the_requests(desk, line):
    desk.load("own-0")
    images = [line.pixels(seed) for seed in range(5)]
    finished = desk.run("own-0", *images)
    assert finished == Finished(1, tuple(line.predict("own-0", image) for image in images))


def test_who_prepares_ahead_knows_what_an_executor_computes_on(desk, line, monkeypatch):
    told, computing = [], desk.preparation.computing

    @contextmanager
    def noting(threads):
        told.append((threads, desk.answers.qsize()))
        with computing(threads):
            yield
        told.append((-threads, desk.answers.qsize()))

    monkeypatch.setattr(desk.preparation, "computing", noting)
    desk.load("own-0")
    desk.run("own-0", line.pixels(0))
    assert told == [(1, 0), (-1, 0)]  # over before the answer is told of: the next batch may be there at once


def test_an_executor_begins_the_crops_that_nobody_has(desk, line):
    desk.load("own-0")
    image = line.pixels(0)
    with desk.preparation.computing(2):  # on all cores: nothing is prepared ahead
        desk.preparation.prepare(0, image, "a.png", line.copy("own-0").expert, due_s=1.0)
        assert desk.run("own-0", image) == Finished(1, (line.predict("own-0", image),))


def test_pixels_bytes_and_paths_are_the_same_image(desk, line, tmp_path):
    desk.load("own-0")
    image = line.pixels(1)
    file = tmp_path / "crop.png"
    file.write_bytes(encoded(image))
    answer = desk.run("own-0", image, encoded(image), file)
    assert set(answer.results) == {answer.results[0]}
    assert answer.results[0] == line.predict("own-0", image)


def test_a_broken_image_rejects_its_own_request_only(desk, line, tmp_path):
    desk.load("own-0")
    good = line.pixels(2)
    missing = tmp_path / "gone.png"
    huge = np.zeros((1200, 1000, 3), dtype=np.uint8)
    answer = desk.run("own-0", encoded(good)[:-20], good, missing, b"", encoded(huge))
    kinds = [type(result) for result in answer.results]
    assert kinds == [Rejected, Prediction, Rejected, Rejected, Rejected]
    assert answer.results[1] == line.predict("own-0", good)
    assert "gone.png" in answer.results[2].reason
    assert "max_pixels" in answer.results[4].reason
    statistics = desk.executor.statistics()
    assert (statistics.batches, statistics.images, statistics.rejected) == (1, 5, 4)


def test_a_batch_of_broken_images_only_is_finished_without_the_model(desk):
    answer = desk.run("own-0", b"no image")
    assert isinstance(answer, Finished)
    assert isinstance(answer.results[0], Rejected)


def test_pixels_of_a_wrong_form_reject_their_request_and_the_thread_lives(desk, line):
    desk.load("own-0")
    answer = desk.run("own-0", np.zeros((4, 4), dtype=np.uint8), line.pixels(0))
    assert [type(result) for result in answer.results] == [Rejected, Prediction]
    assert isinstance(desk.run("own-0", line.pixels(0)).results[0], Prediction)


def test_weights_that_are_no_numbers_never_become_a_label(desk, line):
    slot = desk.load("own-0")
    slot.region.tensor("cpu").view(torch.float32).fill_(float("nan"))
    answer = desk.run("own-0", line.pixels(0), line.pixels(1))
    assert [type(result) for result in answer.results] == [Rejected, Rejected]
    assert "cls/own-0" in answer.results[0].reason


def test_a_batch_on_an_absent_expert_fails_and_the_next_one_runs(desk, line):
    failed = desk.run("own-0", line.pixels(0))
    assert isinstance(failed, BatchFailed)
    assert not failed.out_of_memory
    desk.load("own-0")
    assert isinstance(desk.run("own-0", line.pixels(0)), Finished)
    assert desk.executor.statistics().failed == 1


def test_no_expert_can_be_evicted_under_a_batch_and_any_can_after_it(desk, line):
    desk.load("own-0")
    desk.run("own-0", line.pixels(0))
    desk.store.evict("cls/own-0@fp32")


def test_what_the_box_has_no_memory_for_is_asked_again_in_a_smaller_batch_and_not_said_of_the_image(
    desk, line, monkeypatch
):
    desk.load("own-0")

    def too_little(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("agent.runtime.image_sources.decode_image", too_little)
        failed = desk.run("own-0", encoded(line.pixels(0)))
    assert isinstance(failed, BatchFailed)
    assert failed.out_of_memory
    assert isinstance(desk.run("own-0", encoded(line.pixels(0))).results[0], Prediction)


def test_images_in_decoding_take_so_many_bytes_together_and_a_larger_one_goes_alone():
    gate, inside, most = ByteGate(100), [0], [0]
    together, leave = threading.Semaphore(0), threading.Semaphore(0)

    def decode(size):
        with gate.room_for(size):
            inside[0] += size
            most[0] = max(most[0], inside[0])
            together.release()
            assert leave.acquire(timeout=PATIENCE_S)
            inside[0] -= size

    threads = [threading.Thread(target=decode, args=(size,)) for size in (60, 40, 50, 1000, 30)]
    for thread in threads:
        thread.start()
        if thread in threads[:2]:
            assert together.acquire(timeout=PATIENCE_S)
    assert inside[0] == 100
    for _ in threads:
        leave.release()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert (most[0], inside[0]) == (1000, 0)


class PickySkeleton:
    """Answers what is no number for a dark image, and nothing else with it in one batch."""

    def bind(self, tensors):
        """It has no weights."""

    def infer(self, expert, batch):
        if any(prepared < 0 for prepared in batch):
            raise OutputInvalid(expert.id, "its output is not a number")
        return tuple(Prediction("ok", prepared) for prepared in batch)


def test_an_output_that_is_no_number_rejects_only_the_image_that_causes_it(line):
    answers = judge(PickySkeleton(), line.copy("own-0").expert, [0.5, -1.0, 0.25])
    assert [getattr(answer, "score", None) for answer in answers] == [0.5, None, 0.25]
    assert isinstance(answers[1], Rejected)


def test_scores_of_boxes_must_be_numbers_too(line):
    expert = line.copy("own-0").expert
    sound = Prediction("ok", 0.5, (BoundingBox("ok", 0.5, 0, 0, 1, 1),))
    broken = Prediction("ok", 0.5, (BoundingBox("ok", float("inf"), 0, 0, 1, 1),))
    assert checked(sound, expert) == sound
    assert isinstance(checked(broken, expert), Rejected)


class BrokenSkeleton:
    """Raises whatever it is asked."""

    def __init__(self, error):
        self.error = error

    def bind(self, tensors):
        """It has no weights."""

    def infer(self, expert, batch):
        raise self.error


def break_skeleton(slot, error):
    binding = slot.housing.bindings["cpu"]
    slot.housing.bindings["cpu"] = replace(binding, skeleton=BrokenSkeleton(error))


def test_a_batch_that_finds_its_device_lost_is_not_failed(desk, line):
    break_skeleton(desk.load("own-0"), torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    answer = desk.run("own-0", line.pixels(0))
    assert isinstance(answer, Breakdown)
    assert isinstance(answer.error, DeviceLost)
    assert desk.executor.statistics().failed == 0


@pytest.mark.parametrize("is_lost", [False, True])
def test_after_an_unclear_error_of_a_batch_the_device_is_asked(line, is_lost):
    asked = []

    def ask():
        asked.append("ask")
        if is_lost:
            raise torch.AcceleratorError("CUDA error: unknown error")

    desk = Desk(line, DeviceWatch("cuda", ask))
    break_skeleton(desk.load("own-0"), RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"))
    assert isinstance(desk.run("own-0", line.pixels(0)), Breakdown if is_lost else BatchFailed)
    assert asked == ["ask"]
    desk.close()


def test_a_batch_without_memory_is_failed_and_a_smaller_one_may_run(line):
    desk = Desk(line, DeviceWatch("cuda", lambda: None))
    break_skeleton(desk.load("own-0"), torch.OutOfMemoryError("CUDA out of memory"))
    answer = desk.run("own-0", line.pixels(0))
    assert isinstance(answer, BatchFailed)
    assert answer.out_of_memory
    desk.close()


def test_an_allocation_that_torch_refuses_is_out_of_memory():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(MemoryExceeded("host", 2, 1))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_cores_are_shared_among_the_executors_that_compute_on_them():
    box = detect("emulated")
    one = [ExecutorSpec(0, "emulated", "device")]
    two = [*one, ExecutorSpec(1, "cpu", "host")]
    assert threads_per_executor(box, one) == box.cores
    assert threads_per_executor(box, two) == max(box.cores // 2, 1)
    assert threads_per_executor(box, [ExecutorSpec(0, "cuda", "device")]) == box.cores


def test_what_is_behind_the_batch_that_runs_is_run_next_but_not_once_the_executor_stops(desk, line):
    slot, copy = desk.load("own-0"), line.copy("own-0")
    answers, may_go_on = SimpleQueue(), threading.Event()

    def post(answer):
        answers.put(answer.batch)
        assert may_go_on.wait(PATIENCE_S)

    executor = BatchExecutor(ExecutorSpec(0, "cpu", "host"), desk.store, desk.preparation, post, threads=1)
    executor.start()
    for number in (1, 2, 3):
        batch = Batch(number, 0, copy.expert.id, copy.name, (number,), 0)
        executor.start_batch(batch, copy.expert, [line.pixels(number)])
        executor.hurry(batch)
    assert answers.get(timeout=PATIENCE_S) == 1
    assert not executor.stop(timeout_s=0.0)
    may_go_on.set()
    assert executor.stop(PATIENCE_S)
    assert answers.empty()
    assert slot.copy is copy


def test_what_is_behind_a_batch_that_met_a_lost_device_is_not_run(line):
    may_begin, asked, others = threading.Event(), [], set(threading.enumerate())

    def is_gone():
        assert may_begin.wait(PATIENCE_S)
        asked.append("ask")
        raise torch.AcceleratorError("CUDA error: unknown error")

    desk = Desk(line, DeviceWatch("cuda", is_gone))
    copy = line.copy("own-0")
    for number in (1, 2):  # its expert is not there, so each fails
        batch = Batch(number, 0, copy.expert.id, copy.name, (number,), 0)
        desk.executor.start_batch(batch, copy.expert, [line.pixels(number)])
    executor = next(thread for thread in threading.enumerate() if thread.name == "executor-0" and thread not in others)
    may_begin.set()
    assert isinstance(desk.answers.get(timeout=PATIENCE_S), Breakdown)
    executor.join(PATIENCE_S)  # it ends without having been stopped
    assert not executor.is_alive()
    assert asked == ["ask"]
    desk.close()
