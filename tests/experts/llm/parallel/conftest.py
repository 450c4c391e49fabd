"""Ranks for the tests of this folder."""

import pytest

from tests.experts.llm.parallel.rank_pool import rank_pool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    with rank_pool(tmp_path_factory.mktemp("ranks")) as pool:
        yield pool
