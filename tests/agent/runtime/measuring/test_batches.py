"""Which batch sizes are run, and when to stop: on a rig whose clock is a table, so that no machine has a say."""

from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from agent.core.events import BatchFailed
from agent.device_profile.records import BatchTimes
from agent.runtime.expert_copy import ExpertCopy
from agent.runtime.images.sources import ImageFile
from agent.runtime.measuring.batches import (
    EXTRA_FRACTION,
    EXTRA_RUNS,
    LEAST_ROUNDS,
    PEAK_RUNS,
    TRIAL_RUNS,
    BatchOptions,
    BatchRuns,
    ImageCycle,
    why_no_larger,
)
from agent.runtime.measuring.rig import TimedBatch
from experts.backends.base import Prepared
from experts.errors import LoadError
from experts.expert import Expert, InputSpec
from experts.packed.weights import PackedExpert, Segment

PER_IMAGE = 1000  # bytes that the fake declares


class ScriptedRig:
    """Answers with the seconds that a table or a function gives a batch size, and remembers the sizes asked for."""

    def __init__(self, latency_s, memory_for=10**9, failure="no memory left", out_of_memory=True):
        self.latency_s = latency_s
        self.memory_for = memory_for
        self.failure = BatchFailed(0, failure, out_of_memory)
        self.sizes = []
        self.asked = []

    def prepared(self, copy, images):
        self.asked += images
        return [Prepared(torch.full((3, 2, 2), float(number)), 2, 2) for number in range(len(images))]

    def attempt(self, copy, images):
        self.sizes.append(len(images))
        if len(images) > self.memory_for:
            return self.failure
        return TimedBatch((), self.latency_s(len(images)))

    def timed_s(self, copy, images):
        return self.attempt(copy, images).seconds


@pytest.fixture
def copy(tmp_path):
    weights = tmp_path / "fake.yaml"
    weights.write_text(f"{{weight_bytes: 8, workspace_bytes: {PER_IMAGE}}}")
    expert = Expert("cls/fake", "fake", weights, ("ok", "bad"), InputSpec(8, 12))
    return ExpertCopy("cls/fake@fp32", expert, PackedExpert("cls/fake", "fake", "fp32", "", "", Segment("", 0, ()), ()))


@pytest.fixture
def runs_of(copy):
    def build(rig, meter=None, free_bytes=10**12, **options):
        return BatchRuns(rig, copy, ImageCycle(rig, copy), meter, free_bytes, BatchOptions(**options))

    return build


def sizes_of(batches):
    return [batch.batch_size for batch in batches]


@pytest.mark.parametrize("image_s", [0.0005, 0.005, 0.05, 0.5])
def test_measuring_of_a_kind_stays_within_its_time(runs_of, image_s):
    rig = ScriptedRig(lambda size: image_s * (size + 1))
    batches = runs_of(rig, limit_s=20.0).measure()
    assert sum(rig.latency_s(size) for size in rig.sizes) <= 20.0
    assert all(len(batch.seconds) >= LEAST_ROUNDS for batch in batches)


@pytest.mark.parametrize(
    ("sizes", "options", "free_bytes", "said"),
    [
        ((1, 2, 4), {}, 10**12, "no larger ones are tried"),
        ((1, 2), {"limit_s": 40.0}, 10**12, "those of 4 would not fit into the 40 s that a kind is measured for"),
        ((1, 2), {"limit_s": 50.0}, 7 * PER_IMAGE, "those of 4 would need more than half of the free memory"),
        ((1, 2), {"limit_s": 50.0}, 10**12, "memory did not suffice, or an earlier version tried no larger ones"),
    ],
)
def test_reason_for_no_larger_batch_follows_from_the_measurements(sizes, options, free_bytes, said):
    """By hand, 0.9 s per image: 4 runs each of 1 and 2 took 10.8 s; 4 of 4 and 3 rounds of all take 33.3 s: 44.1 s."""
    measured = [BatchTimes(size, (0.9 * size,), PER_IMAGE * size) for size in sizes]
    assert why_no_larger(measured, BatchOptions(sizes=(1, 2, 4), **options), free_bytes).startswith(said)


def test_batch_sizes_grow_until_the_average_has_not_improved_for_three_sizes(runs_of):
    averages = {1: 9.0, 2: 7.0, 3: 7.5, 4: 7.5, 5: 6.9, 6: 7.0, 8: 7.0, 10: 7.0}
    assert sizes_of(runs_of(ScriptedRig(lambda size: size * averages[size] / 1e3)).measure()) == list(averages)


def test_smallest_size_is_run_again_between_the_others_of_a_round(runs_of):
    """By hand, n + 0.25 s: rounds of 64.5 s, of which 8 % are 5.2 s; four runs of 1.25 s, at even places."""
    assert (EXTRA_RUNS, EXTRA_FRACTION) == (4, 0.08)
    rig = ScriptedRig(lambda size: size + 0.25)
    batches = runs_of(rig, sizes=(1, 2, 4, 8, 16, 32), repeats=2, limit_s=1e6).measure()
    growing = sum(PEAK_RUNS + TRIAL_RUNS for _ in batches)
    assert rig.sizes[growing:] == [1, 1, 2, 1, 4, 1, 8, 1, 16, 32, 32, 1, 16, 1, 8, 1, 4, 1, 2, 1]
    assert [len(batch.seconds) for batch in batches] == [10, 2, 2, 2, 2, 2]


def test_smallest_size_is_run_however_short_the_time(runs_of):
    rig = ScriptedRig(lambda size: 10.0)
    (batch,) = runs_of(rig, limit_s=0.0).measure()
    assert (batch.batch_size, batch.seconds) == (1, (10.0,))
    assert rig.sizes == [1, 1], "once to weigh it, once to time it"


def test_size_is_tried_only_if_rounds_of_all_sizes_fit_into_the_time(runs_of):
    """By hand, 1 s per image: size 1 takes 4 s; size 2 needs 4 * 2 + 3 * (1 + 2) = 17 s more; size 3 needs 30 s."""
    assert (PEAK_RUNS, TRIAL_RUNS, LEAST_ROUNDS) == (2, 2, 3)
    rig = ScriptedRig(lambda size: 1.0 * size)
    batches = runs_of(rig, limit_s=22.0).measure()
    assert sizes_of(batches) == [1, 2]
    assert [len(batch.seconds) for batch in batches] == [3, 3], "4 + 8 s, then rounds of 3 s up to 22"
    assert sizes_of(runs_of(rig, limit_s=20.0).measure()) == [1]


def test_size_beyond_the_free_memory_is_not_tried(runs_of):
    """The fake's estimate is 1000 bytes an image, half of 8000 may be taken: 4 images fit, 8 do not."""
    rig = ScriptedRig(lambda size: 0.01)
    batches = runs_of(rig, sizes=(1, 2, 4, 8), free_bytes=8 * PER_IMAGE).measure()
    assert sizes_of(batches) == [1, 2, 4]
    assert [batch.workspace_bytes for batch in batches] == [PER_IMAGE, 2 * PER_IMAGE, 4 * PER_IMAGE]
    assert max(rig.sizes) == 4


def test_out_of_memory_ends_the_growth_of_batches(runs_of):
    batches = runs_of(ScriptedRig(lambda size: 0.01, memory_for=3), repeats=2).measure()
    assert sizes_of(batches) == [1, 2, 3]
    assert all(len(batch.seconds) == 2 for batch in batches)


@pytest.mark.parametrize(
    "rig",
    [ScriptedRig(lambda size: 0.01, memory_for=0), ScriptedRig(lambda size: 0.01, 2, "it broke", out_of_memory=False)],
)
def test_other_error_while_measuring_is_raised(runs_of, rig):
    with pytest.raises(LoadError, match=r"cls/fake: (no memory left|it broke)"):
        runs_of(rig).measure()


def test_images_for_measuring_rotate_and_have_memory_of_their_own(copy):
    files = [ImageFile(Path(f"{name}.png"), 9) for name in "abc"]
    rig = ScriptedRig(lambda size: 0.01)
    images = ImageCycle(rig, copy, files)
    taken = Counter(float(image.tensor.max()) for _ in range(3) for image in images.next(2))
    assert taken == {0.0: 2, 1.0: 2, 2.0: 2}
    assert rig.asked == files
    first, _, _, again = images.next(4)
    assert torch.equal(first.tensor, again.tensor)
    assert first.tensor.data_ptr() != again.tensor.data_ptr()


def test_out_of_memory_for_images_names_the_expert(copy, monkeypatch):
    rig = ScriptedRig(lambda size: 0.01)
    monkeypatch.setattr(rig, "prepared", Mock(side_effect=MemoryError))
    with pytest.raises(LoadError, match="expert cls/fake: there is no memory to prepare its images"):
        ImageCycle(rig, copy)
