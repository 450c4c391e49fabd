"""The page about cameras: its examples are valid line files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from agent.line_file.boards import LayoutSections
from agent.line_file.intake import CAMERA_SCHEMES, CameraSection
from agent.sources.cameras.supervision import CameraState

PAGE = Path(__file__).parents[4] / "docs" / "cameras.md"
TEXT = PAGE.read_text("utf-8")
EXAMPLES = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)]
CAMERAS = [camera for example in EXAMPLES if isinstance(example, list) for camera in example]


@pytest.mark.parametrize("camera", CAMERAS, ids=lambda camera: str(camera["url"]))
def test_a_camera_of_the_page_is_one_of_a_line_file(camera):
    CameraSection.model_validate(camera, context={"folder": Path("/line")})


def test_the_layout_of_the_page_is_one():
    (layout,) = (LayoutSections.model_validate(example) for example in EXAMPLES if isinstance(example, dict))
    assert (layout.size, list(layout.parts)) == ((3000, 4000), ["R1", "R2"])


def test_each_kind_and_each_state_is_on_the_page():
    assert [scheme for scheme in CAMERA_SCHEMES if f"`{scheme}:" not in TEXT] == []
    assert [state for state in CameraState if f"| {state} |" not in TEXT] == []
