"""Duties by time: one that fails holds no other up, and is seen."""

from agent.faults.housekeeping import LOGGED_AGAIN_STEPS, Housekeeper


def test_failing_duty_delays_no_other_and_is_logged_at_intervals_until_it_works(caplog):
    errors, turns = [OSError("disk gone")], []

    def fail():
        for error in errors:
            raise error

    keeper = Housekeeper({"first": fail, "second": lambda: turns.append(None)})
    for _ in range(2 * LOGGED_AGAIN_STEPS):
        keeper.step()
    assert len(turns) == 2 * LOGGED_AGAIN_STEPS
    assert keeper.failing == {"first": "OSError: disk gone"}
    failed = [one.getMessage() for one in caplog.records if "housekeeping_failed duty=first" in one.getMessage()]
    assert [told.split()[2] for told in failed] == ["times=1:", f"times={LOGGED_AGAIN_STEPS + 1}:"]
    errors.clear()
    keeper.step()
    assert keeper.failing == {}
    assert f"housekeeping_works_again duty=first failures={2 * LOGGED_AGAIN_STEPS}" in caplog.text
