"""Charts: a whole PNG of a README's width, the same bytes for the same figures, and no chart of nothing."""

from __future__ import annotations

import numpy as np
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


def pixels(path):
    """The chart in grey, (height, width); its lower axis's row, and the first row and the column of its left one."""
    with Image.open(path) as image:
        grey = np.asarray(image.convert("L"))
    dark = grey < 60
    left = int(dark.sum(axis=0).argmax())
    return grey, int(dark.sum(axis=1).argmax()), int(dark[:, left].argmax()), left


def runs(flags, least_gap=1):
    """How many stretches of true there are, those less than so far apart taken together."""
    places = np.flatnonzero(flags)
    return int((np.diff(places) > least_gap).sum()) + 1 if len(places) else 0


@pytest.mark.parametrize("heights", [(100.0, 101.0, 100.8), (0.0, 101.0, 3.0), (5.0, 5.0, 5.0)])
def test_the_highest_point_is_well_below_the_top(tmp_path, heights):
    line_chart(tmp_path / "top.png", LABELS, [Series("", (1, 2, 3), heights, "points")])
    grey, bottom, top, left = pixels(tmp_path / "top.png")
    drawn = np.flatnonzero((grey[top:bottom, left + 8 :] < 150).any(axis=1))  # darker than the lines of the grid
    assert drawn[0] > 0.04 * (bottom - top)


@pytest.mark.parametrize(("x", "ticks"), [((1, 2, 3), 3), ((1.0, 2.0), 2), ((1, 2.5, 3), 9)])
def test_where_only_whole_numbers_occur_only_whole_ones_are_on_the_axis(tmp_path, x, ticks):
    line_chart(tmp_path / "ticks.png", LABELS, [Series("", x, [1.0] * len(x))])
    grey, bottom, _, left = pixels(tmp_path / "ticks.png")
    assert runs(grey[bottom + 4, left + 2 :] < 150) == ticks


def test_figures_over_narrow_bars_do_not_run_into_one_another(tmp_path):
    groups = [f"{number}G+1C" for number in range(14)]
    bar_chart(tmp_path / "narrow.png", LABELS, groups, {"board A": [18.9] * 14, "board B": [18.9] * 13 + [20.0]})
    grey, bottom, top, left = pixels(tmp_path / "narrow.png")
    highest = bottom - (bottom - top) / 1.2  # where a bar of 20 ends
    band = grey[int(highest + 0.05 * (bottom - top)) - 12 : int(highest + 0.05 * (bottom - top)) - 4, left + 8 :]
    assert runs((band < 100).any(axis=0), least_gap=3) >= 27


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
