"""Garbage collections, read from Python's own collector."""

import gc

import pytest

from agent.runtime.machine.garbage import loading_modules


def test_garbage_collection_is_paused_while_modules_are_loaded():
    with loading_modules():
        assert not gc.isenabled()
        made = [object()]
    assert gc.isenabled()
    assert not any(each is made for each in gc.get_objects())
    with pytest.raises(ImportError), loading_modules():
        raise ImportError("no such library")
    assert gc.isenabled()
