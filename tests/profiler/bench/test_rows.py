"""Medians by hand; the report tells targets, unjudged requests, and runs that disagree."""

from dataclasses import replace

import pytest

from profiler.bench.rows import Measurement, PolicyRow, medians, report
from tests.profiler.bench.one_run import FIGURES


def row(*runs, policy="coserve", reasons=()):
    return PolicyRow(policy, 60, "fp32", {"host": 10**9}, {"cpu": 1}, medians(runs), runs, reasons)


REACHED = (
    "a box, 2 cores", "line-1", "2000 MB/s", "past the page cache", "6.00", "0.960", "abababab",
    "coserve: roofline fraction at least 0.95: reached",
    "coserve: predicted +5.0% (batches took 1.02 of their profile), within 10%: reached",
)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "changes", "told", "untold"),
    [
        (row(FIGURES), {}, REACHED, ("SHORT", "SHARED", "UNKNOWN", "OUTPUTS")),
        (
            row(replace(FIGURES, roofline_fraction=0.94, prediction_error=-0.11)), {},
            ("at least 0.95: SHORT of its target", "predicted -11.0% (batches took 1.02", "10%: SHORT of its"), (),
        ),
        (row(replace(FIGURES, roofline_fraction=0.2), policy="samba"), {}, (), ("roofline fraction at least",)),
        (
            row(replace(FIGURES, unknown=2), reasons=("it broke", "it broke again")), {},
            ("UNKNOWN    coserve: 2 of 60 were not judged: it broke; it broke again",), (),
        ),
        (row(replace(FIGURES, others_fraction=0.4)), {}, ("coserve: other processes had 40% of the cores",), ()),
        (
            row(FIGURES, replace(FIGURES, outputs_sha256="cd" * 32)), {},
            ("OUTPUTS    coserve: its runs did not judge every request alike",), (),
        ),
        (
            row(FIGURES), {"direct_io": False, "is_held": True, "notes": ("2 loads in it",)},
            ("THROUGH the page cache", "2000 MB/s, held", "note       2 loads in it"), (),
        ),
    ],
)  # fmt: skip
def test_the_report_tells_targets_and_caveats(rows, changes, told, untold):
    text = report(replace(Measurement("line-1", "a box, 2 cores", (rows,), True, 2e9, False, 9.6, ()), **changes))
    for part in told:
        assert part in text
    for part in untold:
        assert part not in text
