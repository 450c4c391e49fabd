"""What every test stands on."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def _heap():
    yield
    gc.unfreeze()  # what has a finalizer still runs it


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap(_heap):
    """Full collections, of which measuring makes many, pass over what was there before: a million objects of torch."""
    gc.collect()
    gc.freeze()
