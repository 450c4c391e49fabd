"""``coserve experts threshold`` as it is typed: what it learns, draws and writes."""

import json
from contextlib import closing
from datetime import UTC, time

import numpy as np
import onnx
import pytest
from PIL import Image

from agent.commands.doctor import examine
from agent.commands.inspection import inspect_images
from agent.config import read_line
from agent.records.result_writer import ResultStore
from agent.records.station.reviews import Reviews
from agent.records.station.shifts import Shifts
from experts.expert import Verdict
from experts.thresholds.learning import Meter
from tests.commands import coserve
from tests.experts.backends.onnx.anomaly_graphs import SIZE_PX, brightness
from tests.lines import NOON, result
from tests.waiting import settled

LINE = f"""# our first line
line: test
state: ./state
device: cpu
memory: {{host: 40MiB, workspace: 20MiB}}
experts:
  anomaly/solder:   # trained in March
    architecture: onnx
    weights: solder.onnx
    task: anomaly
    input: {{size: [{SIZE_PX}, {SIZE_PX}], normalize: unit}}
  cls/other: {{architecture: fake, weights: other.yaml, labels: [ok], input: {{size: [8, 8]}}}}
routes:
  solder: [{{expert: anomaly/solder, pass: [ok]}}]
"""
GOOD_LEVELS = range(20, 120, 5)  # the brightest pixel of each, of 255
BAD_LEVELS = range(180, 250, 10)


@pytest.fixture
def line(tmp_path):
    onnx.save_model(brightness(("anomaly_map", "map")), tmp_path / "solder.onnx")
    file = tmp_path / "line.yaml"
    file.write_text(LINE)
    return file


def spotted(path, level):
    pixels = np.full((40, 56, 3), 10, np.uint8)
    pixels[10:20, 30:40] = level
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def data(tmp_path):
    for level in GOOD_LEVELS:
        spotted(tmp_path / f"data/good/{level}.png", level)
    for level in BAD_LEVELS:
        spotted(tmp_path / f"data/bad/monday/{level}.png", level)
    (tmp_path / "data/bad/.hidden.png").write_bytes(b"")
    (tmp_path / "data/good/cut.png").write_bytes(b"")
    return tmp_path / "data"


def run(*arguments):
    return coserve("experts", "threshold", *arguments)


def test_weights_overwritten_while_a_threshold_is_learned_get_no_threshold(line, data, monkeypatch):
    score = Meter.score

    def overwriting(meter, image):
        onnx.save_model(brightness(("other", "map")), line.parent / "solder.onnx")
        return score(meter, image)

    monkeypatch.setattr(Meter, "score", overwriting)
    before = line.read_text()
    done = run(line, "anomaly/solder", "--samples", data)
    assert done.exit_code != 0
    assert "solder.onnx was overwritten meanwhile, so nothing was written" in done.stderr
    assert line.read_text() == before


def test_learned_threshold_is_written_and_judges(line, data, tmp_path):
    done = run(line, "anomaly/solder", "--samples", data, "--json")
    assert done.exit_code == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["good"], row["bad"], row["false_alarms"], row["caught"]) == (20, 7, 0.0, 1.0)
    assert len(row["left_out"]) == 1
    assert max(GOOD_LEVELS) / 255 < row["threshold"] < min(BAD_LEVELS) / 255
    assert row["false_alarms_expected"] == pytest.approx(1 / 21)  # too few samples for 1 %
    images = [spotted(tmp_path / "one.png", 60), spotted(tmp_path / "other.png", 230)]
    judged = inspect_images(read_line(line, {}), images, "solder", lambda *_: None)
    assert [each["verdict"] for each in judged] == ["OK", "NG"]


def test_threshold_is_bound_to_its_weights_and_input(line, data, tmp_path):
    """A model that was trained again, and a corrected normalisation, judge nothing by the threshold of before."""
    assert run(line, "anomaly/solder", "--samples", data).exit_code == 0
    image = [spotted(tmp_path / "one.png", 60)]

    def judged():
        (row,) = inspect_images(read_line(line, {}), image, "solder", lambda *_: None)
        return row["verdict"], row["reason"] or ""

    assert judged() == ("OK", "")
    assert not [each for each in examine(read_line(line, {})) if each.name.startswith("threshold")]
    learned = line.read_text()
    line.write_text(learned.replace("normalize: unit", "normalize: imagenet"))
    assert judged()[0] == "UNKNOWN"
    line.write_text(learned)
    model = onnx.load_model(tmp_path / "solder.onnx")
    model.doc_string = "trained again"
    onnx.save_model(model, tmp_path / "solder.onnx")
    verdict, reason = judged()
    assert verdict == "UNKNOWN"
    (check,) = (each for each in examine(read_line(line, {})) if each.name == "threshold anomaly/solder")
    assert "learned with other weights, or another input, than it has now: every image is UNKNOWN" in check.found
    assert check.fix == f"coserve experts threshold {line} anomaly/solder --samples DATA"
    assert "its threshold was learned with other weights" in reason
    assert "coserve experts threshold LINE.yaml anomaly/solder" in reason


def test_only_the_threshold_and_its_evidence_are_written_and_nothing_by_print(line, data):
    printed = run(line, "anomaly/solder", "--samples", data, "--print").stdout
    assert line.read_text() == LINE
    assert "    threshold: 0." in printed
    assert "takes 99 good samples" in printed
    before = line.read_text().splitlines()
    for rate in ("0.05", "0.1"):  # once made, once replaced
        assert run(line, "anomaly/solder", "--samples", data, "--false-alarms", rate).exit_code == 0
    after = line.read_text().splitlines()
    added = [text for text in after if text not in before]
    assert [text.split(":")[0].strip() for text in added] == ["threshold", "threshold_of"]
    assert [text for text in after if text not in added] == before


def test_labelled_crops_serve_as_samples_without_unreadable_ones(line, tmp_path):
    for level in GOOD_LEVELS:
        spotted(tmp_path / f"crops/solder/ok/{level}.png", level)
    for level in BAD_LEVELS:
        spotted(tmp_path / f"crops/solder/{'bridge' if level % 20 else 'missing'}/{level}.png", level)
    cut = tmp_path / "crops/solder/ok/cut.png"
    cut.write_bytes(cut.with_name("20.png").read_bytes()[:60])
    row = json.loads(run(line, "anomaly/solder", "--samples", tmp_path / "crops", "--json").stdout)
    assert (row["good"], row["bad"], row["caught"]) == (20, 7, 1.0)
    (left_out,) = row["left_out"]
    assert "cut.png" in left_out


def test_table_serves_as_samples_without_other_components(line, data, tmp_path):
    rows = [f"good/{level}.png,normal,solder" for level in GOOD_LEVELS]
    rows += [f"bad/monday/{level}.png,bridge," for level in BAD_LEVELS]
    spotted(data / "other.png", 250)
    (data / "all.csv").write_text("file,label,component\n" + "\n".join([*rows, "other.png,ok,plate"]) + "\n")
    row = json.loads(run(line, "anomaly/solder", "--samples", data / "all.csv", "--json").stdout)
    assert (row["good"], row["bad"], row["caught"], row["left_out"]) == (20, 7, 1.0, [])


def test_reviewed_images_serve_as_samples_cut_as_they_were_judged(line, tmp_path):
    """Good are the parts that a person called so, also where the machine did not; a second expert's defect is none."""
    kept = tmp_path / "state" / "images"
    frame = np.full((40, 112, 3), 10, np.uint8)
    frame[10:20, 30:40], frame[10:20, 86:96] = 100, 240  # a good part, and a bad one
    kept.mkdir(parents=True)
    Image.fromarray(frame).save(kept / "frame.png")
    judged = {"component": "solder", "experts": ("anomaly/solder",), "kept_as": "frame.png"}
    rows = [
        (judged | {"box": (0, 0, 56, 40)}, Verdict.OK),
        (judged | {"box": (56, 0, 112, 40)}, Verdict.NG),
        (judged | {"experts": ("anomaly/solder", "cls/other")}, Verdict.NG),
        (judged | {"experts": ("cls/other",)}, Verdict.NG),
        (judged | {"kept_as": "gone.png"}, Verdict.OK),
    ]
    for level in GOOD_LEVELS:
        spotted(kept / f"{level}.png", level)
        rows.append((judged | {"kept_as": f"{level}.png"}, Verdict.OK))
    with closing(ResultStore(tmp_path / "state" / "results.db")) as store:
        for number, (said, _) in enumerate(rows):
            store.record(result(f"k{number}", Verdict.NG, **said))
        reviews = Reviews(settled(store), Shifts((time(6),), UTC), lambda: NOON)
        for seq, (_, verdict) in enumerate(rows, start=1):
            reviews.add(seq, verdict, "ann")
    row = json.loads(run(line, "anomaly/solder", "--samples", "reviews", "--json").stdout)
    assert (row["good"], row["bad"], row["caught"], len(row["left_out"])) == (21, 1, 1.0, 1)
    assert max(GOOD_LEVELS) / 255 < row["threshold"] < 240 / 255
    assert "no longer there" in row["left_out"][0]


@pytest.mark.parametrize(
    ("expert", "folder", "said"),
    [
        ("cls/other", "data", "no anomaly expert, and decides without a threshold - name one of `task: anomaly`: anom"),
        ("anomaly/none", "data", "anomaly/none is no expert of this line"),
        ("anomaly/solder", "empty", "empty: no image with a label was found - give LABEL/*.png"),
        ("anomaly/solder", "reviews", "reviews holds no good sample for anomaly/solder"),
        ("anomaly/solder", "nowhere", "nowhere: holds no labelled images"),
    ],
)
def test_unlearnable_threshold_is_refused_with_the_reason(line, data, tmp_path, expert, folder, said):
    (tmp_path / "empty" / "good").mkdir(parents=True)
    done = run(line, expert, "--samples", folder if folder == "reviews" else tmp_path / folder)
    assert done.exit_code == 78
    assert said in done.stderr
    assert line.read_text() == LINE
