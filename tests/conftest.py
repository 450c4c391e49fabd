"""What every test stands on."""

from __future__ import annotations

import gc

import pytest

from tests.forks import Forks


@pytest.fixture(scope="session", autouse=True)
def _heap():
    yield
    gc.unfreeze()  # what has a finalizer still runs it


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap(_heap):
    """Full collections, of which measuring makes many, pass over what was there before: a million objects of torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Processes that have the agent imported already."""
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()
