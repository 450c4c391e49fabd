"""A frame of a whole board, cut into its parts."""

from __future__ import annotations

import pytest

from agent.intake.cameras.layout import CutPart, cut
from agent.line_file.boards import LayoutSections

LAYOUT = LayoutSections.model_validate(
    {
        "size": [480, 640],
        "parts": {
            "R1": {"component": "resistor", "box": [0, 10, 20, 40]},
            "C1": {"component": "capacitor", "box": [600, 400, 640, 480]},
        },
    }
)


def test_a_frame_is_cut_into_the_layout_s_parts() -> None:
    assert cut((480, 640), LAYOUT) == (
        CutPart("R1", "resistor", (0, 10, 20, 40)),
        CutPart("C1", "capacitor", (600, 400, 640, 480)),
    )


@pytest.mark.parametrize("size", [(640, 480), (480, 641), (960, 1280)])
def test_one_of_another_size_is_refused_with_both(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"the frame is {size[1]} x {size[0]} pixels.*layout is for 640 x 480 pixels"):
        cut(size, LAYOUT)
