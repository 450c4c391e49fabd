"""Agents of a line with `precision: onednn-int8`: whoever is not calibrated runs in fp32, and it is told."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
import yaml

from agent.config import read_line
from agent.deployment.build import AS_SERVED, build_agent, groundwork_of
from agent.deployment.line_change import plan_change
from agent.deployment.profile_in_use import precision_of
from experts.backends import observed_ranges
from experts.backends.classifier import write_random_weights
from experts.backends.onednn import operators
from experts.calibrations import CalibrationFolder
from experts.expert import Precision, Verdict
from experts.packed.calibrated import calibration_of
from tests.forms import needs

FORM = Precision.ONEDNN_INT8
PATIENCE_S = 60.0
SIDE = 64

takes_eight_bits = needs(FORM)


class Line:
    """Squeezenets cls/a and cls/b with a route each, of which those named are calibrated."""

    def __init__(self, folder, *calibrated):
        self.folder = folder
        names = ("a", "b")
        expert = {"architecture": "squeezenet1_1", "labels": ["ok", "bad"], "input": {"size": [SIDE, SIDE]}}
        document = {
            "line": "test",
            "state": "./state",
            "experts": {f"cls/{name}": expert | {"weights": f"{name}.safetensors"} for name in names},
            "routes": {name: [{"expert": f"cls/{name}", "pass": ["ok", "bad"]}] for name in names},
            "memory": {"host": "256MiB"},
            "executors": {"cpu": 1},
            "device": "cpu",
            "precision": str(FORM),
        }
        (folder / "line.yaml").write_text(yaml.safe_dump(document))
        for seed, name in enumerate(names):
            self.write(name, seed)
        for name in calibrated:
            self.calibrate(name)

    @property
    def config(self):
        return read_line(self.folder / "line.yaml", {})

    def write(self, name, seed):
        write_random_weights(self.folder / f"{name}.safetensors", "squeezenet1_1", 2, seed=seed, image_size=SIDE)

    def calibrate(self, name):
        config = self.config
        expert = config.catalog.experts[f"cls/{name}"]
        images = torch.randn((4, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(0))
        found = calibration_of(expert, "0" * 64, 4, ("bad", "ok"), {FORM: observed_ranges(expert, FORM, [images])})
        CalibrationFolder.beside(config.packed_folder).write(expert.id, found)

    def forms(self):
        """What each expert runs in, by what lies there now."""
        return groundwork_of(self.config, self.config.packed_folder, AS_SERVED).precisions["cpu"]


class Served:
    """A running agent of a line, and what became of what it was asked."""

    def __init__(self, line):
        self._line = line
        self.outcomes = {}
        self.agent = build_agent(line.config, self.outcomes.__setitem__, lambda *_: None)
        self.agent.start()

    def judged(self):
        """What it says of an image of each component."""
        image = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        numbers = [self.agent.loop.submit(image, component=name) for name in ("a", "b")]
        assert self.agent.loop.wait_until_idle(PATIENCE_S)
        return [self.outcomes[number] for number in numbers]

    def reload(self):
        change = plan_change(self.agent, self._line.config, lambda *_: None)
        self.agent.loop.change_line(change.event, change.copies)
        self.agent = change.agent
        return change

    def forms(self):
        """What the Engine runs each expert in now, by the line's names."""
        rows = self.agent.setup.matrix.experts["cpu"]
        copies = {name: self.agent.copies[rows[self.agent.expert(name)].copy] for name in ("cls/a", "cls/b")}
        return {name: copy.packed.precision for name, copy in copies.items()}


@contextmanager
def serving(line):
    served = Served(line)
    try:
        yield served
    finally:
        served.agent.stop()


def told(caplog, word="not_calibrated"):
    return [message for message in caplog.messages if message.startswith(word)]


@takes_eight_bits
def test_an_expert_with_other_weights_after_a_reload_runs_in_fp32_which_is_told(tmp_path, caplog):
    """Until it is calibrated anew: then the next reload has it in eight bits again."""
    line = Line(tmp_path, "a", "b")
    with serving(line) as served:
        assert served.forms() == {"cls/a": FORM, "cls/b": FORM}
        before = served.judged()
        assert told(caplog) == []
        line.write("b", seed=5)
        change = served.reload()
        assert (change.replaced, dict(change.quarantined)) == (("cls/b",), {})
        assert served.forms() == {"cls/a": FORM, "cls/b": Precision.FP32}
        after = served.judged()
        assert (after[0].label, after[0].score) == (before[0].label, before[0].score)
        assert after[1].score != before[1].score
        (reason,) = told(caplog)
        assert reason.startswith(f"not_calibrated expert=cls/b precision={FORM} runs_as=fp32 reason=its calibration is")
        line.calibrate("b")
        assert served.reload().replaced == ("cls/b",)
        assert served.forms() == {"cls/a": FORM, "cls/b": FORM}
        again = served.judged()
        assert all(outcome.verdict is Verdict.OK for outcome in again)
        assert again[1].score == pytest.approx(after[1].score, abs=0.1)
    assert len(told(caplog)) == 1


@takes_eight_bits
def test_a_calibration_that_cannot_be_read_is_none(tmp_path, caplog):
    line = Line(tmp_path, "a", "b")
    CalibrationFolder.beside(line.config.packed_folder).path("cls/a").write_text("{")
    assert line.forms() == {"cls/a": Precision.FP32, "cls/b": FORM}
    assert len(told(caplog)) == 1


def test_on_a_box_that_lacks_the_operators_all_run_plain_and_that_is_told_once(tmp_path, monkeypatch, caplog):
    line = Line(tmp_path)
    monkeypatch.setattr(operators, "why_absent", lambda dtype: "sums are off")
    with serving(line) as served:
        assert served.forms() == dict.fromkeys(("cls/a", "cls/b"), Precision.FP32)
        assert all(outcome.verdict is Verdict.OK for outcome in served.judged())
    advice = "advice=write `precision: auto` or fp32"
    assert told(caplog, "form_absent") == [f"form_absent precision={FORM} runs_as=fp32 reason=sums are off {advice}"]
    assert told(caplog) == []


def test_on_other_processors_the_same_experts_run_in_fp32(tmp_path):
    config = Line(tmp_path).config
    assert precision_of(config, "cls/a", "cpu", None, None) is FORM
    assert precision_of(config, "cls/a", "cuda", None, None) is Precision.FP32
