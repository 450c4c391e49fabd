"""Duties by time, and garbage collections, read from Python's own collector."""

import gc
import weakref

import pytest

from agent.service.garbage import keep_what_is_here, loading_modules
from agent.service.housekeeping import TOLD_AGAIN_STEPS, Housekeeper


class Cycle:
    """Reference counts alone never free it."""

    def __init__(self):
        self.itself = self


def is_looked_at(wanted):
    return any(each is wanted for each in gc.get_objects())


def test_what_is_here_is_kept_but_garbage_and_what_comes_later_is_collected():
    garbage, before = weakref.ref(Cycle()), Cycle()
    keep_what_is_here()
    assert garbage() is None
    later = Cycle()
    assert not is_looked_at(before)
    assert is_looked_at(later)
    gone, kept = weakref.ref(later), weakref.ref(before)
    del later, before
    gc.collect()
    assert gone() is None
    assert kept() is not None
    keep_what_is_here()
    assert kept() is None


def test_nothing_is_collected_while_modules_are_loaded_and_what_they_made_is_kept():
    with loading_modules():
        assert not gc.isenabled()
        made = Cycle()
    assert gc.isenabled()
    assert not is_looked_at(made)
    with pytest.raises(ImportError), loading_modules():
        raise ImportError("no such library")
    assert gc.isenabled()


def test_a_duty_that_fails_holds_no_other_up_and_is_told_at_first_every_minute_and_when_it_works_again(caplog):
    errors, turns = [OSError("disk gone")], []

    def fail():
        for error in errors:
            raise error

    keeper = Housekeeper({"first": fail, "second": lambda: turns.append(None)})
    for _ in range(2 * TOLD_AGAIN_STEPS):
        keeper.step()
    assert len(turns) == 2 * TOLD_AGAIN_STEPS
    assert keeper.failing == {"first": "OSError: disk gone"}
    failed = [one.getMessage() for one in caplog.records if "housekeeping_failed duty=first" in one.getMessage()]
    assert [told.split()[2] for told in failed] == ["times=1:", f"times={TOLD_AGAIN_STEPS + 1}:"]
    errors.clear()
    keeper.step()
    assert keeper.failing == {}
    assert f"housekeeping_works_again duty=first failures={2 * TOLD_AGAIN_STEPS}" in caplog.text
