"""The device profile's file: reads equal writes, a kill loses nothing, and an incomplete file is refused."""

import multiprocessing
import os
import resource
import signal
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.device_profile.identity import box_mismatches, differences, expert_mismatches, identity_of, packed_sha256
from agent.device_profile.records import (
    SOURCE,
    Agreement,
    Allocation,
    BatchTimes,
    BoxIdentity,
    ExpertForm,
    ImageDecoding,
    KindProfile,
    LinkSpeed,
    PoolAllocation,
    SearchTrial,
    StoredProfile,
    UsageOrigin,
    UsageProfile,
)
from agent.device_profile.schema import is_refused_by_disk, migrations
from agent.device_profile.store import ProfileDraft, partial_of, read_profile, replace_usage
from agent.faults.errors import ProfileDamaged
from agent.runtime.machine.box import Box, MemorySize
from experts.backends.forms import FORMS, forms_here
from experts.errors import ConfigError
from experts.packed.weights import PackedExpert, Segment, TensorSpec

GIB = 2**30
LIBRARIES = {"torch": "2.15.0", "python": "3.11.2"}
BOX = BoxIdentity("cuda", "RTX", ("cuda", "cpu"), 8, 16 * GIB, 12 * GIB, LIBRARIES, "onednn-bf16, onednn-fp32")
KIND = KindProfile(
    kind="resnet18 64x64 imagenet",
    architecture="resnet18",
    processor="cpu",
    precision="fp32",
    threads=8,
    K_s=0.1 + 0.2,
    B_s=1e-7,
    fit_error=1 / 3,
    max_batch=6,
    weight_bytes=2**53 + 1,
    workspace_base_bytes=0,
    workspace_bytes=123,
    load_s={"ssd": 0.055, "host": 5e-324},
    batches=(BatchTimes(1, (0.1, 0.30000000000000004), 7), BatchTimes(2, (0.2,), 9)),
    samples="24 images from inbox/done",
)
FASTER = replace(KIND, precision="bf16", K_s=0.05, batches=())
AGREEMENT = Agreement("cls/a", KIND.kind, "cpu", "bf16", 24, 0, 0.0123456789, 0.02, "5a", 20)
FORM = ExpertForm("cls/a", "cpu", KIND.kind, KIND.precision, "24 images agree", "7e")
USAGE = UsageProfile({"cls/a": 2 / 3, "cls/b": 1 / 3, "det/x": 0.6}, {"cls/a": 0.9}, UsageOrigin.COMPUTED, 0)
ALLOCATION = Allocation(
    "searched in simulation",
    {"host": 8 * GIB, "device": 10 * GIB},
    (PoolAllocation("host", 6 * GIB, 2 * GIB, 30), PoolAllocation("device", 9 * GIB, GIB, 48)),
    {"cuda": 3, "cpu": 1},
)
PRECISIONS = {(KIND.kind, "cpu"): "bf16"}
PACKED = {("cls/a", "fp32"): "aa", ("cls/a", "bf16"): "ab", ("cls/b", "fp32"): "bb"}
LINKS = (LinkSpeed("ssd", 2.5e9), LinkSpeed("host", 1.2e10))
DECODINGS = (
    ImageDecoding("cls/a", 8, 96.0, 1.6, 0.45, 8, 0, 0.0123, 0.02, "5b"),
    ImageDecoding("det/x", 2, 0.03, 0.002, 0.002, 0, 0, 0.0, 0.02, "5c"),
)
TRIALS = (
    SearchTrial("executors", 1, "cuda 1, cpu 1", 12.5),
    SearchTrial("executors", 2, "cuda 2, cpu 1", 17.25, "best"),
)


def fill(draft):
    """Save every part of a profile."""
    draft.save_links(LINKS)
    draft.save_kind(KIND)
    draft.save_kind(FASTER)
    draft.save_agreement(AGREEMENT)
    draft.save_speedups("cuda", (1.0, 1.7, 1.9))
    draft.save_precisions(PRECISIONS, [FORM])
    draft.save_packed(PACKED)
    draft.save_usage(USAGE)
    draft.save_allocation(ALLOCATION)
    draft.save_trials("executors", TRIALS)
    draft.save_decodings(DECODINGS)


def written(path, box=BOX):
    with ProfileDraft.open(path, "demo", box) as draft:
        fill(draft)
        return draft.finish()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "profile.db"


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    return str(caught.value)


def test_written_profile_is_read_back_from_one_file(path):
    finished = written(path)
    assert read_profile(path) == finished
    assert finished == StoredProfile(
        line="demo",
        written_at=finished.written_at,
        box=BOX,
        links=LINKS,
        kinds=(KIND, FASTER),
        agreements=(AGREEMENT,),
        precisions=PRECISIONS,
        packed=PACKED,
        usage=USAGE,
        allocation=ALLOCATION,
        speedups={"cuda": (1.0, 1.7, 1.9)},
        trials=TRIALS,
        decodings=DECODINGS,
        forms={("cls/a", "cpu"): FORM},
    )
    assert [each.agrees for each in finished.decodings] == [True, False]
    assert [each.image_s for each in finished.decodings] == [0.45 / 8, 0.001]
    assert names(path.parent) == ["profile.db"]


FINITE = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


@settings(max_examples=25)
@given(st.lists(st.tuples(FINITE, FINITE, st.integers(1, 2**62)), min_size=1, max_size=4))
def test_numbers_are_read_back_to_the_last_bit(tmp_path_factory, numbers):
    path = tmp_path_factory.mktemp("exact") / "profile.db"
    kinds = tuple(
        replace(KIND, kind=f"k{i}", K_s=k, load_s={"ssd": b}, batches=(BatchTimes(1, (k, b), size),), weight_bytes=size)
        for i, (k, b, size) in enumerate(numbers)
    )
    with ProfileDraft.open(path, "demo", BOX) as draft:
        for kind in kinds:
            draft.save_kind(kind)
        assert draft.kinds() == kinds
        draft.save_kind(replace(KIND, K_s=np.float64(0.25), max_batch=np.int64(3)))  # numbers of numpy are numbers
        assert draft.kinds()[-1] == replace(KIND, K_s=0.25, max_batch=3)


# -- kills --


def measure_until_killed(path, until):
    """A profiler's process: reports its save, then is killed inside a transaction."""
    with ProfileDraft.open(path, "demo", BOX) as draft:
        draft.save_kind(KIND)
        draft._database.begin()
        draft._database.execute("PRAGMA cache_size = 1")
        for number in range(200):
            draft._database.execute("INSERT INTO trials VALUES ('x', ?, ?, 1.0, '')", (number, "x" * 2000))
        until.send("inside")
        signal.pause()


def test_killed_profiler_keeps_all_that_was_saved_and_nothing_half(path):
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=measure_until_killed, args=(path, there))
    process.start()
    there.close()  # a process that cannot start ends the wait
    assert here.recv() == "inside"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert "profile.db.partial-journal" in names(path.parent)
    with ProfileDraft.open(path, "demo", BOX) as draft:
        assert draft.kinds() == (KIND,)
        assert draft.trials("x") == ()
        fill(draft)
        draft.finish()
    assert names(path.parent) == ["profile.db"]


def test_new_draft_adopts_measurements_of_the_same_box(path):
    before = written(path)
    content = path.read_bytes()
    with ProfileDraft.open(path, "demo", BOX) as draft:
        assert draft.kinds() == before.kinds
        assert draft.agreements() == before.agreements
        assert (draft.speedups(), draft.links(), draft.packed()) == (before.speedups, before.links, before.packed)
        assert draft.decodings() == before.decodings
        draft.save_graphs("cuda", 1.5)
        draft.save_kind(replace(KIND, kind="yolov5m 640x640 unit"))
        with pytest.raises(ConfigError, match="lacks precisions, packed, usage, allocation - `coserve profile LINE"):
            draft.finish()
        fill(draft)
        draft.save_precisions({(KIND.kind, "cpu"): "fp16"})
        with pytest.raises(ConfigError, match="lacks the times of resnet18 64x64 imagenet in fp16 on cpu"):
            draft.finish()
    assert path.read_bytes() == content
    with ProfileDraft.open(path, "demo", BOX) as draft:
        fill(draft)
        assert draft.graphs() == {"cuda": 1.5}, "of the draft that it resumes"
        assert len(draft.finish().kinds) == 3
    with ProfileDraft.open(path, "demo", BOX) as draft:
        assert draft.graphs() == read_profile(path).graphs == {"cuda": 1.5}


def test_speedups_stay_with_the_kinds_and_precisions_that_they_were_measured_with(path):
    written(path)
    on_cuda = {"cuda": (1.0, 1.7, 1.9)}
    with ProfileDraft.open(path, "demo", BOX) as draft:
        for change in (
            lambda: draft.save_precisions(PRECISIONS, [replace(FORM, precision="bf16")]),
            lambda: draft.save_kind(KIND),
        ):
            draft.save_precisions(PRECISIONS, [FORM])
            draft.save_speedups("cpu", (1.0, 1.1))
            draft.save_precisions(PRECISIONS, [FORM])
            assert draft.speedups() == on_cuda | {"cpu": (1.0, 1.1)}
            change()
            assert draft.speedups() == on_cuda


def test_new_draft_adopts_nothing_from_another_box_or_a_damaged_file(path, caplog):
    written(path)
    content = path.read_bytes()
    with ProfileDraft.open(path, "demo", replace(BOX, cores=4)) as draft:
        assert draft.kinds() == ()
    written(path)
    with ProfileDraft.open(path, "demo", BOX) as draft:
        assert draft.kinds()
    with ProfileDraft.open(path, "demo", BOX, fresh=True) as draft:
        assert (draft.kinds(), draft.links(), draft.packed()) == ((), (), {})
    path.write_bytes(content[:5000])
    with ProfileDraft.open(path, "demo", replace(BOX, cores=2)) as draft:
        assert draft.kinds() == ()
    assert "profile_measured_anew" in caplog.text
    assert path.read_bytes() == content[:5000]


# -- what is refused --


def unfinished(path):
    """A draft with every part, under the finished name."""
    with ProfileDraft.open(path, "demo", BOX) as draft:
        fill(draft)
    partial_of(path).rename(path)


def of_another_program(path):
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE results (seq INTEGER)")


def holding(content):
    def write(path):
        path.parent.mkdir()
        path.write_bytes(content)

    return write


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda path: None, "no device profile - run `coserve profile LINE.yaml`"),
        (unfinished, "is a half-written profile - run `coserve profile LINE.yaml` again with --fresh"),
        (of_another_program, "is a SQLite file, but not a device profile"),
        (holding(b""), "is empty, so it is not a device profile - run `coserve profile LINE.yaml` again"),
        (holding(b"device: cuda\n"), "is not a SQLite file, so it is not a device profile - run"),
    ],
)
def test_file_that_is_no_profile_is_refused_and_unchanged(path, write, expected):
    write(path)
    before = path.read_bytes() if path.exists() else None
    assert f"{path}" in refusal(path)
    assert expected in refusal(path)
    assert (path.read_bytes() if path.exists() else None) == before


def test_unfinished_profile_is_named_and_can_be_resumed(path):
    with ProfileDraft.open(path, "demo", BOX) as draft:
        draft.save_kind(KIND)
    expected = f"{partial_of(path)}: profiling was not finished - `coserve profile LINE.yaml` resumes it"
    assert refusal(path) == expected


def test_every_truncation_is_refused_and_nothing_is_written(path):
    written(path)
    content = path.read_bytes()
    for size in range(100, len(content), 4096):
        path.write_bytes(content[:size])
        assert str(path) in refusal(path)
        assert path.read_bytes() == content[:size]
        assert names(path.parent) == ["profile.db"]


def changed(path, statement, *values):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


def test_newer_schema_is_refused_and_an_older_one_read(path):
    written(path)
    added = "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('profile', 'llm_kinds', '')"
    changed(path, added)
    assert "was written by another version of CoServe (llm_kinds) - install it" in refusal(path)
    with pytest.raises(ConfigError, match="another version of CoServe"):
        replace_usage(path, USAGE)


def test_older_schema_is_migrated_in_memory_only(path, monkeypatch):
    written(path)
    content = path.read_bytes()
    later = type(migrations)("profile")
    for migration in migrations._migrations:
        later(name=migration.name)(migration.fn)
    later(name="renamed_line")(lambda database: database.execute("UPDATE profile SET line = 'migrated'"))
    monkeypatch.setattr("agent.device_profile.schema.migrations", later)
    assert read_profile(path).line == "migrated"
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("DELETE FROM parts WHERE part = 'usage'", "lacks usage"),
        ("DELETE FROM kinds", "lacks kinds"),
        ("DELETE FROM usage_origin", "has invalid content (usage_origin has 0 rows, not one)"),
    ],
)
def test_missing_parts_are_named(path, files, statement, expected):
    holding(files[0])(path)
    changed(path, statement)
    assert expected in refusal(path)


def test_kind_without_a_load_time_is_named(path):
    written(path)
    changed(path, "UPDATE kinds SET load_s = '{}'")
    assert read_profile(path).kinds[0].load_s == {}
    changed(path, "DELETE FROM links WHERE link = 'ssd'")
    assert f"lacks the time to load {KIND.kind} from ssd to cpu" in refusal(path)


# -- what was edited --

IN_FP32 = f"{KIND.kind}, cpu, fp32"
EDITED = [
    ("UPDATE kinds SET K_s = 'abc'", f"kinds.K_s of {IN_FP32}: 'abc' is not a finite number from 0"),
    ("UPDATE kinds SET max_batch = 2.5", f"kinds.max_batch of {IN_FP32}: 2.5 is not a whole number from 1"),
    ("UPDATE kinds SET samples = x'00ff'", f"kinds.samples of {IN_FP32}: b'\\x00\\xff' is not text"),
    ("UPDATE kinds SET samples = CAST(x'ff' AS TEXT)", "Could not decode to UTF-8"),
    ("""UPDATE kinds SET load_s = '{"ssd": NaN}'""", f"kinds.load_s of {IN_FP32}: {{'ssd': nan}} is not"),
    (f"UPDATE kinds SET load_s = '{'[' * 100_000}'", f"kinds.load_s of {IN_FP32}: '[[["),
    ("UPDATE batches SET seconds = '[]'", f"batches.seconds of {IN_FP32}, 1: [] is not a list"),
    ("UPDATE profile SET versions = '3'", "profile.versions: 3 is not names, each with text"),
    ("UPDATE usage SET pass_rate = 7", "usage.pass_rate of cls/a: 7 is not a number from 0 to 1"),
    (
        "UPDATE usage_origin SET origin = 'guessed'",
        "usage_origin.origin: 'guessed' is not one of computed from quantities, counted on samples, served",
    ),
    ("ALTER TABLE kinds DROP COLUMN samples", "no such column: samples"),
    ("DROP TABLE profile", "no such table: profile"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Bytes of a finished profile and of an unfinished one."""
    path = tmp_path_factory.mktemp("files") / "profile.db"
    with ProfileDraft.open(path, "demo", BOX) as draft:
        fill(draft)
    unfinished = partial_of(path).read_bytes()
    with ProfileDraft.open(path, "demo", BOX) as draft:
        draft.finish()
    return path.read_bytes(), unfinished


@pytest.mark.parametrize(("statement", "expected"), EDITED)
def test_edited_profile_is_refused_by_column_and_row(path, files, statement, expected):
    holding(files[0])(path)
    changed(path, statement)
    content = path.read_bytes()
    told = refusal(path)
    assert told.startswith(f"{path} ")
    assert expected in told
    assert "run `coserve profile LINE.yaml` again with --fresh" in told
    with pytest.raises(ProfileDamaged):
        replace_usage(path, USAGE)
    assert path.read_bytes() == content
    assert names(path.parent) == ["profile.db"]


@pytest.mark.parametrize(("statement", "expected"), [EDITED[0], EDITED[-1]])
def test_edited_unfinished_profile_is_discarded_with_the_reason(path, files, caplog, statement, expected):
    holding(files[1])(partial_of(path))
    changed(partial_of(path), statement)
    with ProfileDraft.open(path, "demo", BOX) as draft:
        assert (draft.kinds(), draft.links(), draft.trials("executors")) == ((), (), ())
        draft.save_kind(FASTER)
        assert draft.kinds() == (FASTER,)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"profile_partial_discarded path={partial_of(path)} reason=it ")
    assert expected in told
    assert "--fresh" not in told


@pytest.mark.parametrize(
    ("save", "record", "expected"),
    [
        ("save_kind", replace(KIND, K_s=-0.1), "kinds.K_s"),
        ("save_kind", replace(KIND, batches=(BatchTimes(1, (), 0),)), "batches.seconds"),
        (
            "save_usage",
            UsageProfile({}, {"cls/a": 7}, UsageOrigin.SERVED),
            "usage.pass_rate of cls/a: 7 is not a number",
        ),
        ("save_links", [LinkSpeed("ssd", 0.0)], "links.bytes_per_s of ssd: 0.0 is not a finite number above 0"),
        ("save_allocation", replace(ALLOCATION, budget_bytes={"host": -1}), "allocation_budgets.budget_bytes of host"),
    ],
)
def test_record_that_could_not_be_read_is_not_written(path, save, record, expected):
    written(path)
    with ProfileDraft.open(path, "demo", BOX) as draft:
        fill(draft)
        with pytest.raises(ValueError, match=expected):
            getattr(draft, save)(record)
        found = draft.finish()
    assert (found.kinds, found.usage, found.links, found.allocation) == ((KIND, FASTER), USAGE, LINKS, ALLOCATION)


# -- what the disk refuses --


@contextmanager
def no_room():
    """No file can grow beyond its first bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_loses_nothing_saved(path):
    with ProfileDraft.open(path, "demo", BOX) as draft:
        draft.save_kind(KIND)
    with no_room(), pytest.raises(sqlite3.OperationalError) as caught, ProfileDraft.open(path, "demo", BOX):
        pass
    assert is_refused_by_disk(caught.value)
    with ProfileDraft.open(path, "demo", BOX) as draft:
        assert draft.kinds() == (KIND,)
        fill(draft)
        before = draft.finish()
    with no_room(), pytest.raises(sqlite3.OperationalError):
        replace_usage(path, UsageProfile({}, {}, UsageOrigin.SERVED, 1))
    assert read_profile(path) == before
    assert names(path.parent) == ["profile.db"]


# -- usage --


def test_usage_is_replaced_and_nothing_else(path):
    before = written(path)
    served = UsageProfile({"cls/a": 0.25, "cls/b": 0.75}, {"cls/a": 0.5}, UsageOrigin.SERVED, 4000)
    replace_usage(path, served)
    assert read_profile(path) == replace(before, usage=served)
    assert names(path.parent) == ["profile.db"]
    with ProfileDraft.open(path, "demo", BOX), pytest.raises(ConfigError, match="another `coserve profile`"):
        replace_usage(path, before.usage)
    assert read_profile(path).usage == served


# -- matching --


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device": "cpu"}, ["the device is cpu now, cuda in the profile"]),
        ({"model": "M2"}, ["the device's model is 'M2' now, 'RTX' in the profile"]),
        ({"processors": ("cpu",)}, ["the processors are cpu now, cuda and cpu in the profile"]),
        ({"cores": 4}, ["the cores are 4 now, 8 in the profile"]),
        ({"versions": {"torch": "2.16.0", "python": "3.11.2"}}, ["torch is 2.16.0 now, 2.15.0 in the profile"]),
        ({"versions": {"torch": "2.15.0"}}, ["python is not installed now, 3.11.2 in the profile"]),
        ({"forms": ""}, ["oneDNN's forms on this CPU are none now, onednn-bf16, onednn-fp32 in the profile"]),
        ({"host_bytes": 8 * GIB}, []),
        ({"host_bytes": 7 * GIB}, ["the host memory is 7168.0 MiB now, the profile shares out 8192.0 MiB"]),
    ],
)
def test_differences_of_the_box_are_listed_in_sentences(path, changes, expected):
    assert list(box_mismatches(written(path), replace(BOX, **changes))) == expected


def test_emulated_device_has_no_size_of_its_own(path):
    emulated = replace(BOX, device="emulated")
    assert box_mismatches(written(path, emulated), replace(emulated, device_bytes=1)) == ()


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({}, {("cls/b", "fp32"): "bb"}, {}),
        ({}, {("cls/a", "bf16"): "x"}, {"cls/a": "in bf16 has other packed weights than those that were profiled"}),
        ({}, {("det/new", "fp32"): "n", ("det/new", "bf16"): "n"}, {"det/new": "is not in the profile"}),
        ({}, {("cls/b", "bf16"): "bx"}, {"cls/b": "was not profiled in bf16"}),
        ({"cls/a": "s"}, {("cls/a", "fp16"): "x", ("cls/a", SOURCE): "s"}, {}),
        ({"cls/a": "s"}, {("cls/a", "fp16"): "x", ("cls/a", SOURCE): "t"},
         {"cls/a": "has other weights than those that were profiled"}),
        ({}, {("cls/a", "fp16"): "x", ("cls/a", SOURCE): "s"}, {"cls/a": "was not profiled in fp16"}),
        ({"cls/a": "s"}, {("cls/a", "fp16"): "x"}, {"cls/a": "was not profiled in fp16"}),
    ],
)  # fmt: skip
def test_experts_that_differ_from_the_profile_are_named(path, then, now, expected):
    packed = PACKED | {(expert, SOURCE): sha256 for expert, sha256 in then.items()}
    assert expert_mismatches(replace(written(path), packed=packed), now) == expected


def test_identity_of_a_box_has_its_device_memory_and_forms():
    box = Box("cuda", "RTX", ("cuda", "cpu"), 8, MemorySize(16, 9), MemorySize(12, 8), (("torch", "2"),))
    forms = ", ".join(sorted(FORMS[form].name_here for form in forms_here() if form.startswith("onednn")))
    assert identity_of(box) == BoxIdentity("cuda", "RTX", ("cuda", "cpu"), 8, 16, 12, {"torch": "2"}, forms)
    assert "onednn-fp32" in forms
    assert identity_of(replace(box, device=None)).device_bytes is None
    named = identity_of(replace(box, cpu="Xeon", drive="Samsung 990 S1"))
    assert (named.cpu, named.drive) == ("Xeon", "Samsung 990 S1")
    other = replace(named, cpu="i7", drive="WD Blue W2")
    assert differences(named, other) == (
        "the CPU is i7 now, Xeon in the profile",
        "the drive of the packed weights is WD Blue W2 now, Samsung 990 S1 in the profile",
    )
    assert differences(identity_of(box), named) == ()  # a profile from before names neither
    assert differences(named, identity_of(box)) == ()


@pytest.mark.parametrize(
    ("migration", "added"),
    [
        ("cpu_and_drive", {"profile": "cpu drive"}),
        ("gain_of_graphs", {"profile": "graphs"}),
        (
            "samples_by_class",
            {"agreements": "failing least_each", "decodings": "failing least least_each bound_sha256"},
        ),
    ],
)
def test_profile_written_before_a_migration_is_read_and_its_proofs_hold(path, migration, added):
    before = written(path)
    with closing(sqlite3.connect(path)) as database:
        for table, columns in added.items():
            for column in columns.split():
                database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        database.execute("DELETE FROM _sqlite_migrations WHERE name = ?", (migration,))
        database.commit()
    assert read_profile(path) == before
    assert (before.box.cpu, before.box.drive, [each.proves for each in before.agreements]) == ("", "", [True])


def packed(sha256="s", tensors=(), shared=(), program=None):
    own = Segment(f"{sha256}-own", 4096, tensors)
    return PackedExpert("cls/a", "resnet18", "fp32", "layout", sha256, own, shared, program)


def test_digest_of_packed_weights_covers_source_and_form_but_not_sharing():
    wide, narrow = TensorSpec("w", "float32", (2, 3), (3, 1), 0), TensorSpec("v", "float32", (2,), (1,), 128)
    alone = packed(tensors=(wide, narrow))
    sharing = packed(tensors=(replace(narrow, offset_bytes=0),), shared=(Segment("common", 4096, (wide,)),))
    assert packed_sha256(alone) == packed_sha256(sharing)
    others = [packed("t", (wide, narrow)), packed(tensors=(wide,)), packed(tensors=(wide, narrow), program="p")]
    others.append(packed(tensors=(replace(wide, stride=(1, 2)), narrow)))
    assert len({packed_sha256(each) for each in [alone, *others]}) == 5
