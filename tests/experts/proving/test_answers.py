"""Known answers are read from every kind of folder and file, and what is wrong is named with its place."""

import json
from functools import partial

import pytest

from experts.errors import ConfigError
from experts.proving.answers import KnownAnswer, KnownBox, keep_answers, read_answers
from tests.pictures import saved

picture = partial(saved, size=(40, 20))


def written(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    return file


def test_folders_of_labels_are_read_with_and_without_components(tmp_path):
    files = [picture(tmp_path / name) for name in ("bent/1.png", "coil/ok/2.png", "ok/deeper/3.png")]
    written(tmp_path / "ok" / "notes.txt", "no image")
    picture(tmp_path / ".hidden" / "4.png")
    assert read_answers(tmp_path, {"coil"}) == (
        KnownAnswer(files[0], "bent"),
        KnownAnswer(files[1], "ok", component="coil"),
        KnownAnswer(files[2], "ok"),
    )


@pytest.mark.parametrize("name", ["answers.csv", "other.csv", "other.json", "lines.json"])
def test_tables_give_label_and_score(tmp_path, name):
    picture(tmp_path / "a.png"), picture(tmp_path / "b" / "ü.png")
    rows = [{"file": "a.png", "label": "ok", "score": 0.9}, {"file": "b/ü.png", "scores": {"ok": 0.2, "bent": 0.8}}]
    text = json.dumps(rows, indent=1) if name == "other.json" else "\n".join(map(json.dumps, rows))
    if name.endswith(".csv"):
        text = 'file,label,score,scores\na.png,ok,0.9,\nb/ü.png,,,"{""ok"": 0.2, ""bent"": 0.8}"\n'
    first, second = read_answers(written(tmp_path / name, text))
    assert (first.image, first.label, first.score) == (tmp_path / "a.png", "ok", 0.9)
    assert (second.label, second.score, dict(second.scores)) == ("bent", None, {"ok": 0.2, "bent": 0.8})


@pytest.mark.parametrize(
    ("name", "text", "place", "reason"),
    [
        ("x.csv", "image,label\na.png,ok\n", "1:1: file", "names no column `file`"),
        ("x.csv", "file,label\na.png\n", "2:1: row", "not as many cells"),
        ("x.csv", "file,label\na.png,ok\na.png,ok\n", "3:1: file", "there twice"),
        ("x.csv", "file,label\nb.png,ok\n", "2:1: file", "is not there"),
        ("x.csv", "file,label,score\na.png,ok,high\n", "2:1: score", "valid number"),
        ("x.json", '[\n{"file": "a.png", "label": "ok"},\n{"file": }]', "3:1: syntax", "correct the JSON"),
        ("x.json", '[\n{"file": "a.png", "label": "ok"},\n', "3:1: syntax", "written completely"),
        ("x.json", '[{"file": "a.png"}]', "1:1: label", "says nothing"),
        ("x.json", '[{"file": "a.png", "label": "ok", "probability": 1}]', "1:1: probability", "known: file, label"),
        ("x.json", "[1]", "1:1: row", "is no object"),
    ],
)
def test_error_names_its_file_and_line(tmp_path, name, text, place, reason):
    picture(tmp_path / "a.png")
    file = written(tmp_path / name, text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_answers(file)
    assert str(caught.value).startswith(f"{file}:{place}: ")


class TestYoloData:
    BOXES = (KnownBox("gone", 10, 5, 30, 15, 0.8), KnownBox("there", 0, 0, 20, 10))

    @pytest.fixture
    def data(self, tmp_path):
        picture(tmp_path / "images" / "val" / "1.png"), picture(tmp_path / "images" / "val" / "2.png")
        written(tmp_path / "labels" / "val" / "1.txt", "1 0.5 0.5 0.5 0.5 0.8\n0 0.25 0.25 0.5 0.5\n")
        written(tmp_path / "data.yaml", "path: /gone\nval: images/val\nnames: {0: there, 1: gone}\n")
        return tmp_path

    @pytest.mark.parametrize("source", ["", "data.yaml", "images/val"])
    def test_yolo_boxes_are_in_pixels_and_an_image_without_a_file_has_none(self, data, source):
        first, second = read_answers(data / source)
        assert (first.boxes, first.label) == (self.BOXES, "gone")
        assert (second.boxes, second.label, second.finds_something) == ((), "nothing-found", False)

    def test_class_names_are_the_experts_if_no_file_has_them(self, data):
        (data / "data.yaml").unlink()
        assert read_answers(data, labels=("there", "gone"))[0].boxes == self.BOXES
        with pytest.raises(ConfigError, match=r"1\.txt:1:1: box: class 1 has no name"):
            read_answers(data)

    def test_polygon_is_refused_by_its_line(self, data):
        written(data / "labels" / "val" / "2.txt", "\n0 0.1 0.1 0.2 0.2 0.3 0.3\n")
        with pytest.raises(ConfigError, match=r"2\.txt:2:1: box: is not a box"):
            read_answers(data)


def test_kept_answers_are_read_back(tmp_path):
    boxes = (KnownBox("gone", 1, 2, 3, 4, 0.5),)
    answers = [
        KnownAnswer(picture(tmp_path / "ok" / "1.png"), "gone", 0.5, boxes=boxes),
        KnownAnswer(picture(tmp_path / "ng" / "1.png"), "ng", scores=(("ng", 0.75), ("ok", 0.25)), anomaly=1.5),
    ]
    kept = keep_answers(answers, tmp_path / "checks" / "cls" / "x")
    assert kept == read_answers(tmp_path / "checks" / "cls" / "x")
    assert [each.boxes for each in kept] == [boxes, None]
    assert len({each.image for each in kept}) == 2


def test_folder_without_labelled_images_is_refused_with_the_supported_forms(tmp_path):
    picture(tmp_path / "1.png")
    with pytest.raises(ConfigError, match="no image with a label was found - give LABEL"):
        read_answers(tmp_path)
    with pytest.raises(ConfigError, match="holds no labelled images"):
        read_answers(tmp_path / "gone")
