"""What tests of microbenchmarks stand on."""

from __future__ import annotations

import pytest

from experts.packed.weights import SegmentStore


@pytest.fixture
def store(tmp_path):
    store = SegmentStore(tmp_path / "packed")
    yield store
    store.close()
