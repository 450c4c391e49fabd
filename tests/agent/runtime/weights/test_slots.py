"""Bytes in a memory, and when a skeleton is made, copied from a template, or bound."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import onnxruntime
import pytest
from torchvision import models

from agent.faults.errors import IllegalMove
from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.machine.memories import HostMemory
from agent.runtime.machine.threads import use_threads
from agent.runtime.weights.skeletons import SkeletonShelf, make_templates
from agent.runtime.weights.slots import SlotStore
from experts.backends import backend_for
from experts.backends.vision import detector
from experts.errors import LoadError
from experts.expert import Precision
from experts.packed.packing import pack_line
from experts.packed.weights import SegmentStore
from tests.experts.conftest import ExpertFiles

ROOMY = 64 * 1024 * 1024
THREADS = 1


@pytest.fixture
def shelf(line):
    return SkeletonShelf(line.segments)


@pytest.fixture
def store(shelf):
    store = SlotStore(HostMemory(), ROOMY, ("cpu",), shelf)
    yield store
    store.close()


def test_reserved_slot_counts_without_memory_and_an_abandoned_one_does_not(line, store):
    slot = store.reserve(line.copy("twin-0"))
    assert store.statistics().used_bytes > 0
    store.abandon(slot)
    assert store.statistics().used_bytes == 0
    line.load(store, "twin-0")


def test_load_over_an_expert_of_the_same_layout_allocates_and_binds_nothing(line, store):
    for name in ("own-0", "own-1", "own-2", "own-0"):
        store.evict(line.load(store, name).copy.name)
    statistics = store.statistics()
    assert (statistics.regions_allocated, statistics.binds) == (1, 1)


def test_skeleton_is_bound_again_over_another_shared_region(line, store, shelf):
    line.load(store, "twin-0")
    line.load(store, "kin-0")
    store.evict("cls/twin-0@fp32")
    assert store.statistics().binds == 2
    expert = line.load(store, "kin-1").copy.expert
    assert (store.statistics().binds, shelf.constructed) == (3, 2)
    image = line.pixels(1)
    with store.using("cls/kin-1@fp32") as slot:
        prepared = backend_for(expert.architecture).prepare(expert, image)
        assert slot.skeleton("cpu").infer(expert, [prepared]) == (line.predict("kin-1", image),)


def test_running_copy_is_not_evicted_and_a_loading_one_not_run_evicted_or_reloaded(line, store):
    copy = line.load(store, "own-0").copy
    with store.using(copy.name), pytest.raises(IllegalMove, match="in use"):
        store.evict(copy.name)
    store.evict(copy.name)
    with pytest.raises(IllegalMove, match="absent"):
        store.evict(copy.name)
    slot = store.reserve(line.copy("own-0"))
    store.materialise(slot)
    for misuse in (store.evict, lambda name: store.using(name).__enter__()):
        with pytest.raises(IllegalMove, match="loading"):
            misuse("cls/own-0@fp32")
    with pytest.raises(IllegalMove, match="loading"):
        store.reserve(line.copy("own-0"))
    store.abandon(slot)


def test_cache_memory_binds_no_skeleton(line, store, shelf):
    store.devices_of = lambda copy: ()
    copy = line.load(store, "own-0").copy
    assert shelf.constructed == 0
    with store.using(copy.name) as slot, pytest.raises(LoadError, match="not bound for cpu"):
        slot.skeleton("cpu")


@pytest.fixture
def experts(tmp_path):
    files = ExpertFiles(tmp_path)
    return {
        "classifier": files.classifier("cls/torch", "squeezenet1_1"), "detector": files.detector("det/torch"),
        "onnx": files.onnx("cls/onnx"), "fake": files.fake("cls/fake"),
    }  # fmt: skip


@pytest.fixture
def segments(tmp_path):
    with closing(SegmentStore(tmp_path / "packed")) as segments:
        yield segments


def copies_of(experts, segments, in_all_forms=()):
    all_forms = {Precision.FP32, Precision.ONNXRUNTIME, Precision.ONEDNN_FP32}
    forms = {each.id: {Precision.FP32} for each in experts} | {each.id: all_forms for each in in_all_forms}
    report = pack_line(experts, forms, segments)
    named = {each.id: each for each in experts}
    return [
        ExpertCopy(f"{name}@{precision}", named[name], packed)
        for name, forms in report.packed.items()
        for precision, packed in forms.items()
    ]


def refuse(*_, **__):
    raise AssertionError("constructed after all templates were made")


@pytest.mark.slow
def test_no_skeleton_is_constructed_once_they_are_made(experts, segments, monkeypatch):
    copies = copies_of(experts.values(), segments, in_all_forms=(experts["classifier"],))
    steps = []
    templates = make_templates({"cpu": copies}, segments, THREADS, lambda *step: steps.append(step))
    assert (templates.failed, steps) == ({}, [(number, len(copies)) for number in range(1, len(copies) + 1)])
    monkeypatch.setattr(models, "get_model", refuse)
    monkeypatch.setattr(detector, "DetectionModel", refuse)
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    shelf = SkeletonShelf(segments)
    with ThreadPoolExecutor(1, "transfer", use_threads, (THREADS,)) as transfer:
        for copy in copies * 2:
            assert transfer.submit(shelf.take, copy, "cpu").result() is not None
    assert len(templates.held) == len(copies)


def test_expert_that_runs_on_some_processor_has_not_failed(experts, segments, caplog):
    copies = copies_of([experts["onnx"], experts["fake"]], segments)
    templates = make_templates({"mps": copies, "cpu": copies}, segments, THREADS, lambda *_: None)
    assert templates.failed == {}
    assert "template_failed copy=cls/onnx@fp32 device=mps" in caplog.text
    templates = make_templates({"mps": copies}, segments, THREADS, lambda *_: None)
    assert templates.failed.keys() == {"cls/onnx"}
    assert "no provider" in templates.failed["cls/onnx"]
