"""Anomaly maps as they are kept: nothing of them is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from experts.expert import AnomalyMap
from experts.map_pictures import map_of_png, map_png

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@given(st.integers(1, 9), st.integers(1, 9), NUMBERS, NUMBERS, st.randoms(use_true_random=False))
def test_a_kept_map_is_read_back_as_it_was(height, width, lowest, highest, chance):
    shown = AnomalyMap(height, width, lowest, highest, chance.randbytes(height * width))
    assert map_of_png(map_png(shown)) == shown
