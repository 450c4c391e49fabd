"""What `make mutants` says of what it found; that it finds anything takes minutes, and is `make mutants` itself."""

from __future__ import annotations

import pytest

from tests.mutants import is_enough, report, results_in

LISTING = """\
    agent.core.queue.x_first__mutmut_1: killed
    agent.core.queue.xǁQueueǁtake__mutmut_2: survived
    agent.core.pool.x_misfits__mutmut_1: timeout
    agent.core.pool.x_misfits__mutmut_2: no tests
"""


def test_every_mutant_that_was_not_killed_is_named_and_counted():
    assert report(results_in(LISTING)).splitlines() == [
        "    timeout  agent.core.pool.x_misfits__mutmut_1",
        "   no tests  agent.core.pool.x_misfits__mutmut_2",
        "   survived  agent.core.queue.xǁQueueǁtake__mutmut_2",
        "agent.core.pool             2 mutants,   0.0% killed: 0 killed, 0 survived, 1 timed out, "
        "1 reached by no test or broken, 0 not run",
        "agent.core.queue            2 mutants,  50.0% killed: 1 killed, 1 survived, 0 timed out, "
        "0 reached by no test or broken, 0 not run",
        "all                         4 mutants,  25.0% killed: 1 killed, 1 survived, 1 timed out, "
        "1 reached by no test or broken, 0 not run",
    ]


@pytest.mark.parametrize(
    ("results", "enough"),
    [
        (["killed"] * 19 + ["survived"], True),
        (["killed"] * 18 + ["survived"], False),
        (["killed"] * 18 + ["timeout"], False),
        (["killed"] * 18 + ["no tests"], False),
        (["killed"] * 99 + ["not checked"], False),
        ([], False),
    ],
)
def test_all_have_to_run_and_nineteen_in_twenty_to_be_killed(results, enough):
    assert is_enough(results) is enough
