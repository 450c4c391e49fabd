"""What images cost before their batches, and who has JPEGs smaller: only who is proven to say the same of them."""

import numpy as np
import pytest
from PIL import Image

from experts.backends.vision.classifier import write_random_weights
from experts.expert import Expert, InputSpec, Precision
from experts.graph import ExpertGraph, RouteStep
from profiler.microbench import agreement
from profiler.microbench.decoding import MOST_TIMED, DecodingBench
from profiler.workload.samples import Sample
from tests.profiler.workbench import LABELS


def photographs(workbench, count, form="jpg", size=(400, 500)):
    """Large smooth images."""
    samples = []
    for number in range(count):
        y, x = np.mgrid[: size[0], : size[1]]
        pixels = np.stack([(y + 40 * number) // 3 % 256, x // 4 % 256, (x + y) // 7 % 256], axis=2).astype(np.uint8)
        path = workbench.folder / f"{number}.{form}"
        Image.fromarray(pixels).save(path)
        samples.append(Sample(path, "c", None, "samples"))
    return tuple(samples)


def network(workbench):
    weights = workbench.folder / "a.safetensors"
    write_random_weights(weights, "squeezenet1_1", len(LABELS), seed=3)
    return workbench.copy(Expert("cls/a", "squeezenet1_1", weights, LABELS, InputSpec(64, 64)), Precision.FP32)


def measured(workbench, samples, tolerance=0.02):
    graph = ExpertGraph(["cls/a"], {"c": (RouteStep("cls/a", frozenset({"ok"})),)})
    return DecodingBench(workbench.bench(a=samples), graph, tolerance).measure(network(workbench))


@pytest.fixture(autouse=True)
def _few_of_one_class(monkeypatch):
    monkeypatch.setattr(agreement, "LEAST_IMAGES", 2)
    monkeypatch.setattr(agreement, "LEAST_EACH", 0)


def test_expert_that_agrees_on_smaller_jpegs_gets_them(workbench):
    found = measured(workbench, photographs(workbench, MOST_TIMED + 2))
    assert (found.expert, found.images, found.smaller) == ("cls/a", MOST_TIMED, MOST_TIMED + 2)
    assert found.megapixels == pytest.approx(MOST_TIMED * 0.2)
    assert 0.0 < found.largest_score_difference <= 0.02
    assert found.agrees
    assert found.image_s == found.scaled_s / MOST_TIMED


def test_smaller_jpegs_need_as_many_images_of_each_class_as_a_form(workbench, monkeypatch):
    samples = photographs(workbench, MOST_TIMED + 2)
    monkeypatch.setattr(agreement, "LEAST_EACH", 1)  # the network passes all of them, or fails all
    found = measured(workbench, samples)
    assert (found.labels_differ, found.is_enough, found.agrees) == (0, False, False)
    monkeypatch.setattr(agreement, "LEAST_EACH", 0)
    monkeypatch.setattr(agreement, "LEAST_IMAGES", len(samples) + 1)
    found = measured(workbench, samples)
    assert (found.smaller, found.is_enough, found.agrees) == (MOST_TIMED, False, False)


def test_expert_whose_scores_differ_on_smaller_jpegs_gets_whole_ones(workbench):
    found = measured(workbench, photographs(workbench, 2), tolerance=0.0)
    assert found.largest_score_difference > 0.0
    assert not found.agrees
    assert found.image_s == found.full_s / 2


@pytest.mark.parametrize(("form", "size"), [("png", (400, 500)), ("jpg", (200, 250))])
def test_images_that_cannot_be_decoded_smaller_prove_nothing(workbench, form, size):
    found = measured(workbench, photographs(workbench, 2, form, size))
    assert (found.smaller, found.agrees, found.scaled_s) == (0, False, found.full_s)
