"""The input that explains known answers is found among those of known trainers, too."""

from pathlib import Path

from experts.catalog import expert_of
from experts.expert import Prediction
from experts.model_files.trainers import HALF
from experts.proving.answers import KnownAnswer
from experts.proving.search import AnsweredEntry, explain

START = {
    "architecture": "onnx", "weights": "x.onnx", "labels": ["ok", "turned"],
    "input": {"size": [48, 192], "normalize": "imagenet"},
}  # fmt: skip
KNOWN = tuple(
    KnownAnswer(Path(f"{number}.png"), label=label, score=0.9) for number, label in enumerate(("ok", "turned"))
)


def test_the_whole_input_of_a_known_trainer_is_found_where_each_of_its_keys_alone_explains_nothing():
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


def test_a_graph_of_one_channel_is_searched_among_grey_pixels():
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
