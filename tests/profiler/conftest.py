"""Store and workbench that tests of microbenchmarks measure with."""

import pytest

from experts.packed.weights import SegmentStore
from tests.profiler.workbench import Workbench


@pytest.fixture
def store(tmp_path):
    store = SegmentStore(tmp_path / "packed")
    yield store
    store.close()


@pytest.fixture
def workbench(tmp_path):
    workbench = Workbench(tmp_path)
    yield workbench
    workbench.store.close()
