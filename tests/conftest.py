"""What every test stands on."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil

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


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Makes a folder by its name, once for all processes that run tests; ``make`` gets it empty, and fills it."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "made-once"
    shared.mkdir(exist_ok=True)

    def folder_of(name, make):
        folder, complete = shared / name, shared / f"{name}.complete"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of one that failed
                folder.mkdir()
                make(folder)
                complete.touch()
        return folder

    return folder_of
