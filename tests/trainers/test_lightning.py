"""A checkpoint of Lightning's trainer, to judged images: the probabilities of the module that Lightning loads."""

import json

from tests.trainers.test_torch import FITTED, LABELS, SIZE, require_same


def test_lightning_checkpoint_needs_only_fit_and_variant_and_answers_as_lightning(line, made_by, images):
    folder = made_by("lightning")
    added = line.add(folder / "last.ckpt", *FITTED, "--variant", "plain")
    assert (added["entry"]["architecture"], added["entry"]["labels"]) == ("resnet18", list(LABELS))
    assert added["entry"]["input"] == {"size": [SIZE, SIZE], "normalize": "imagenet", "fit": "stretched"}
    assert "backbone. before every name was left out" in added["said"]
    answers = json.loads((folder / "answers.json").read_text())
    labels = [LABELS[row.index(max(row))] for row in answers]
    require_same(line.inspect(images), labels, [max(row) for row in answers])
