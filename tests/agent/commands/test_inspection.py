"""Commands beside an agent change nothing that it serves; anomalies, and labels that do not exclude one another."""

import json
import os
from contextlib import closing

import numpy as np
import onnx
import pytest
from PIL import Image

from agent.commands.experts import expert_rows
from agent.commands.inspection import inspect_images, verify_line
from agent.core.engine import Engine
from agent.core.events import Arrived
from agent.faults.errors import AgentCrashed
from agent.records.database import state_held
from agent.service.line_service import LineService
from experts.backends.onnx.anomaly import certainty
from experts.backends.vision.classifier import write_random_weights
from experts.errors import ConfigError
from experts.packed.snapshot import snapshot
from experts.packed.weights import SegmentStore
from tests.agent.line_files import LineFile, expert, fake, route
from tests.commands import coserve
from tests.experts.backends.onnx.anomaly_graphs import SIZE_PX, brightness


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


def test_verify_packs_nothing_and_names_what_is_not_packed(line):
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


def test_inspection_beside_an_agent_uses_new_weights_and_leaves_its_packed_ones(line, image):
    assert [row["label"] for row in inspect_images(line, [image], "c0", quiet)] == ["ok"]
    served = packed_files(line)
    fake(image.parent / "f0.yaml", 2_000_000, label="bad")
    with state_held(line.state):  # all that an inspection sees of an agent
        assert [row["label"] for row in inspect_images(line, [image], "c0", quiet)] == ["bad"]
    assert packed_files(line) == served
    assert list((line.state / "snapshots").iterdir()) == []


def test_snapshot_outlives_its_source(line, image):
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


def test_crashed_agent_ends_its_inspection(line, image, monkeypatch):
    handle = Engine.handle

    def break_on_arrival(engine, event, now):
        if isinstance(event, Arrived):
            raise ZeroDivisionError("a mistake")
        return handle(engine, event, now)

    monkeypatch.setattr(Engine, "handle", break_on_arrival)
    with pytest.raises(AgentCrashed, match="ZeroDivisionError: a mistake"):
        inspect_images(line, [image], "c0", quiet)


def test_experts_are_listed_with_their_packed_sizes(line, image):
    assert [row["size_bytes"] for row in expert_rows(line)] == [None, None]
    inspect_images(line, [image], "c0", quiet)
    (image.parent / "f1.yaml").unlink()
    rows = expert_rows(line)
    assert [row["expert"] for row in rows] == ["cls/f0", "cls/f1"]
    assert all(row["size_bytes"] >= 1_000_000 for row in rows)
    assert (rows[0]["weights_bytes"], rows[1]["weights_bytes"]) == ((image.parent / "f0.yaml").stat().st_size, None)


def inspected(folder, **keys):
    """The row of an image, judged by an undecided expert."""
    told = {"task": "multilabel", "labels": ["bent"], "otherwise": "ok"} | keys
    line = LineFile(
        folder,
        device="cpu",
        experts={"cls/x": expert("x.safetensors", "squeezenet1_1", 64, **told)},
        routes={"coil": route("cls/x")},
        memory={"host": "40MiB", "workspace": "20MiB"},
    )
    words = ("inspect", line.write(), folder / "part.png", "--component", "coil", "--json")
    return json.loads(coserve(*words, check=0).stdout)["results"][0]


def test_multilabel_image_is_good_only_if_no_defect_reaches_its_threshold(tmp_path):
    write_random_weights(tmp_path / "x.safetensors", "squeezenet1_1", 1, seed=0, image_size=64)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "part.png")
    score = inspected(tmp_path)["outputs"][0]["score"]
    assert 0 < score < 1
    rows = [inspected(tmp_path, thresholds={"bent": score + step}) for step in (-1e-4, 1e-4)]
    assert [(row["verdict"], row["label"]) for row in rows] == [("NG", "bent"), ("OK", "ok")]
    assert [row["score"] for row in rows] == [pytest.approx(score, abs=1e-5), pytest.approx(1 - score, abs=1e-5)]
    assert [output["holds"] for row in rows for output in row["outputs"]] == [True, False]
    assert rows[0]["outputs"][0]["score"] == pytest.approx(score, abs=1e-5)


def line_of(folder, threshold):
    onnx.save_model(brightness(("pred_score", "score"), ("anomaly_map", "map")), folder / "solder.onnx")
    told = {"task": "anomaly"} if threshold is None else {"task": "anomaly", "threshold": threshold}
    pixels = {"size": [SIZE_PX, SIZE_PX], "normalize": "unit"}
    solder = {"architecture": "onnx", "weights": "solder.onnx", "input": pixels} | told
    return LineFile(
        folder,
        device="cpu",
        experts={"anomaly/solder": solder},
        routes={"solder": route("anomaly/solder")},
        memory={"host": "40MiB", "workspace": "20MiB"},
    )


@pytest.fixture
def images(tmp_path):
    """A dark image, and one with a bright spot."""
    dark = np.full((48, 64, 3), 51, np.uint8)
    spotted = dark.copy()
    spotted[30:40, 10:20] = 255
    files = [tmp_path / "dark.png", tmp_path / "spotted.png"]
    for file, pixels in zip(files, (dark, spotted), strict=True):
        Image.fromarray(pixels).save(file)
    return files


def test_threshold_makes_verdicts_of_anomaly_scores(tmp_path, images):
    rows = inspect_images(line_of(tmp_path, 0.6).config, images, "solder", quiet)
    assert [(row["verdict"], row["label"]) for row in rows] == [("OK", "ok"), ("NG", "anomalous")]
    assert [row["anomalies"][0]["score"] for row in rows] == [pytest.approx(0.2), pytest.approx(1.0)]
    assert rows[0]["anomalies"][0]["expert"] == "anomaly/solder"
    assert rows[1]["score"] == pytest.approx(certainty(1.0, 0.6))


def test_missing_threshold_makes_every_image_unknown_with_the_reason(tmp_path, images):
    """The line starts nevertheless, and its times are measured."""
    rows = inspect_images(line_of(tmp_path, None).config, images, "solder", quiet)
    assert [row["verdict"] for row in rows] == ["UNKNOWN", "UNKNOWN"]
    assert all("anomaly/solder" in row["reason"] and "has no threshold" in row["reason"] for row in rows)


def difference(picture, image):
    """Difference of each pixel to the original."""
    with Image.open(picture) as drawn, Image.open(image) as original:
        times = drawn.width // original.width
        shown = drawn.crop((0, 0, original.width * times, original.height * times)).resize(original.size, 0)
        return np.abs(np.asarray(shown, int) - np.asarray(original, int)).sum(axis=2)


def test_anomalies_are_drawn_where_they_are(tmp_path, images):
    rows = inspect_images(line_of(tmp_path, 0.6).config, images, "solder", quiet, tmp_path / "pictures")
    dark, spotted = (difference(row["picture"], image) for row, image in zip(rows, images, strict=True))
    assert dark.max() == 0  # nothing was found
    changed = np.argwhere(spotted > 100)
    assert len(changed) > 50
    assert ((changed >= (27, 7)) & (changed < (43, 23))).all()  # the spot, and what scaling makes of its edges
    other = tmp_path / "other" / "spotted.png"
    other.parent.mkdir()
    for makes, drawn in (
        (lambda: other.write_bytes(b"of the same name, and no image"), 1),
        (lambda: images[0].rename(other), 2),
    ):
        makes()
        rows = inspect_images(line_of(tmp_path, 0.6).config, [images[1], other], "solder", quiet, tmp_path / "pictures")
        assert len({row["picture"] for row in rows} - {None}) == drawn
    with pytest.raises(ConfigError, match="name a folder that can be written"):
        inspect_images(line_of(tmp_path, 0.6).config, [], "solder", quiet, images[1])


def test_running_agent_judges_and_draws_as_a_lone_inspection(tmp_path, tmp_path_factory, images):
    line, absent = line_of(tmp_path, 0.6), tmp_path / "absent.png"
    address = f"unix:{tmp_path_factory.mktemp('s')}/c.sock"
    line.document["api"] = {"grpc": [address]}
    service = LineService(line.config, quiet)
    service.start()
    try:
        command = ["inspect", line.file, images[0], absent, images[1], "--component", "solder", "--json"]
        options = ["--picture", tmp_path / "asked", "--target", address]
        result = coserve(*command, *options)
    finally:
        service.stop()
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["results"]
    here = inspect_images(line.config, images, "solder", quiet, tmp_path / "here")
    for asked, own in zip((rows[0], rows[2]), here, strict=True):
        assert asked["verdict"] == own["verdict"]
        assert asked["anomalies"] == own["anomalies"]
        assert pixels(asked["picture"]) == pixels(own["picture"])
    assert (rows[1]["verdict"], rows[1]["picture"], rows[1]["anomalies"]) == ("UNKNOWN", None, [])


def pixels(picture):
    with Image.open(picture) as drawn:
        return drawn.tobytes()
