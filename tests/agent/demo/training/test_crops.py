"""Labelled crops: rendered, read, refused when unusable, and divided without a source on both sides."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.demo.rendering.components import COMPONENTS, OK
from agent.demo.training.crops import LabelledCrop, divide, load_crops, render_crops, save_crops
from experts.errors import ConfigError
from tests.pictures import saved

PIXELS = np.zeros((4, 4, 3), np.uint8)


def put(folder, component, label, count=6):
    for number in range(count):
        saved(folder / component / label / f"{number}.png", (number, 0, 0))


def test_saved_crops_are_read_back(tmp_path):
    components = COMPONENTS[:2]
    steps = []
    crops = render_crops(components, 5, 0, 1, lambda *step: steps.append(step))
    assert steps[-1] == ("render", len(crops), len(crops))
    kinds = Counter((crop.component, crop.label) for crop in crops)
    more = {OK: 15, "shifted": 15}  # a detector learns from these
    assert kinds == {(each.name, label): more.get(label, 5) for each in components for label in each.labels}
    assert {crop.pixels.shape for crop in crops} == {(64, 64, 3)}
    assert all((crop.body is None) == (crop.label == "missing") for crop in crops)
    save_crops(tmp_path, crops)
    for one, other in zip(crops, load_crops(tmp_path), strict=True):
        assert (one.component, one.label, one.file) == (other.component, other.label, other.file)
        assert np.array_equal(one.pixels, other.pixels)


def test_measured_parts_have_more_good_crops():
    shield = next(each for each in COMPONENTS if each.measured)
    counts = Counter(crop.label for crop in render_crops([shield], 5, 0, 1, lambda *step: None))
    assert counts.pop(OK) > 5 * max(counts.values())  # half of the good ones are trained on, half vouch for a threshold


@pytest.mark.parametrize(
    ("folders", "refusal"),
    [
        ([], "holds no component folder"),
        ([("r", "missing", 6)], "'ok' and at least one defect are needed"),
        ([("c", OK, 6)], r"c has the labels \['ok'\]"),
        ([("r", OK, 6), ("r", "cracked", 2)], "cracked holds 2 crops"),
        ([("a_b", OK, 6), ("a_b", "missing", 6)], "must not hold an underscore"),
    ],
)
def test_unusable_folders_are_refused(tmp_path, folders, refusal):
    for component, label, count in folders:
        put(tmp_path, component, label, count)
    with pytest.raises(ConfigError, match=refusal):
        load_crops(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        load_crops(tmp_path / "nothing")


def test_broken_crop_is_named(tmp_path):
    put(tmp_path, "r", OK)
    (tmp_path / "r" / "ok" / "3.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"3\.png cannot be read as an image"):
        load_crops(tmp_path)


@pytest.mark.parametrize(
    ("names", "images"),
    [
        (["00041006-ok1", "00041006-7", "00041007-7"], 2),
        (["0001_0", "0001_1", "0002_0"], 2),
        (["0001_120_80", "0001_40_80", "0002_120_80"], 2),
        (["IMG_0001_3", "img_0001_4", "IMG_0002_3"], 2),
        (["board_x120_y80", "board_x40_y80", "panel_x40_y80"], 2),
        (["top_crop3", "top_crop4", "bottom (crop1)"], 2),
        (["20260501_123011_1", "20260501_123011_2", "20260501_123012_1"], 2),
        (["cam1_2026-05-01 12-30-11_1", "cam1_2026-05-01 12-30-11_2", "cam2_2026-05-01 12-30-11_1"], 2),
        (["IMG_7_jpg.rf.a1b2", "IMG_7_jpg.rf.c3d4", "IMG_8_jpg.rf.a1b2"], 2),
        (["7", "8", "9"], 3),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_crops_of_one_image_are_recognised_by_the_usual_names(names, images):
    places = (("r", OK), ("r", "short"))
    crops = [LabelledCrop(*place, f"{name}.png", PIXELS) for name in names for place in places]
    assert len({crop.source for crop in crops}) == images


def test_label_words_in_a_file_name_are_no_image_name():
    named = [
        ("r", OK, "ok_0007_1"),
        ("r", "short", "short_0007_2"),
        ("c", "short", "c_short_0007_3"),
        ("c", OK, "0007_ok"),
    ]
    assert {LabelledCrop(*place, f"{name}.png", PIXELS).source for *place, name in named} == {"0007"}


def test_crops_of_a_single_image_are_refused_as_none_can_be_held_out(tmp_path):
    for label in (OK, "short"):
        put(tmp_path, "r", label)
        for file in list((tmp_path / "r" / label).iterdir()):
            file.rename(file.with_name(f"board7_{file.name}"))
    with pytest.raises(ConfigError, match=r"from one image, board7, .* name them IMAGE-NUMBER\.png"):
        load_crops(tmp_path)


KINDS = st.tuples(st.sampled_from(["r", "c"]), st.sampled_from([OK, "short"]), st.integers(0, 15), st.integers(0, 3))


@given(st.sets(KINDS, min_size=1), st.randoms(use_true_random=False), st.integers(0, 3))
def test_division_never_splits_a_source(kinds, shuffler, seed):
    crops = [LabelledCrop(component, label, f"{source}-{n}.png", PIXELS) for component, label, source, n in kinds]
    training, held_out = divide(crops, 0.2, seed)
    assert not {crop.source for crop in training} & {crop.source for crop in held_out}
    assert sorted(map(id, training + held_out)) == sorted(map(id, crops))
    everywhere = {(crop.component, crop.label) for crop in crops}
    assert {(crop.component, crop.label) for crop in training} == everywhere
    shuffler.shuffle(crops)
    assert divide(crops, 0.2, seed) == (training, held_out)


def test_division_is_stratified():
    crops = [
        LabelledCrop("r", label, f"{number}-{label}.png", PIXELS)
        for number in range(100)
        for label in ((OK, "short") if number % 2 else (OK, "open"))
    ]
    held = Counter(crop.label for crop in divide(crops, 0.2)[1])
    assert held == {OK: 20, "short": 10, "open": 10}
