"""An anomaly expert in a line: judged by its threshold, by nothing without one, and drawn where it is strange."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from agent.cli.app import app
from agent.commands.inspection import inspect_images
from agent.config import read_line
from agent.service.line_service import LineService
from experts.backends.onnx.anomaly import certainty
from experts.errors import ConfigError
from tests.experts.backends.onnx.anomaly_graphs import SIZE_PX, brightness


def quiet(stage, done, total):
    pass


def line_of(folder, threshold):
    onnx.save_model(brightness(("pred_score", "score"), ("anomaly_map", "map")), folder / "solder.onnx")
    expert = {
        "architecture": "onnx", "weights": "solder.onnx", "task": "anomaly",
        "input": {"size": [SIZE_PX, SIZE_PX], "normalize": "unit"},
    }  # fmt: skip
    document = {
        "line": "test", "state": "./state", "device": "cpu",
        "experts": {"anomaly/solder": expert if threshold is None else {**expert, "threshold": threshold}},
        "routes": {"solder": [{"expert": "anomaly/solder", "pass": ["ok"]}]},
        "memory": {"host": "40MiB", "workspace": "20MiB"},
    }  # fmt: skip
    (folder / "line.yaml").write_text(yaml.safe_dump(document))
    return read_line(folder / "line.yaml", {})


@pytest.fixture
def images(tmp_path):
    """One that is dark all over, and one with a bright spot."""
    dark = np.full((48, 64, 3), 51, np.uint8)
    spotted = dark.copy()
    spotted[30:40, 10:20] = 255
    files = [tmp_path / "dark.png", tmp_path / "spotted.png"]
    for file, pixels in zip(files, (dark, spotted), strict=True):
        Image.fromarray(pixels).save(file)
    return files


def test_a_threshold_makes_verdicts_of_scores(tmp_path, images):
    rows = inspect_images(line_of(tmp_path, 0.6), images, "solder", quiet)
    assert [(row["verdict"], row["label"]) for row in rows] == [("OK", "ok"), ("NG", "anomalous")]
    assert [row["anomalies"][0]["score"] for row in rows] == [pytest.approx(0.2), pytest.approx(1.0)]
    assert rows[0]["anomalies"][0]["expert"] == "anomaly/solder"
    assert rows[1]["score"] == pytest.approx(certainty(1.0, 0.6))


def test_without_a_threshold_everything_is_unknown_and_said_why(tmp_path, images):
    """The line starts all the same, and its times are measured."""
    rows = inspect_images(line_of(tmp_path, None), images, "solder", quiet)
    assert [row["verdict"] for row in rows] == ["UNKNOWN", "UNKNOWN"]
    assert all("anomaly/solder" in row["reason"] and "has no threshold" in row["reason"] for row in rows)


def difference(picture, image):
    """How far each pixel is from what it was."""
    with Image.open(picture) as drawn, Image.open(image) as original:
        times = drawn.width // original.width
        shown = drawn.crop((0, 0, original.width * times, original.height * times)).resize(original.size, 0)
        return np.abs(np.asarray(shown, int) - np.asarray(original, int)).sum(axis=2)


def test_what_is_strange_is_drawn_where_it_is(tmp_path, images):
    rows = inspect_images(line_of(tmp_path, 0.6), images, "solder", quiet, tmp_path / "pictures")
    dark, spotted = (difference(row["picture"], image) for row, image in zip(rows, images, strict=True))
    assert dark.max() == 0  # nothing was found
    changed = np.argwhere(spotted > 100)
    assert len(changed) > 50
    assert ((changed >= (27, 7)) & (changed < (43, 23))).all()  # the spot, and what scaling makes of its edges
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "spotted.png").write_bytes(b"of the same name, and no image")
    rows = inspect_images(line_of(tmp_path, 0.6), [images[1], tmp_path / "other" / "spotted.png"], "solder", quiet,
                          tmp_path / "pictures")  # fmt: skip
    assert (rows[1]["picture"], rows[1]["verdict"]) == (None, "UNKNOWN")
    images[0].rename(tmp_path / "other" / "spotted.png")
    rows = inspect_images(line_of(tmp_path, 0.6), [images[1], tmp_path / "other" / "spotted.png"], "solder", quiet,
                          tmp_path / "pictures")  # fmt: skip
    assert len({row["picture"] for row in rows}) == 2


def test_a_folder_that_is_a_file_is_told(tmp_path, images):
    with pytest.raises(ConfigError, match="name a folder that can be written"):
        inspect_images(line_of(tmp_path, 0.6), images, "solder", quiet, images[0])


def test_a_running_agent_judges_and_draws_as_without_it(tmp_path, tmp_path_factory, images):
    line_of(tmp_path, 0.6)
    absent = tmp_path / "absent.png"
    address = f"unix:{tmp_path_factory.mktemp('s')}/c.sock"
    with (tmp_path / "line.yaml").open("a") as line:
        line.write(f"api: {{grpc: ['{address}']}}\n")
    service = LineService(read_line(tmp_path / "line.yaml", {}), quiet)
    service.start()
    try:
        command = ["inspect", tmp_path / "line.yaml", images[0], absent, images[1], "--component", "solder", "--json"]
        options = ["--picture", tmp_path / "asked", "--target", address]
        result = CliRunner().invoke(app, [*map(str, [*command, *options])])
    finally:
        service.stop()
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["results"]
    here = inspect_images(read_line(tmp_path / "line.yaml", {}), images, "solder", quiet, tmp_path / "here")
    for asked, own in zip((rows[0], rows[2]), here, strict=True):
        assert asked["verdict"] == own["verdict"]
        assert asked["anomalies"] == own["anomalies"]
        assert pixels(asked["picture"]) == pixels(own["picture"])
    assert (rows[1]["verdict"], rows[1]["picture"], rows[1]["anomalies"]) == ("UNKNOWN", None, [])


def pixels(picture):
    with Image.open(picture) as drawn:
        return drawn.tobytes()
