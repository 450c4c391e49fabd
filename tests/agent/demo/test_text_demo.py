"""`coserve demo --llm` on a tiny scale: trained, packed, served by the agent, asked, told."""

import io
import json

import pytest
from typer.testing import CliRunner

from agent.cli.app import app
from agent.config import read_line
from agent.demo.text_demo import MANUAL, ROUTE, SUMS, run_text_demo, show_text_report
from agent.demo.texts.questions import DemoQuestion, Questions
from agent.demo.texts.training import TextPlan
from agent.demo.training.learning import Pace, torch_threads
from experts.errors import ConfigError

SUBJECTS = {
    MANUAL: Questions(
        (DemoQuestion("oil?", "oil Q."), DemoQuestion("what oil?", "oil Q.")), (DemoQuestion("oil?", "oil Q."),)
    ),
    SUMS: Questions((DemoQuestion("1 + 1?", "2."), DemoQuestion("add 1 and 1", "2.")), (DemoQuestion("1 + 1?", "2."),)),
}
PLAN = TextPlan(
    hidden=16, heads=2, moe_experts=(0, 2), step_tokens=60, misspelt=0.0, joint=Pace(80, 2e-2), own=Pace(20, 1e-2)
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    shown = io.StringIO()
    folder = tmp_path_factory.mktemp("d") / "demo"
    with torch_threads(1):
        report = run_text_demo(folder, 0, lambda stage, done, total: None, shown.write, PLAN, SUBJECTS)
    return report, shown.getvalue()


def test_what_is_easy_is_answered_right_by_whom_the_rule_names(demo):
    report, _ = demo
    assert [(one.expert, one.questions, one.right, one.misrouted) for one in report.subjects] == [
        (MANUAL, 1, 1, 0),
        (SUMS, 1, 1, 0),
    ]


def test_questions_and_answers_are_shown_as_they_come(demo):
    _, shown = demo
    assert f"> oil?\noil Q.   ({MANUAL})\n" in shown
    assert f"> 1 + 1?\n2.   ({SUMS})\n" in shown


def test_the_report_tells_what_was_measured(demo, capsys):
    report, _ = demo
    assert report.expert_bytes < report.held_bytes < 2 * report.expert_bytes
    assert report.tokens == len("oil Q.") + len("2.")
    assert report.tokens_per_s > 0
    assert 0 < report.first_token_s <= report.answering_s
    show_text_report(report)
    told = capsys.readouterr().out
    assert "1 of 1 right" in told
    assert json.loads(json.dumps(report.as_json()))["subjects"][0]["expert"] == MANUAL


def test_what_is_left_behind_is_a_line_that_can_be_served(demo):
    report, _ = demo
    config = read_line(report.line_file, environment={})
    assert set(config.catalog.experts) == {MANUAL, SUMS}
    assert ROUTE in config.catalog.texts


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(ConfigError, match="was not made by a demo"):
        run_text_demo(tmp_path / "mine", 0, lambda stage, done, total: None, lambda text: None)


def test_crops_are_not_for_language_models(tmp_path):
    refused = CliRunner().invoke(app, ["demo", "--llm", "--data", str(tmp_path)])
    assert refused.exit_code == 2
    assert "leave --data" in refused.stderr
