"""Commands beside an agent change nothing that it serves."""

import json
import os
from contextlib import closing

import pytest
from PIL import Image

from agent.commands.experts import expert_rows
from agent.commands.inspection import inspect_images, verify_line
from agent.core.engine import Engine
from agent.core.events import Arrived
from agent.faults.errors import AgentCrashed
from agent.records.database import state_held
from experts.packed.snapshot import snapshot
from experts.packed.weights import SegmentStore
from tests.agent.line_files import LineFile, expert, fake, route


def quiet(stage, done, total):
    pass


@pytest.fixture
def line(tmp_path):
    """Two fake experts with a route each."""
    for number in range(2):
        fake(tmp_path / f"f{number}.yaml")
    return LineFile(
        tmp_path,
        experts={f"cls/f{number}": expert(f"f{number}.yaml") for number in range(2)},
        routes={f"c{number}": route(f"cls/f{number}") for number in range(2)},
        memory={"host": "20MiB", "workspace": "10MiB"},
    ).config


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (8, 8), (10, 200, 30)).save(tmp_path / "image.png")
    return tmp_path / "image.png"


def packed_files(config):
    """Content of every packed file."""
    packed = config.state / "packed"
    return {str(file.relative_to(packed)): file.read_bytes() for file in packed.rglob("*") if file.is_file()}


def test_verify_packs_nothing_and_says_what_is_not_packed_yet(line):
    rows = verify_line(line, quiet)
    assert [(row["expert"], row["ok"], row["size_bytes"]) for row in rows] == [("cls/f0", None, 0), ("cls/f1", None, 0)]
    assert all("not packed yet" in row["reason"] for row in rows)
    assert not (line.state / "packed").exists()


def test_verify_finds_damage_and_changes_nothing(line, image):
    inspect_images(line, [image], "c0", quiet)
    good = packed_files(line)
    assert [row["ok"] for row in verify_line(line, quiet)] == [True, True]
    fake(image.parent / "f1.yaml", 2_000_000)
    assert [row["ok"] for row in verify_line(line, quiet)] == [True, True]
    assert packed_files(line) == good
    segment = SegmentStore(line.state / "packed").segment_path(verified_segment(line, "cls/f0"))
    status = segment.stat()
    damaged = bytearray(segment.read_bytes())
    damaged[1000] ^= 1
    segment.write_bytes(damaged)
    os.utime(segment, ns=(status.st_atime_ns, status.st_mtime_ns))
    for spoil in (lambda: None, segment.unlink):
        spoil()
        rows = {row["expert"]: row for row in verify_line(line, quiet)}
        assert (rows["cls/f0"]["ok"], rows["cls/f1"]["ok"]) == (False, True)
        assert rows["cls/f0"]["reason"]


def verified_segment(config, expert):
    manifest = config.state / "packed" / "manifests" / f"{expert}.fp32.json"
    return json.loads(manifest.read_text())["packed"]["own"]["sha256"]


def test_inspecting_beside_a_running_agent_leaves_its_weights_alone_and_judges_with_the_new_ones(line, image):
    assert [row["label"] for row in inspect_images(line, [image], "c0", quiet)] == ["ok"]
    served = packed_files(line)
    fake(image.parent / "f0.yaml", 2_000_000, label="bad")
    with state_held(line.state):  # all that an inspection sees of an agent
        assert [row["label"] for row in inspect_images(line, [image], "c0", quiet)] == ["bad"]
    assert packed_files(line) == served
    assert list((line.state / "snapshots").iterdir()) == []


def test_a_snapshot_outlives_what_it_was_made_of(line, image):
    inspect_images(line, [image], "c0", quiet)
    with closing(SegmentStore(line.state / "packed")) as store:
        abandoned = line.state / "snapshots" / "of a killed process"
        abandoned.mkdir(parents=True, exist_ok=True)
        before = {name: content for name, content in packed_files(line).items() if "/" in name}
        with snapshot(store) as links:
            for file in (line.state / "packed" / "segments").iterdir():
                file.unlink()
            assert {str(file.relative_to(links)): file.read_bytes() for file in links.rglob("*.*")} == before
            with snapshot(store) as other:
                assert other != links
                assert not abandoned.exists()
            assert links.is_dir()
        assert not links.exists()


def test_an_inspection_whose_agent_crashes_ends(line, image, monkeypatch):
    handle = Engine.handle

    def break_on_arrival(engine, event, now):
        if isinstance(event, Arrived):
            raise ZeroDivisionError("a mistake")
        return handle(engine, event, now)

    monkeypatch.setattr(Engine, "handle", break_on_arrival)
    with pytest.raises(AgentCrashed, match="ZeroDivisionError: a mistake"):
        inspect_images(line, [image], "c0", quiet)


def test_experts_are_listed_with_what_is_packed_of_them(line, image):
    assert [row["size_bytes"] for row in expert_rows(line)] == [None, None]
    inspect_images(line, [image], "c0", quiet)
    (image.parent / "f1.yaml").unlink()
    rows = expert_rows(line)
    assert [row["expert"] for row in rows] == ["cls/f0", "cls/f1"]
    assert all(row["size_bytes"] >= 1_000_000 for row in rows)
    assert (rows[0]["weights_bytes"], rows[1]["weights_bytes"]) == ((image.parent / "f0.yaml").stat().st_size, None)
