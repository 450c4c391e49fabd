"""Charts: a whole PNG of a README's width, and no bar of an unknown figure."""

from PIL import Image

from profiler.charts import Labels, Series, bar_chart, line_chart

LABELS = Labels("Throughput", "images/s", "images", "two threads")
CURVES = (Series("measured", (1, 2, 4), (3.0, 5.0, 9.0), "points"), Series("fit", (1, 4), (3.0, 9.0), "dashed"))


def test_line_chart_shows_each_series_in_its_colour(tmp_path):
    line_chart(tmp_path / "latency.png", LABELS, CURVES)
    with Image.open(tmp_path / "latency.png") as image:
        assert (image.format, 800 <= image.width <= 1100) == ("PNG", True)
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    assert {(0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)} <= colours
    assert [path.name for path in tmp_path.iterdir()] == ["latency.png"]


def test_unknown_bar_is_not_a_bar_of_zero(tmp_path):
    bar_chart(tmp_path / "unknown.png", LABELS, ["A1"], {"samba": [1.0], "paper": [None]})
    bar_chart(tmp_path / "zero.png", LABELS, ["A1"], {"samba": [1.0], "paper": [0.0]})
    assert (tmp_path / "unknown.png").read_bytes() != (tmp_path / "zero.png").read_bytes()
