"""A batch's way through an executor's thread: every request has its answer, whatever its image or weights are."""

import errno
import threading
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from agent.core.events import BatchFailed
from agent.core.performance import ExecutorSpec
from agent.core.request import Batch
from agent.runtime import executor as executor_module
from agent.runtime.executor import BatchExecutor, Shared, checked, judge
from agent.runtime.images.preparation import Preparation
from agent.runtime.images.sources import EncodedImage, ImageFile
from agent.runtime.machine.memories import HostMemory
from agent.runtime.machine.threads import Team
from agent.runtime.texts import RunningTexts
from agent.runtime.weights.skeletons import SkeletonShelf
from agent.runtime.weights.slots import SlotStore
from experts.devices.graphs import RUNS_BEFORE
from experts.errors import BackendUnavailable, LoadError, MemoryExceeded, OutputInvalid, is_out_of_memory
from experts.expert import BoundingBox, Prediction, Rejected
from experts.llm.serving.iteration import OutputLengths
from tests.experts.played_graphs import MOST_BYTES, PlayedRecorder
from tests.forms import needs
from tests.pictures import encoded

ROOMY = 64 * 1024 * 1024
PATIENCE_S = 30.0


class Desk:
    def __init__(self, line, graphs_bytes=0):
        self.line = line
        self.store = SlotStore(HostMemory(), ROOMY, ("cpu",), SkeletonShelf(line.segments))
        self.answers = SimpleQueue()
        self.preparation = Preparation(2)
        spec = ExecutorSpec(0, "cpu", "host", graphs_bytes)
        self.shared = Shared(self.preparation, self.answers.put, RunningTexts({}, OutputLengths()))
        self.executor = BatchExecutor(spec, self.store, Team(1), self.shared)
        self.executor.start()
        self.batches = 0

    def load(self, name):
        return self.line.load(self.store, name)

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


def test_executor_with_memory_for_graphs_answers_as_one_without(line, monkeypatch):
    recorder = PlayedRecorder()
    monkeypatch.setattr(executor_module, "Recorder", lambda: recorder)
    desk, image = Desk(line, MOST_BYTES), line.pixels(2)
    desk.load("own-0")
    answers = [desk.run("own-0", image).results for _ in range(RUNS_BEFORE + 2)]
    desk.close()
    assert answers == [(line.predict("own-0", image),)] * len(answers)
    assert (recorder.captures, recorder.replays) == (1, 2)


def test_broken_image_rejects_its_own_request_only(desk, line, tmp_path):
    desk.load("own-0")
    good = line.pixels(2)
    missing = tmp_path / "gone.png"
    file = tmp_path / "image.png"
    file.write_bytes(encoded(good))  # 80 x 70
    huge = [EncodedImage(file.read_bytes(), "sub/b1.png", 5599), ImageFile(file, 5599)]
    flat = np.zeros((4, 4), dtype=np.uint8)
    answer = desk.run("own-0", encoded(good)[:-20], missing, b"", flat, *huge, good, ImageFile(file, 5600))
    kinds = [type(result) for result in answer.results]
    assert (kinds, answer.results[6:]) == ([Rejected] * 6 + [Prediction] * 2, (line.predict("own-0", good),) * 2)
    assert "gone.png" in answer.results[1].reason
    told = [result.reason for result in answer.results[4:6]]
    assert told == [f"{name}: 80 x 70 pixels are more than max_pixels 5599" for name in ("sub/b1.png", "image.png")]
    statistics = desk.executor.statistics()
    assert (statistics.batches, statistics.images) == (1, 8)
    assert isinstance(desk.run("own-0", good).results[0], Prediction)


def test_shortage_while_decoding_is_out_of_memory_and_not_a_broken_image(desk, line, monkeypatch):
    desk.load("own-0")

    def too_little(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("agent.runtime.images.sources.decode_image", too_little)
        failed = desk.run("own-0", encoded(line.pixels(0)))
    assert isinstance(failed, BatchFailed)
    assert failed.out_of_memory
    assert isinstance(desk.run("own-0", encoded(line.pixels(0))).results[0], Prediction)


class PickySkeleton:
    """Answers what is no number for a dark image, and nothing else with it in one batch."""

    def infer(self, expert, batch):
        if any(prepared < 0 for prepared in batch):
            raise OutputInvalid(expert.id, "its output is not a number")
        return tuple(Prediction("ok", prepared) for prepared in batch)


def test_nan_output_rejects_its_own_image_only(line):
    answers = judge(PickySkeleton(), line.copy("own-0").expert, [0.5, -1.0, 0.25])
    assert [getattr(answer, "score", None) for answer in answers] == [0.5, None, 0.25]
    assert isinstance(answers[1], Rejected)


def test_infinite_box_score_rejects_its_image(line):
    expert = line.copy("own-0").expert
    sound = Prediction("ok", 0.5, (BoundingBox("ok", 0.5, 0, 0, 1, 1),))
    broken = Prediction("ok", 0.5, (BoundingBox("ok", float("inf"), 0, 0, 1, 1),))
    assert checked(sound, expert) == sound
    assert isinstance(checked(broken, expert), Rejected)


SHORT_OF_MEMORY = """
import resource
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import torch
from safetensors.torch import save_file
from torchvision import models

from agent.runtime.expert_copy import ExpertCopy
from experts.errors import BackendUnavailable, is_out_of_memory
from experts.expert import Expert, InputSpec, Precision
from experts.packed.weights import SegmentStore
from tests.agent.runtime.conftest import LABELS, Line
from tests.agent.runtime.test_executor import Desk
from tests.experts.conftest import packed_in

folder, form = Path(sys.argv[1]), Precision(sys.argv[2])
torch.set_num_threads(1)
module = models.squeezenet1_1(num_classes=len(LABELS))
save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()}, folder / "own-0.safetensors")
expert = Expert("cls/own-0", "squeezenet1_1", folder / "own-0.safetensors", LABELS, InputSpec(512, 512))
with closing(SegmentStore(folder / "packed")) as segments:
    packed = packed_in(segments, [expert], form)["cls/own-0"][form]
    line = Line(segments, {"cls/own-0@fp32": ExpertCopy("cls/own-0@fp32", expert, packed)}, {})
    desk = Desk(line)
    desk.load("own-0")
    print("alone", type(desk.run("own-0", line.pixels(0))).__name__)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 200 * 2**20,) * 2)
    larger = desk.run("own-0", *(line.pixels(seed) for seed in range(24)))
    print("larger", type(larger).__name__, larger.out_of_memory, larger.reason.splitlines()[0])
    for name, refused in {
        "torch": lambda: torch.empty(2**30, dtype=torch.uint8),
        "numpy": lambda: np.ones(2**30),
        "opencv": lambda: cv2.resize(np.ones((1000, 1000, 3), np.float32), (20000, 20000)),
        "bytes": lambda: bytearray(2**30),
    }.items():
        try:
            refused()
        except Exception as error:
            print(name, is_out_of_memory(error), type(error).__name__, str(error).splitlines()[:1])
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    desk.close()
"""


@pytest.mark.parametrize(
    ("form", "speaker"),
    [
        pytest.param("onnxruntime", "[ONNXRuntimeError]", marks=needs("onnxruntime")),
        pytest.param("onednn-fp32", "DefaultCPUAllocator", marks=needs("onednn-fp32")),
        ("fp32", "DefaultCPUAllocator"),
    ],
)
def test_real_shortage_in_any_runtime_is_answered_as_out_of_memory(forks, tmp_path, form, speaker):
    """A real shortage, by a limit of the process's addresses: classes and texts are those of the libraries."""
    done = forks.run(SHORT_OF_MEMORY, tmp_path, form)
    told = done.stdout.splitlines()
    assert told[0] == "alone Finished", done.stderr
    assert told[1].startswith("larger BatchFailed True "), told
    assert speaker in told[1]
    assert [line.split()[:2] for line in told[2:]] == [
        ["torch", "True"], ["numpy", "True"], ["opencv", "True"], ["bytes", "True"],
    ]  # fmt: skip


def test_out_of_memory_is_recognised_by_class_number_text_or_cause():
    cause = BackendUnavailable("onnxruntime on cpu", "it refuses a packed program")
    cause.__cause__ = ort_errors.Fail("std::bad_alloc")
    short = [MemoryError(), MemoryExceeded("host", 2, 1), OSError(errno.ENOMEM, "Cannot allocate memory"), cause]
    short += [torch.OutOfMemoryError("CUDA out of memory"), ort_errors.RuntimeException("bad allocation")]
    assert all(is_out_of_memory(error) for error in short)
    others = [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), LoadError("cls/out of memory", "no drive")]
    assert not any(is_out_of_memory(error) for error in others)


def test_batch_queued_behind_runs_next_but_not_after_a_stop(desk, line):
    slot, copy = desk.load("own-0"), line.copy("own-0")
    answers, may_go_on = SimpleQueue(), threading.Event()

    def post(answer):
        answers.put(answer.batch)
        assert may_go_on.wait(PATIENCE_S)

    executor = BatchExecutor(desk.executor.spec, desk.store, Team(1), replace(desk.shared, post=post))
    executor.start()
    for number in (1, 2, 3):
        batch = Batch(number, 0, copy.expert.id, copy.name, (number,), 0)
        executor.start_batch(batch, copy.expert, [line.pixels(number)])
        executor.prioritise(batch)
    assert answers.get(timeout=PATIENCE_S) == 1
    assert not executor.stop(timeout_s=0.0)
    may_go_on.set()
    assert executor.stop(PATIENCE_S)
    assert answers.empty()
    assert slot.copy is copy
