"""The input that explains known answers is found among those of known trainers, too."""

from pathlib import Path

import pytest

from experts.catalog import expert_of
from experts.expert import NAMED, Prediction
from experts.model_files.trainers import HALF
from experts.proving.answers import KnownAnswer
from experts.proving.search import AnsweredEntry, Patience, assumed, explain

START = {
    "architecture": "onnx", "weights": "x.onnx", "labels": ["ok", "turned"],
    "input": {"size": [48, 192], "normalize": "imagenet"},
}  # fmt: skip
KNOWN = tuple(
    KnownAnswer(Path(f"{number}.png"), label=label, score=0.9) for number, label in enumerate(("ok", "turned"))
)


def test_whole_input_of_a_known_trainer_is_found_though_no_single_key_explains_it():
    paddles = {"pad": "right", "color": "mean", "rounding": "up", "interpolation": "opencv-linear"}

    def ask(entry, known):
        try:
            expert = expert_of("cls/turn", entry, Path())
        except ValueError:
            return None
        is_right = (entry["input"].get("fit"), entry["input"]["normalize"]) == (paddles, HALF)
        score = 0.9 if is_right else 0.6
        return AnsweredEntry(expert, tuple(Prediction(each.label, score) for each in known))

    found = explain(START, ("normalize", "fit"), ("normalize", "fit"), KNOWN, ask)
    assert found.best is not None
    assert (found.best.entry["input"]["fit"], found.best.entry["input"]["normalize"]) == (paddles, HALF)
    assert not found.open


def test_imagenets_normalisation_applied_twice_is_found():
    known = NAMED["imagenet"]
    pairs = [*zip(known.mean, known.std, strict=True)]
    twice = [mean + mean * std for mean, std in pairs], [std * std for _, std in pairs]

    def ask(entry, known):
        given = entry["input"]["normalize"]
        is_right = isinstance(given, dict) and (given["mean"], given["std"]) == (
            pytest.approx(twice[0], abs=1e-6),
            pytest.approx(twice[1], abs=1e-6),
        )
        score = 0.9 if is_right and "channels" not in given else 0.6
        return AnsweredEntry(
            expert_of("cls/turn", entry, Path()), tuple(Prediction(each.label, score) for each in known)
        )

    found = explain(START, ("normalize",), ("normalize",), KNOWN, ask)
    assert found.best is not None
    assert found.best.entry["input"]["normalize"]["mean"] == pytest.approx(twice[0], abs=1e-6)


def test_graph_of_one_channel_is_searched_among_grey_pixels():
    grey = {"mean": [0.0] * 3, "std": [1.0] * 3, "channels": "grey"}
    tried = []

    def ask(entry, known):
        tried.append(entry["input"]["normalize"])
        score = 0.9 if tried[-1].get("scale") == 255 else 0.6
        return AnsweredEntry(
            expert_of("cls/turn", entry, Path()), tuple(Prediction(each.label, score) for each in known)
        )

    start = {**START, "input": {"size": [48, 192], "normalize": grey}}
    found = explain(start, ("normalize",), ("normalize",), KNOWN, ask)
    assert found.best is not None
    assert found.best.entry["input"]["normalize"]["scale"] == 255
    assert {each["channels"] for each in tried} == {"grey"}


def answering(score_of):
    """Answers of entries by their input, each of which takes a second; and the clock."""
    passed = [0.0]

    def ask(entry, known):
        passed[0] += 1.0
        try:
            expert = expert_of("cls/turn", entry, Path())
        except ValueError:
            return None
        return AnsweredEntry(expert, tuple(Prediction(each.label, score_of(entry["input"])) for each in known))

    return ask, lambda: passed[0]


def test_search_without_a_result_stops_at_its_time_and_reports_it():
    ask, clock = answering(lambda _: 0.6)
    found = explain(START, ("normalize", "fit"), (), KNOWN, ask, Patience(clock, 20.0))
    assert found.best is None
    assert found.unfinished.startswith("the search stopped after 12 s with 12 of at least ")
    assert clock() < 20


def test_explanation_found_in_an_unfinished_search_is_marked_as_such():
    ask, clock = answering(lambda given: 0.9 if given["normalize"] == "unit" else 0.6)
    found = explain(START, ("normalize",), ("normalize",), KNOWN, ask, Patience(clock, 10.0))
    assert found.best is not None
    assert found.best.entry["input"]["normalize"] == "unit"
    assert "the search stopped" in found.unfinished
    assert not explain(START, ("normalize",), ("normalize",), KNOWN, ask, Patience(clock)).unfinished


def test_undecided_detail_that_changes_answers_is_named():
    ask, clock = answering(lambda given: 0.9 if given.get("fit", {}).get("rounding") in {None, "down"} else 0.901)
    cut = {**START, "input": {**START["input"], "fit": {"resize": 200}}}
    unscored = [KnownAnswer(each.image, each.label) for each in KNOWN]
    assert assumed(cut, unscored, ask, Patience(clock)) == {"rounding": ["up", "longer-nearest"]}
    assert assumed(cut, KNOWN, ask, Patience(clock)) == {}
    assert assumed(START, unscored, ask, Patience(clock)) == {}
