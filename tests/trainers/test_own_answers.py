"""`experts add --check` with 20 answers of each trainer's own pipeline, written by the lines of docs/models.md."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.trainers.conftest import TRAINERS
from tests.trainers.test_torch import LABELS

ORDER, MOVED = (("--labels", ",".join(labels)) for labels in (LABELS, LABELS[::-1]))
MULTICLASS = ("--task", "multiclass")
TORCHVISION = ("--fit", "stretched", "--trainer", "torchvision", "--variant", "plain")
FILES = {  # by trainer: whether its library is with CoServe, its file, and what has to be said of it
    "torchvision": (True, "checkpoint.pt", (*MULTICLASS, "--size", "48x48", "--normalize", "imagenet", *TORCHVISION)),
    "lightning": (False, "last.ckpt", TORCHVISION),
    "timm": (False, "whole.pt", MULTICLASS),
    "transformers": (True, "exported/model.onnx", MULTICLASS),
    "anomalib": (False, "padim/weights/onnx/model.onnx", ("--normalize", "unit", "--threshold", "0.5")),
    "ultralytics": (True, "best.pt", ("--pass", "aligned")),
}
WRONG = {  # what is said wrongly, and what the refusal says
    "torchvision": [
        (MOVED, "give --labels ok,missing,tombstone: 20 of 20"),
        ((*ORDER, "--resample", "opencv-linear"), "give --fit stretched: 20 of 20"),
    ],
    "lightning": [(("--resample", "opencv-linear"), "give --fit stretched: 20 of 20")],
    "timm": [(MOVED, "give --labels ok,missing,tombstone: 20 of 20")],
    "transformers": [
        ((*ORDER, "--resample", "nearest"), "give --fit '{interpolation: torch-bilinear-antialias}': 20 of 20"),
    ],
    "anomalib": [
        (
            ("--fit", "stretched", "--resample", "opencv-linear"),
            "give --fit '{interpolation: torch-float-bilinear-antialias}': 20 of 20",
        )
    ],
    "ultralytics": [(("--size", "32x32"), "every value of")],
}
RIGHT = {"torchvision": ORDER, "timm": ORDER, "anomalib": ("--trainer", "anomalib")}
pytestmark = pytest.mark.slow


def make(trainer, folder):
    python = sys.executable if FILES[trainer][0] else TRAINERS
    script = Path(__file__).with_name("made_with_page.py")
    done = subprocess.run([python, script, trainer, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def made(made_once):
    def folder_of(trainer):
        if not (FILES[trainer][0] or TRAINERS.exists()):
            pytest.skip("timm, Lightning and Anomalib are not installed: make trainers")
        return made_once(f"own-answers-{trainer}", partial(make, trainer))

    return folder_of


@pytest.mark.parametrize("trainer", FILES)
def test_model_agrees_with_its_trainers_own_answers_on_all_images(line, made, trainer):
    folder, (_, file, words) = made(trainer), FILES[trainer]
    checked = line.add(folder / file, *words, *RIGHT.get(trainer, ()), "--check", folder / "answers.json")["checked"]
    assert (checked["images"], checked["agreed"]) == (20, 20)
    assert checked["largest_difference"] <= 0.01


@pytest.mark.parametrize(("trainer", "wrong", "sentence"), [(name, *each) for name in WRONG for each in WRONG[name]])
def test_wrong_fact_is_refused(line, made, trainer, wrong, sentence):
    folder, (_, file, words) = made(trainer), FILES[trainer]
    refusal = line.refused(folder / file, *words, *wrong, "--check", folder / "answers.json")
    assert int(re.search(r"answers.json: (\d+) of 20 answers agree", refusal)[1]) < 20
    assert sentence in refusal
