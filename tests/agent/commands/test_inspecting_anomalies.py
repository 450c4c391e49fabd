"""An anomaly expert in a line: verdicts by its threshold, and pictures of the anomalies."""

import json

import numpy as np
import onnx
import pytest
from PIL import Image

from agent.commands.inspection import inspect_images
from agent.service.line_service import LineService
from experts.backends.onnx.anomaly import certainty
from experts.errors import ConfigError
from tests.agent.line_files import LineFile, route
from tests.commands import coserve
from tests.experts.backends.onnx.anomaly_graphs import SIZE_PX, brightness


def quiet(stage, done, total):
    pass


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


def test_a_threshold_makes_verdicts_of_scores(tmp_path, images):
    rows = inspect_images(line_of(tmp_path, 0.6).config, images, "solder", quiet)
    assert [(row["verdict"], row["label"]) for row in rows] == [("OK", "ok"), ("NG", "anomalous")]
    assert [row["anomalies"][0]["score"] for row in rows] == [pytest.approx(0.2), pytest.approx(1.0)]
    assert rows[0]["anomalies"][0]["expert"] == "anomaly/solder"
    assert rows[1]["score"] == pytest.approx(certainty(1.0, 0.6))


def test_without_a_threshold_everything_is_unknown_and_said_why(tmp_path, images):
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


def test_what_is_strange_is_drawn_where_it_is(tmp_path, images):
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


def test_a_running_agent_judges_and_draws_as_without_it(tmp_path, tmp_path_factory, images):
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
