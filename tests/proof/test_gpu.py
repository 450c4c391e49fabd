"""`make gpu`: steps go on after one that fails, the report has each, and no device is exit code 2."""

import re

import pytest

from proof import gpu
from proof.gpu import REPORT, ReportStep, run_steps, steps_on
from tests.commands import coserve


def said(digest):
    return ("echo", f'{{"outputs_sha256": "{digest}"}}')


def statuses(tmp_path, *steps):
    found = []
    for ran in run_steps("emulated", tmp_path, steps):
        found.append(ran.status)
        assert f"| {ran.title} | {ran.status} | " in (tmp_path / REPORT).read_text(), "written after each step"
    return found, (tmp_path / REPORT).read_text()


def test_failing_and_hanging_steps_do_not_stop_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "TRIAL_LIMIT_S", 3.0)
    lost = ReportStep("Loss", ("sh", "-c", "echo CUDA error; exit 3"))
    hangs = ReportStep("Hang", ("sh", "-c", "echo waits; exec tail -f /dev/null"))
    found, report = statuses(tmp_path, lost, hangs, ReportStep("Last", ("echo", "done")))
    assert found == ["exit code 3", "no end within 3 s", "ok"]
    assert "| Loss | exit code 3 | " in report
    assert re.search(r"## Hang\n\n```\n\$ .*\nwaits\n```", report)
    assert report.endswith("done\n```\n")
    assert report.startswith("# On emulated: ")
    assert "- emulated: multiplies fp32" in report


@pytest.mark.parametrize(("second", "status"), [("ab", "ok"), ("cd", "other outputs than in the step before")])
def test_outputs_of_device_and_cpu_are_compared(tmp_path, second, status):
    found, _ = statuses(tmp_path, ReportStep("Device", said("ab")), ReportStep("CPU", said(second), repeats_last=True))
    assert found == ["ok", status]


def test_steps_of_a_gpu_run_on_it_and_compare_with_the_cpu(tmp_path):
    steps = list(steps_on("cuda", tmp_path))
    assert [step.title for step in steps if step.repeats_last] == ["Verdicts of the CPU", "Texts of the CPU"]
    played = [step for step in steps if step.title.startswith("Executors")]
    assert [step.command[-1] for step in played] == [f"cuda={count}" for count in range(1, 7)]
    assert all(step.command[:2] == ("env", "COSERVE__DEVICE=cuda") for step in played)


def test_without_a_device_one_line_says_so(tmp_path):
    done = coserve("bench", "gpu", "--device", "mps", "--out", tmp_path / "report", check=2)
    assert done.stderr.splitlines() == ["no device: torch does not run on mps here - DEVICE=emulated tries the steps"]
    assert not (tmp_path / "report").exists()
