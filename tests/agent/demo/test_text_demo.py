"""`coserve demo --llm` on a tiny scale: trained, packed, served by the agent, asked, reported."""

import io
import json
from pathlib import Path

import pytest

from agent.config import read_line
from agent.demo import text_demo
from agent.demo.text_demo import MANUAL, ROUTE, SUMS, run_text_demo, show_text_report
from agent.demo.texts import models
from agent.demo.texts.questions import DemoQuestion, Questions
from agent.demo.training.learning import torch_threads
from tests.commands import coserve

SUBJECTS = {
    MANUAL: Questions(
        (DemoQuestion("oil?", "oil Q."), DemoQuestion("what oil?", "oil Q.")), (DemoQuestion("oil?", "oil Q."),)
    ),
    SUMS: Questions((DemoQuestion("1 + 1?", "2."), DemoQuestion("add 1 and 1", "2.")), (DemoQuestion("1 + 1?", "2."),)),
}
TINY = {"HIDDEN": 16, "HEADS": 2, "MOE_EXPERTS": (0, 2), "STEP_TOKENS": 60, "MISSPELT": 0.0, "STEPS": (80, 20)}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    shown = io.StringIO()
    folder = tmp_path_factory.mktemp("d") / "demo"
    with torch_threads(1), pytest.MonkeyPatch.context() as patch:
        for name, value in {**TINY, "LEARNING_RATES": (2e-2, 1e-2)}.items():
            patch.setattr(models, name, value)
        patch.setattr(text_demo, "manual_questions", lambda seed: SUBJECTS[MANUAL])
        patch.setattr(text_demo, "sum_questions", lambda seed: SUBJECTS[SUMS])
        report = run_text_demo(folder, 0, lambda stage, done, total: None, shown.write)
    return report, shown.getvalue()


def test_easy_questions_are_answered_right_by_the_routed_expert(demo):
    report, shown = demo
    scores = {"questions": 1, "right": 1, "misrouted": 0}
    assert report["subjects"] == [{"expert": MANUAL, **scores}, {"expert": SUMS, **scores}]
    assert f"> oil?\noil Q.   ({MANUAL})\n" in shown
    assert f"> 1 + 1?\n2.   ({SUMS})\n" in shown


def test_report_has_what_was_measured(demo, capsys):
    report, _ = demo
    assert report["expert_bytes"] < report["held_bytes"] < 2 * report["expert_bytes"]
    assert report["tokens"] == len("oil Q.") + len("2.")
    assert report["tokens_per_s"] > 0
    assert 0 < report["first_token_s"] <= report["answering_s"]
    show_text_report(report)
    assert "1 of 1 right" in capsys.readouterr().out
    assert json.loads(json.dumps(report)) == report


def test_demo_leaves_a_line_that_can_be_served(demo):
    config = read_line(Path(demo[0]["line_file"]), environment={})
    assert set(config.catalog.experts) == {MANUAL, SUMS}
    assert ROUTE in config.catalog.texts


def test_crops_are_refused_for_language_models(tmp_path):
    refused = coserve("demo", "--llm", "--data", tmp_path)
    assert refused.exit_code == 2
    assert "--data is for image experts" in refused.stderr
