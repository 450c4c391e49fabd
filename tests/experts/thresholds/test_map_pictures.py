"""Anomaly maps as pictures: what is kept is what was there, and what is no map is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from experts.expert import AnomalyMap
from experts.thresholds.map_pictures import map_of, map_png
from tests.pictures import encoded


@given(
    height=st.integers(1, 8), width=st.integers(1, 8),
    bounds=st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)).map(sorted), data=st.data(),
)  # fmt: skip
def test_kept_map_is_read_back(height, width, bounds, data):
    values = data.draw(st.binary(min_size=height * width, max_size=height * width))
    shown = AnomalyMap(height, width, *bounds, values)
    assert map_of(map_png(shown)) == shown


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no picture",
        encoded(Image.new("L", (2, 2))),
        encoded(Image.new("RGB", (2, 2))),
        map_png(AnomalyMap(1, 1, 0.0, 1.0, b"x"))[:40],
    ],
)
def test_invalid_map_is_refused(content):
    with pytest.raises(ValueError, match="no map"):
        map_of(content)
