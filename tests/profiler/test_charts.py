"""Charts: a whole PNG of a README's width, the same bytes for the same figures, and no chart of nothing."""

from __future__ import annotations

import pytest
from PIL import Image

from profiler.charts import Labels, Series, bar_chart, line_chart

LABELS = Labels("Throughput", "images/s", "images")
CURVES = (Series("measured", (1, 2, 4), (3.0, 5.0, 9.0), "points"), Series("fit", (1, 4), (3.0, 9.0), "dashed"))


def colours(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert 800 <= image.width <= 1100
        return {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}


def test_a_line_chart_shows_its_series_each_in_its_colour(tmp_path):
    line_chart(tmp_path / "latency.png", Labels("Latency", "ms", "images", "two threads"), CURVES)
    assert {(0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)} <= colours(tmp_path / "latency.png")
    assert [path.name for path in tmp_path.iterdir()] == ["latency.png"]


def test_a_bar_that_is_not_known_is_not_a_bar_of_zero(tmp_path):
    bar_chart(tmp_path / "unknown.png", LABELS, ["A1"], {"samba": [1.0], "paper": [None]})
    bar_chart(tmp_path / "zero.png", LABELS, ["A1"], {"samba": [1.0], "paper": [0.0]})
    assert (tmp_path / "unknown.png").read_bytes() != (tmp_path / "zero.png").read_bytes()


@pytest.mark.parametrize(
    "series", [(), (Series("short", (1, 2), (1.0,)),)], ids=["nothing", "x and y of different lengths"]
)
def test_curves_that_cannot_be_drawn_are_refused(tmp_path, series):
    with pytest.raises(ValueError, match=r"bad\.png"):
        line_chart(tmp_path / "bad.png", LABELS, series)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("groups", "bars"), [([], {"a": []}), (["A1"], {}), (["A1"], {"a": [1.0, 2.0]})], ids=["groups", "bars", "heights"]
)
def test_bars_that_cannot_be_drawn_are_refused(tmp_path, groups, bars):
    with pytest.raises(ValueError, match=r"bad\.png"):
        bar_chart(tmp_path / "bad.png", LABELS, groups, bars)
    assert not list(tmp_path.iterdir())
