"""All ways of preparing photographs run, and those that see the same pixels answer alike."""

from experts.expert import Precision
from proof.parts.photographs import WAYS, PhotographsRecipe, measure_photographs


def test_all_ways_are_measured_and_the_folder_is_left_as_it_was(tmp_path):
    recipe = PhotographsRecipe("squeezenet1_1", Precision.FP32, megapixels=0.4, images=5, experts=2, repeats=1)
    measured = measure_photographs(tmp_path, recipe)
    assert [row.way for row in measured.rows] == list(WAYS)
    assert all(row.images_per_s > 0.0 and 0.0 <= row.waited_fraction <= 1.0 for row in measured.rows)
    assert measured.notes[-1].endswith("the same answers")
    assert not list(tmp_path.iterdir())
