"""Labelled crops: written, read back, refused when unusable, and divided without a source on both sides."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agent.demo.inbox import write_board, write_held_out
from agent.demo.rendering.components import OK, synthetic_components
from agent.demo.rendering.render import RenderedBoard, render_board
from agent.demo.training.crops import BODIES_FILE, LabelledCrop, divide, load_component, load_crops, write_crops
from experts.errors import ConfigError

PIXELS = np.zeros((4, 4, 3), np.uint8)


def save_crops(folder, component, label, count=6):
    target = folder / component / label
    target.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(target / f"{number}.png")


@pytest.fixture
def data(tmp_path):
    save_crops(tmp_path, "r", OK)
    save_crops(tmp_path, "r", "missing")
    return tmp_path


def test_written_crops_are_read_back(tmp_path):
    components = synthetic_components()[:2]
    steps = []
    count = write_crops(tmp_path, components, 5, 0, 1, lambda *step: steps.append(step))
    crops = load_crops(tmp_path)
    assert len(crops) == count
    assert steps[-1] == ("render", count, count)
    kinds = Counter((crop.component, crop.label) for crop in crops)
    twice = {OK, "shifted"}  # of chips: 5 x 0.6 x 2; the rest is held up at the least count
    assert kinds == {(each.name, label): 6 if label in twice else 5 for each in components for label in each.labels}
    assert {crop.pixels.shape for crop in crops} == {(64, 64, 3)}
    assert all((crop.body is None) == (crop.label == "missing") for crop in crops)
    assert (tmp_path / "resistor-0402" / "shifted" / "0000.png").is_file()


def test_crops_of_a_part_without_traces_change_no_other(tmp_path):
    named = {each.name: each for each in synthetic_components()}
    chip, shield = named["resistor-0402"], named["shield-can"]
    for folder, components in (("alone", [chip]), ("both", [shield, chip])):
        write_crops(tmp_path / folder, components, 5, 0, 1, lambda *step: None)
    alone, both = (load_component(tmp_path / folder / chip.name) for folder in ("alone", "both"))
    assert all(np.array_equal(one.pixels, other.pixels) for one, other in zip(alone, both, strict=True))
    counts = Counter(crop.label for crop in load_component(tmp_path / "both" / shield.name))
    assert counts.pop(OK) > 5 * max(counts.values())  # good ones have to teach what good is, and to vouch for it


def test_no_component_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no component folder"):
        load_crops(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        load_crops(tmp_path / "nothing")


def test_component_needs_ok_and_a_defect(tmp_path):
    save_crops(tmp_path, "r", "missing")
    with pytest.raises(ConfigError, match="'ok' and at least one defect are needed"):
        load_crops(tmp_path)
    save_crops(tmp_path, "c", OK)
    with pytest.raises(ConfigError, match=r"c has the labels \['ok'\]"):
        load_crops(tmp_path)


def test_too_few_crops_are_refused(data):
    save_crops(data, "r", "cracked", count=2)
    with pytest.raises(ConfigError, match="cracked holds 2 crops"):
        load_crops(data)


def test_broken_crop_is_named(data):
    (data / "r" / "ok" / "3.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"3\.png cannot be read as an image"):
        load_crops(data)


def test_component_name_must_fit_file_names(data):
    save_crops(data, "a_b", OK)
    with pytest.raises(ConfigError, match="must not hold an underscore"):
        load_crops(data)


def test_broken_bodies_file_is_named(data):
    (data / "r" / BODIES_FILE).write_text('{"ok/0.png": [1, 2]}')
    with pytest.raises(ConfigError, match=BODIES_FILE):
        load_crops(data)


def test_source_is_the_name_before_the_dash():
    assert LabelledCrop("r", OK, "00041006-ok1.png", PIXELS).source == "00041006"
    assert LabelledCrop("r", OK, "7.png", PIXELS).source != LabelledCrop("r", "missing", "7.png", PIXELS).source


KINDS = st.tuples(st.sampled_from(["r", "c"]), st.sampled_from([OK, "short"]), st.integers(0, 15), st.integers(0, 3))


@given(st.sets(KINDS, min_size=1), st.randoms(use_true_random=False), st.integers(0, 3))
def test_division_never_parts_a_source(kinds, shuffler, seed):
    crops = [LabelledCrop(component, label, f"{source}-{n}.png", PIXELS) for component, label, source, n in kinds]
    parts = divide(crops, 0.2, seed)
    assert not {crop.source for crop in parts.training} & {crop.source for crop in parts.held_out}
    assert sorted(map(id, parts.training + parts.held_out)) == sorted(map(id, crops))
    everywhere = {(crop.component, crop.label) for crop in crops}
    assert {(crop.component, crop.label) for crop in parts.training} == everywhere
    shuffler.shuffle(crops)
    assert divide(crops, 0.2, seed) == parts


def test_division_is_stratified():
    crops = [
        LabelledCrop("r", label, f"{number}-{label}.png", PIXELS)
        for number in range(100)
        for label in ((OK, "short") if number % 2 else (OK, "open"))
    ]
    held = Counter(crop.label for crop in divide(crops, 0.2).held_out)
    assert held == {OK: 20, "short": 10, "open": 10}


def test_board_specimens_are_named_for_the_intake(tmp_path):
    board = render_board(seed=2, defect_rate=0.3, name="B7")
    few = RenderedBoard(board.name, board.image, board.placements[:5])
    specimens = write_board(tmp_path, few)
    assert [each.file.name for each in specimens] == [f"B7_{p.component}_{p.ref}.png" for p in few.placements]
    assert [each.label for each in specimens] == [p.label for p in few.placements]
    with Image.open(specimens[0].file) as image:
        assert image.size == (64, 64)


def test_held_out_specimens_do_not_tell_their_label(tmp_path):
    crops = [LabelledCrop("r", label, f"0007-{n}.png", PIXELS) for n, label in enumerate((OK, "short", "short"))]
    specimens = write_held_out(tmp_path, [*crops, LabelledCrop("r", "open", "3.png", PIXELS)])
    assert [each.file.name for each in specimens[:3]] == ["0007_r_P1.png", "0007_r_P2.png", "0007_r_P3.png"]
    assert len({each.file for each in specimens}) == 4
    assert all(each.file.name.count("_") == 2 and each.label not in each.file.name for each in specimens[:3])
