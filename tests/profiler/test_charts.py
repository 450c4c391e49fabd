"""Charts: a whole PNG of a README's width, the same bytes for the same figures, and no chart of nothing."""

from __future__ import annotations

import pytest
from PIL import Image

from profiler.charts import Series, bar_chart, line_chart

CURVES = (Series("measured", (1, 2, 4), (3.0, 5.0, 9.0), "points"), Series("fit", (1, 4), (3.0, 9.0), "dashed"))


def colours(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert 800 <= image.width <= 1100
        return {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}


def test_a_line_chart_shows_its_series_each_in_its_colour(tmp_path):
    line_chart(tmp_path / "latency.png", "Latency", "images", "ms", CURVES, note="two threads")
    assert {(0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)} <= colours(tmp_path / "latency.png")
    assert [path.name for path in tmp_path.iterdir()] == ["latency.png"]


def test_the_same_figures_give_the_same_bytes(tmp_path):
    for name in ("first.png", "second.png"):
        bar_chart(tmp_path / name, "Throughput", "images/s", ["A1", "B1"], {"samba": [3, 4], "paper": [25, None]})
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()


def test_a_bar_that_is_not_known_is_not_a_bar_of_zero(tmp_path):
    bar_chart(tmp_path / "unknown.png", "T", "y", ["A1"], {"samba": [1.0], "paper": [None]})
    bar_chart(tmp_path / "zero.png", "T", "y", ["A1"], {"samba": [1.0], "paper": [0.0]})
    assert (tmp_path / "unknown.png").read_bytes() != (tmp_path / "zero.png").read_bytes()


def test_many_bars_are_drawn_without_figures_over_them(tmp_path):
    groups = [f"g{number}" for number in range(12)]
    bar_chart(tmp_path / "many.png", "T", "y", groups, {name: [1.0] * 12 for name in "abcdefghi"})
    assert len(colours(tmp_path / "many.png")) > 8


def test_a_logarithmic_axis(tmp_path):
    line_chart(tmp_path / "log.png", "T", "queued", "us", [Series("", (1, 1000), (2.0, 3.0))], log_x=True)
    assert (0x00, 0x72, 0xB2) in colours(tmp_path / "log.png")


@pytest.mark.parametrize(
    "series", [(), (Series("short", (1, 2), (1.0,)),)], ids=["nothing", "x and y of different lengths"]
)
def test_curves_that_cannot_be_drawn_are_refused(tmp_path, series):
    with pytest.raises(ValueError, match=r"bad\.png"):
        line_chart(tmp_path / "bad.png", "T", "x", "y", series)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("groups", "bars"), [([], {"a": []}), (["A1"], {}), (["A1"], {"a": [1.0, 2.0]})], ids=["groups", "bars", "heights"]
)
def test_bars_that_cannot_be_drawn_are_refused(tmp_path, groups, bars):
    with pytest.raises(ValueError, match=r"bad\.png"):
        bar_chart(tmp_path / "bad.png", "T", "y", groups, bars)
    assert not list(tmp_path.iterdir())
