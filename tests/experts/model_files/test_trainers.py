"""The table of what trainers do: each row can be written in a line file, and docs/models.md has it."""

import re
from pathlib import Path

import pytest

from experts.expert import RESAMPLERS
from experts.model_files.description import ModelDescription
from experts.model_files.trainers import TRAINERS, as_trained
from experts.sections.inputs import InputSection

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
NOTHING = ModelDescription(Path("a.onnx"), "classifier", "onnx", missing={"fit": "?", "normalize": "?"})


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_is_served_with_its_source_and_asks_for_the_rest(name):
    found, trainer = as_trained(NOTHING, name, (32, 48)), TRAINERS[name]
    assert found.resample is None or found.resample in RESAMPLERS
    keys = {key: getattr(found, key) for key in ("normalize", "fit", "orientation") if getattr(found, key) is not None}
    InputSection.model_validate({"size": [32, 48], **keys})
    assert all(found.evidence[key] == f"given by --trainer {name} ({trainer.source})" for key in keys)
    assert found.missing.keys() == {"fit", "normalize"} - keys.keys()


def test_page_has_every_trainer_and_its_function():
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\S+)", PAGE.read_text("utf-8"), re.MULTILINE))
    for name, trainer in TRAINERS.items():
        assert rows[name] == (f"`{trainer.resample}`" if trainer.resample else "asked:")


def test_facts_of_a_file_override_its_trainers_defaults():
    stated = ModelDescription(
        Path("a.onnx"),
        "classifier",
        "onnx",
        normalize="unit",
        fit={"interpolation": "box"},
        evidence={"fit": "its file"},
    )
    found = as_trained(stated, "paddleocr", (32, 48))
    assert (found.normalize, found.fit, found.resample) == ("unit", {"interpolation": "box"}, None)
    assert found.evidence["fit"] == "its file"
