"""A demo makes its folder anew only if a demo made it."""

from __future__ import annotations

import pytest

from agent.demo.demo import MARKER, fresh_folder
from experts.errors import ConfigError


def test_a_folder_that_no_demo_made_is_left_as_it_is(tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("do not delete")
    with pytest.raises(ConfigError, match="--dir"):
        fresh_folder(tmp_path)
    assert precious.read_text() == "do not delete"


def test_an_earlier_demo_is_made_anew(tmp_path):
    folder = fresh_folder(tmp_path / "demo")
    (folder / "line.yaml").write_text("line: old")
    again = fresh_folder(tmp_path / "demo")
    assert [entry.name for entry in again.iterdir()] == [MARKER]
