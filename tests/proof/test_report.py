"""The targets of the proof, by hand: what is reached, what is SHORT, and that the worst row of a plan decides."""

from dataclasses import replace

import pytest

from profiler.bench.measured import Measured
from profiler.bench.rows import Measurement, PolicyRow
from profiler.workload.generated_line import LineRecipe
from proof.paper.evaluation import Evaluation
from proof.parts.starting import COLUMNS, StartTimes
from proof.report import EngineProof, Findings, PlannedRun, write_report
from tests.profiler.bench.one_run import FIGURES

START = StartTimes(3, 6.2, 380_000_000, 300_000_000, 2.0)


def compared(speeds, planned):
    rows = tuple(
        PolicyRow(policy, 60, "fp32", {}, {"cpu": 1}, figures, (figures,), ())
        for policy, figures in ((name, replace(FIGURES, images_per_s=speed)) for name, speed in speeds.items())
    )
    return PlannedRun("a trace", Measurement("line", "a box", rows, True, 2e9, False, 9.6, ()), planned)


@pytest.fixture
def proof():
    return EngineProof(
        recipe=LineRecipe(),
        fp32=compared({"coserve": 12.0, "samba": 8.0, "naive": 2.0}, {"coserve": 12.6, "samba": 7.6}),
        held=compared({"coserve": 12.0, "samba": 3.0}, {"coserve": 12.0, "samba": 3.0}),
        bf16=compared({"coserve": 20.0}, {"coserve": 19.0}),
    )


def test_ratios_are_of_measured_values_and_the_worst_planned_row_decides(proof):
    assert {target.what: (target.found, target.reached) for target in proof.targets} == {
        "roofline fraction, coserve, fp32": ("0.96", True),
        "coserve over samba, the SSD at full speed": ("1.50", None),
        "coserve over samba, loads held to 530 MB/s": ("4", True),
        "over a naive server, fp32": ("6", True),
        "over a naive server, bf16": ("10", True),
        "planned against measured, the worst of all rows": ("5.00%", True),
    }
    left_out = {target.what: target for target in replace(proof, bf16=None).targets}["over a naive server, bf16"]
    assert (left_out.found, left_out.reached) == ("left out: this CPU emulates bf16", None)
    off = replace(proof, bf16=compared({"coserve": 20.0}, {"coserve": 17.8}))
    assert (off.targets[-1].found, off.targets[-1].reached) == ("11.00%", False)


def test_report_without_bf16_states_it_and_has_its_charts(proof, tmp_path):
    found = Findings(replace(proof, bf16=None), {}, Evaluation((), (), 750), False, 1, 200.0)
    assert "left out: this CPU emulates bf16" in write_report(tmp_path, found).read_text(encoding="utf-8")
    assert (tmp_path / "real-engine.png").is_file()


@pytest.mark.parametrize("is_full", [False, True])
def test_report_has_every_part_its_charts_and_its_omissions(proof, is_full, tmp_path):
    parts = {"The agent alone": Measured("a box", COLUMNS, (START,), START.targets)}
    found = Findings(proof, parts, Evaluation((), (), 1500 if is_full else 750), is_full, 1, 200.0)
    text = write_report(tmp_path, found).read_text(encoding="utf-8")
    assert "| the agent without experts holds | at most 400 MB | 380 MB | reached |" in text
    for part in ("200 s", "![", "# The agent alone", "Figure 13"):
        assert part in text
    assert ("their searches on smaller samples" in text) == (not is_full)
    assert ("searched for on 750 requests instead of 1,500" in text) == (not is_full)
    charts = {name for name in text.replace("(", ")").split(")") if name.endswith(".png")}
    assert "real-engine.png" in charts
    assert all((tmp_path / name).is_file() for name in charts)
