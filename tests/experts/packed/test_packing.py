"""Packing a line: incremental, shared where tensors are the same, one at a time, and safe at any point."""

import fcntl
import json
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from experts.checkpoints.importing import bring
from experts.errors import LoadError, WeightsCorrupt, WeightsMismatch, WeightsMissing, WeightsRefused
from experts.expert import Precision
from experts.packed.manifests import ManifestFolder
from experts.packed.packing import forget_other_forms, pack_line
from experts.packed.segments import SHARED_MINIMUM_BYTES, TensorKey, plan_sharing
from experts.packed.sources import sha256_of, stamp_of
from experts.packed.weights import SegmentStore
from tests.forms import each_of

MIB = 1024 * 1024


def pack(store, experts, *precisions, **options):
    return pack_line(experts, lambda expert: set(precisions) or {Precision.FP32}, store, **options)


def packed_in(store, experts):
    report = pack(store, experts)
    assert report.failed == {}
    return {name: forms[Precision.FP32] for name, forms in report.packed.items()}


def files_of(store):
    return {path: path.stat().st_mtime_ns for path in store.directory.rglob("*") if path.is_file()}


def check_sound(store, packed):
    """All files of all experts, and no others, lie there as the manifests say."""
    for form in packed.values():
        for segment in form.segments:
            store.verify(segment, form.expert)
        store.program(form)
    segments = {store.segment_path(segment.sha256) for form in packed.values() for segment in form.segments}
    assert set((store.directory / "segments").iterdir()) == segments
    assert not (store.directory / "staging").exists()


def test_second_start_packs_nothing_even_after_a_source_was_touched(files, store):
    experts = [files.fake(f"cls/{name}") for name in "xyz"]
    packed, before = packed_in(store, experts), files_of(store)
    assert (packed_in(store, experts), files_of(store)) == (packed, before)
    check_sound(store, packed)
    path = store.segment_path(packed["cls/x"].own.sha256)
    os.utime(experts[0].weights, ns=(1, 1))
    assert (packed_in(store, experts), files_of(store)[path]) == (packed, before[path])
    source = ManifestFolder(store.directory / "manifests").read("cls/x", "fp32").source
    assert source.stamp == stamp_of(experts[0])  # and the next start need not hash it


@pytest.mark.parametrize("has_new_inode", [True, False])
def test_source_with_other_bytes_but_equal_size_and_time_is_packed_again(files, store, has_new_inode):
    """An image of a system may set the time of every file to one moment."""
    expert = files.fake("cls/x")
    os.utime(expert.weights, ns=(1, 1))
    before = packed_in(store, [expert])["cls/x"]
    other = expert.weights.read_bytes().replace(b"1", b"2")
    if has_new_inode:
        expert.weights.with_name("beside").write_bytes(other)
        expert.weights.with_name("beside").replace(expert.weights)
    else:
        expert.weights.write_bytes(other)
    os.utime(expert.weights, ns=(1, 1))
    assert packed_in(store, [expert])["cls/x"].source_sha256 != before.source_sha256


def test_changed_number_of_labels_is_checked_again(files, store):
    expert = files.onnx("cls/x")
    packed_in(store, [expert])
    report = pack(store, [replace(expert, labels=("ok", "ng"))])
    assert isinstance(report.failed["cls/x"], WeightsMismatch)
    assert report.packed == {}


@pytest.mark.parametrize("suffix", [".safetensors", ".onnx"])
def test_labels_in_another_order_than_the_model_files_are_refused(files, store, tmp_path, suffix):
    """Trained again with its folders in another order: each label would be told for another."""
    line = ("ok", "missing", "shifted")
    expert = (files.onnx if suffix == ".onnx" else files.classifier)("cls/x", labels=line)

    def bring_with(labels):
        if suffix == ".onnx":
            model = onnx.load_model(expert.weights)
            del model.metadata_props[:]
            model.metadata_props.add(key="names", value=str(dict(enumerate(labels))))
            onnx.save_model(model, expert.weights)
        else:
            state = load_file(expert.weights)
            torch.save({"state_dict": state, "classes": list(labels)}, tmp_path / "trained.pt")
            bring(tmp_path / "trained.pt", expert.weights)

    bring_with(line)
    assert packed_in(store, [expert])
    bring_with(("missing", "ok", "shifted"))
    report = pack(store, [expert])
    told = "has the labels missing, ok, shifted, and the line ok, missing, shifted: write them in the order of the file"
    assert f"{expert.weights} {told}" in str(report.failed["cls/x"])
    assert report.packed == {}
    assert packed_in(store, [replace(expert, labels=("missing", "ok", "shifted"))])
    assert told in str(pack(store, [expert]).failed["cls/x"])
    bring_with(("OK ", "Missing", "SHIFTED"))
    assert packed_in(store, [expert])


def test_renamed_labels_of_a_retrained_file_are_refused_until_mapped(files, store, tmp_path):
    """The line calls a burr ng; trained again, its place has another meaning."""
    expert = files.classifier("cls/x", labels=("ok", "ng"))
    state = load_file(expert.weights)

    def bring_with(*labels):
        torch.save({"state_dict": state, "classes": list(labels)}, tmp_path / "trained.pt")
        state["fc.bias"] = state["fc.bias"] + 1
        bring(tmp_path / "trained.pt", expert.weights)

    bring_with("ok", "burr")
    assert packed_in(store, [expert])
    bring_with("OK", "burr")
    assert packed_in(store, [expert])
    bring_with("ok", "blank")
    told = "has the labels ok, blank, and those served before had OK, burr: write which is which"
    assert told in str(pack(store, [expert]).failed["cls/x"])
    mapped = replace(expert, names=("ok", "blank"))
    assert packed_in(store, [mapped])
    bring_with("blank", "ok")
    assert "in the order of the file" in str(pack(store, [mapped]).failed["cls/x"])


@pytest.mark.parametrize("is_packed", [False, True])
def test_labels_that_differ_from_the_files_are_refused_until_mapped(files, store, is_packed):
    expert = files.classifier("cls/x", labels=("ok", "ng"))
    if is_packed:
        packed_in(store, [expert])
    save_file(load_file(expert.weights), expert.weights, {"labels": json.dumps(["good", "bad"])})
    if is_packed:  # by a version that took any words
        manifests = ManifestFolder(store.directory / "manifests")
        kept = manifests.read("cls/x", Precision.FP32)
        source = replace(kept.source, stamp=stamp_of(expert), sha256=sha256_of(expert), names=("good", "bad"))
        manifests.write(replace(kept, source=source, packed=replace(kept.packed, source_sha256=source.sha256)))
    told = "has the labels good, bad, and the line other words, ok, ng: write which is which, in the line's order "
    assert f"{told}`labels: {{good: ok, bad: ng}}`" in str(pack(store, [expert]).failed["cls/x"])
    assert packed_in(store, [replace(expert, names=("good", "bad"))])


@pytest.mark.parametrize("named", [("NG", "OK"), (" ng", "ok "), ("Ng", "oK")])
def test_labels_that_differ_in_case_only_count_as_moved(files, store, named):
    expert = files.classifier("cls/x", labels=("ok", "ng"))
    save_file(load_file(expert.weights), expert.weights, {"labels": json.dumps(named)})
    assert "in the order of the file" in str(pack(store, [expert]).failed["cls/x"])
    assert packed_in(store, [replace(expert, labels=("ng", "ok"))])


def test_missing_cut_or_senseless_packed_files_are_packed_again(files, store):
    expert = files.fake("cls/x")
    packed = packed_in(store, [expert])
    manifest = ManifestFolder(store.directory / "manifests").path("cls/x", "fp32")
    for content in ("", "{", "[]", "{}", json.dumps({"packed": {}, "source": {}, "tensor_sha256": {}}), "\x00\xff"):
        manifest.write_text(content)
        assert packed_in(store, [expert]) == packed
        assert json.loads(manifest.read_text())["packed"]["expert"] == "cls/x"
    segment = store.segment_path(packed["cls/x"].own.sha256)
    for damage in (lambda: segment.unlink(), lambda: os.truncate(segment, 4096)):
        damage()
        assert packed_in(store, [expert]) == packed
        check_sound(store, packed)
    (store.directory / "staging").mkdir()
    (store.directory / "staging" / "0.fp32.whole").write_bytes(b"half")
    (store.directory / "segments" / f"{'0' * 64}.bin").write_bytes(b"nobody's")
    assert packed_in(store, [expert]) == packed
    check_sound(store, packed)


def test_broken_experts_do_not_stop_the_others(files, store):
    sound = files.fake("cls/sound")
    missing = files.fake("cls/missing")
    missing.weights.unlink()
    truncated = files.classifier("cls/truncated", "squeezenet1_1")
    truncated.weights.write_bytes(truncated.weights.read_bytes()[:10_000])
    pickled = replace(sound, id="cls/pickled", architecture="resnet18", weights=files.folder / "x.pt")
    torch.save({}, pickled.weights)
    report = pack(store, [missing, truncated, sound, pickled])
    assert list(report.packed) == ["cls/sound"]
    assert {name: type(error) for name, error in report.failed.items()} == {
        "cls/missing": WeightsMissing, "cls/truncated": WeightsCorrupt, "cls/pickled": WeightsRefused,
    }  # fmt: skip
    assert "coserve experts import" in str(report.failed["cls/pickled"])
    check_sound(store, {"cls/sound": report.packed["cls/sound"][Precision.FP32]})


def test_packed_files_of_removed_experts_and_forms_are_deleted(files, store):
    experts = [files.fake(f"cls/{name}") for name in "xyz"]
    steps = []
    pack(store, experts, Precision.FP32, Precision.BF16, progress=steps.append)
    assert [(step.expert, step.precision, step.number, step.total) for step in steps[:3]] == [
        ("cls/x", "bf16", 1, 6), ("cls/x", "fp32", 2, 6), ("cls/y", "bf16", 3, 6),
    ]  # fmt: skip
    pack(store, experts[:2], Precision.FP32, Precision.BF16)
    forget_other_forms({"cls/x": {Precision.BF16}, "cls/y": {Precision.FP32, Precision.BF16}}, store)
    left = [manifest.packed for manifest in ManifestFolder(store.directory / "manifests").read_all()]
    assert {(each.expert, each.precision) for each in left} == {
        ("cls/x", "bf16"), ("cls/y", "fp32"), ("cls/y", "bf16"),
    }  # fmt: skip
    segments = {store.segment_path(segment.sha256) for each in left for segment in each.segments}
    assert set((store.directory / "segments").iterdir()) == segments


def test_experts_that_run_in_no_form_here_keep_their_files(files, store):
    experts = [files.fake("cls/x")]
    pack(store, experts, Precision.FP32)
    before = files_of(store)
    pack_line(experts, lambda expert: set(), store)  # by an agent whose executors are all in workers
    assert files_of(store) == before


def test_tensors_common_to_several_experts_are_stored_once(files, store):
    experts = [files.fake(f"cls/{number}", shared={"backbone": 2 * MIB}) for number in range(3)]
    packed = packed_in(store, experts)
    assert (len({form.shared for form in packed.values()}), len(packed["cls/0"].shared)) == (1, 1)
    assert len({form.own.sha256 for form in packed.values()}) == 3
    assert len({form.layout for form in packed.values()}) == 1
    check_sound(store, packed)


def test_added_expert_shares_with_those_packed_before(files, store, make_slot, image):
    old, other = files.fake("cls/old", shared={"backbone": 2 * MIB}), files.fake("cls/other")
    before = packed_in(store, [old, other])
    other_written = files_of(store)[store.segment_path(before["cls/other"].own.sha256)]
    assert before["cls/old"].shared == ()
    new = files.fake("cls/new", shared={"backbone": 2 * MIB})
    after = packed_in(store, [old, other, new])
    assert after["cls/old"].shared == after["cls/new"].shared != ()
    assert after["cls/other"] == before["cls/other"]
    assert files_of(store)[store.segment_path(before["cls/other"].own.sha256)] == other_written
    check_sound(store, after)
    for expert in (old, new):
        make_slot(expert, after[expert.id], store).infer(expert, image)  # a fake checks its bytes
    shared_written = files_of(store)[store.segment_path(after["cls/old"].shared[0].sha256)]
    alone = packed_in(store, [old, other])
    assert alone["cls/old"].own == before["cls/old"].own
    check_sound(store, alone)
    assert shared_written


def test_packed_file_found_corrupt_is_packed_again_the_next_time(files, store):
    old = files.fake("cls/old", shared={"backbone": 2 * MIB})
    path = store.segment_path(packed_in(store, [old])["cls/old"].own.sha256)
    content = path.read_bytes()
    path.write_bytes(content[:5000] + b"spoiled" + content[5007:])
    experts = [old, files.fake("cls/new", shared={"backbone": 2 * MIB})]
    failed = pack(store, experts).failed
    assert any(isinstance(error, WeightsCorrupt) and str(path) in error.message for error in failed.values())
    check_sound(store, packed_in(store, experts))


@pytest.mark.parametrize("form", each_of(Precision.FP32, Precision.ONNXRUNTIME, Precision.ONEDNN_FP32))
def test_frozen_backbone_of_classifiers_is_shared_in_every_form(files, store, make_slot, image, form):
    module = files.build("mobilenet_v3_small", 3).eval()

    def with_another_head(name):
        with torch.no_grad():
            for parameter in module.classifier[-1].parameters():
                parameter.normal_()  # a fresh head's scores are equal, and no answer
        return files.torch_module(name, module, "mobilenet_v3_small")

    first, second = map(with_another_head, ("cls/first", "cls/second"))
    packed = pack(store, [first, second], form).packed
    one, other = (packed[expert.id][form] for expert in (first, second))
    assert one.own.size_bytes == 4096 * -(-(3 * 1024 + 3) * 4 // 4096)  # the head alone
    assert (one.shared, one.layout) == (other.shared, other.layout)
    assert make_slot(first, one, store).infer(first, image) != make_slot(second, other, store).infer(second, image)


def test_full_disk_leaves_the_earlier_packed_files(files, store):
    """The system refuses to let any file grow beyond a limit: the same error as a full disk, at the same place."""
    small = files.fake("cls/small", weight_bytes=10_000)
    before = packed_in(store, [small])
    large = files.fake("cls/large", weight_bytes=3 * MIB)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signalled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        report = pack(store, [small, large])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, signalled)
    assert isinstance(report.failed["cls/large"], LoadError)
    assert "make room" in str(report.failed["cls/large"])
    assert report.packed["cls/small"][Precision.FP32] == before["cls/small"]
    check_sound(store, before)
    check_sound(store, packed_in(store, [small, large]))


def test_store_is_locked_during_packing_only(files, store):
    refusals = []

    def lock():
        with (store.directory / "packing.lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def try_to_lock(_step):
        with pytest.raises(BlockingIOError) as refused:
            lock()
        refusals.append(refused.value)

    pack(store, [files.fake("cls/x")], progress=try_to_lock)
    assert len(refusals) == 1
    lock()


def test_concurrent_packings_leave_a_sound_store(files, store):
    experts = [files.fake(f"cls/{number}") for number in range(6)]

    def pack_apart(_):
        with closing(SegmentStore(store.directory)) as own:
            return packed_in(own, experts)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(pack_apart, range(4)))
    assert all(each == found[0] for each in found)
    check_sound(store, found[0])


def key(name, content, size_bytes=SHARED_MINIMUM_BYTES):
    return TensorKey(name, "uint8", (size_bytes,), (1,), content)


contents = st.dictionaries(
    st.sampled_from(["stem", "body", "neck", "head"]),
    st.tuples(st.sampled_from(["x", "y"]), st.sampled_from([1000, SHARED_MINIMUM_BYTES // 2, SHARED_MINIMUM_BYTES])),
)
lines = st.dictionaries(st.sampled_from("abcdef"), contents).map(
    lambda line: {
        expert: tuple(key(name, content, size) for name, (content, size) in held.items())
        for expert, held in line.items()
    }
)


@given(lines)
def test_every_tensor_has_exactly_one_place(line):
    for expert, partition in plan_sharing(line).items():
        placed = [*partition.own, *(key for group in partition.shared for key in group)]
        assert sorted(placed, key=repr) == sorted(line[expert], key=repr)


@given(lines)
def test_shared_group_is_held_whole_by_its_holders_only(line):
    plan = plan_sharing(line)
    for group in {group for partition in plan.values() for group in partition.shared}:
        holders = {expert for expert, partition in plan.items() if group in partition.shared}
        assert len(holders) > 1
        assert all(holders == {expert for expert, keys in line.items() if key in keys} for key in group)
        assert sum(key.size_bytes for key in group) >= SHARED_MINIMUM_BYTES


@given(lines, st.randoms())
def test_sharing_does_not_depend_on_the_order_of_experts(line, random):
    shuffled = list(line.items())
    random.shuffle(shuffled)
    assert plan_sharing(dict(shuffled)) == plan_sharing(line)
