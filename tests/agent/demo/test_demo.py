"""A demo's folder, and the board that its picture shows."""

from __future__ import annotations

import pytest
from PIL import Image

from agent.demo.demo import MARKER, fresh_folder, paint, run_demo
from agent.demo.rendering.picture import STRIP_PX, PartVerdict
from agent.demo.rendering.render import Placement, RenderedBoard
from experts.errors import ConfigError
from experts.expert import Anomaly, Verdict


def test_a_folder_that_no_demo_made_is_left_as_it_is(tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("do not delete")
    with pytest.raises(ConfigError, match="--dir"):
        fresh_folder(tmp_path)
    assert precious.read_text() == "do not delete"


def test_an_earlier_demo_is_made_anew(tmp_path):
    folder = fresh_folder(tmp_path / "demo")
    (folder / "line.yaml").write_text("line: old")
    again = fresh_folder(tmp_path / "demo")
    assert [entry.name for entry in again.iterdir()] == [MARKER]


def test_crops_of_a_single_image_cannot_be_judged(tmp_path):
    for label in ("ok", "short"):
        (tmp_path / "data" / "r" / label).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (8, 8)).save(tmp_path / "data" / "r" / label / f"1-{label}{number}.png")
    with pytest.raises(ConfigError, match="too few source images"):
        run_demo(tmp_path / "demo", tmp_path / "data", 0, lambda *step: None)


STRANGE = PartVerdict(Verdict.NG, "anomalous", Anomaly(9.0, 5.0))
MISSING = PartVerdict(Verdict.NG, "missing")


@pytest.mark.parametrize(
    ("verdicts", "shown"),
    [
        ({}, 0),
        ({"B2_lid_R1.png": MISSING}, 1),
        ({"B2_lid_R1.png": MISSING, "B3_lid_R1.png": STRANGE}, 2),
    ],
)
def test_the_picture_is_of_the_board_that_shows_most(tmp_path, verdicts, shown):
    colours = [(40, 0, 0), (0, 40, 0), (0, 0, 40)]
    place = Placement("R1", "lid", "ok", (100, 100, 200, 200), 0, None)
    boards = [
        RenderedBoard(f"B{n}", Image.new("RGB", (400, 300), colour), (place,)) for n, colour in enumerate(colours, 1)
    ]
    paint(tmp_path / "board.png", boards, verdicts)
    with Image.open(tmp_path / "board.png") as picture:
        assert picture.size == (400, 300 + STRIP_PX)
        assert picture.getpixel((390, 290)) == colours[shown]
