"""Agents of a line with `precision: onednn-int8`: an expert without a calibration runs in fp32, with a warning."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from agent.deployment.build import AS_SERVED, deployment_of
from agent.deployment.line_change import plan_change
from agent.deployment.profile_in_use import precision_of
from experts.backends import observed_ranges
from experts.backends.onednn import operators
from experts.backends.vision.classifier import write_random_weights
from experts.calibrations import CalibrationFolder
from experts.expert import Precision, Verdict
from experts.packed.calibrated import calibration_of
from tests.agent.line_files import LineFile, expert, route
from tests.forms import needs

FORM = Precision.ONEDNN_INT8
PATIENCE_S = 60.0
SIDE = 64

takes_eight_bits = needs(FORM)


class Line(LineFile):
    """Squeezenets cls/a and cls/b with a route each; the named ones are calibrated."""

    def __init__(self, folder, *calibrated):
        super().__init__(
            folder,
            experts={f"cls/{name}": expert(f"{name}.safetensors", "squeezenet1_1", SIDE) for name in "ab"},
            routes={name: route(f"cls/{name}", passing=("ok", "bad")) for name in "ab"},
            memory={"host": "256MiB"},
            executors={"cpu": 1},
            device="cpu",
            precision=str(FORM),
        )
        for seed, name in enumerate("ab"):
            self.write_weights(name, seed)
        for name in calibrated:
            self.calibrate(name)

    def write_weights(self, name, seed):
        write_random_weights(self.folder / f"{name}.safetensors", "squeezenet1_1", 2, seed=seed, image_size=SIDE)

    def calibrate(self, name):
        config = self.config
        served = config.catalog.experts[f"cls/{name}"]
        images = torch.randn((4, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(0))
        found = calibration_of(served, "0" * 64, 4, ("bad", "ok"), lambda: observed_ranges(served, FORM, [images]))
        CalibrationFolder.beside(config.packed_folder).write(served.id, found)

    def forms(self):
        """The form of each expert by the packed folder."""
        return deployment_of(self.config, self.config.packed_folder, AS_SERVED).precisions["cpu"]


class Served:
    """A running agent of a line, with its outcomes."""

    def __init__(self, line, agent, outcomes):
        self._line, self.agent, self.outcomes = line, agent, outcomes

    def judged(self):
        """Outcomes of an image of each component."""
        image = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        numbers = [self.agent.loop.submit(image, component=name) for name in "ab"]
        assert self.agent.loop.wait_until_idle(PATIENCE_S)
        return [self.outcomes[number] for number in numbers]

    def reload(self):
        change = plan_change(self.agent, self._line.config, lambda *_: None)
        self.agent.loop.change_line(change.event, change.copies)
        self.agent = change.agent
        return change

    def forms(self):
        """The form of each expert in the Engine, by the line's names."""
        rows = self.agent.setup.matrix.experts["cpu"]
        copies = {name: self.agent.copies[rows[self.agent.expert(name)].copy] for name in ("cls/a", "cls/b")}
        return {name: copy.packed.precision for name, copy in copies.items()}


@contextmanager
def serving(line):
    with line.built(starts=True) as (agent, outcomes, _):
        yield Served(line, agent, outcomes)


def logged(caplog, word="not_calibrated"):
    return [message for message in caplog.messages if message.startswith(word)]


@takes_eight_bits
def test_reloaded_expert_with_new_weights_runs_in_fp32_and_is_logged(tmp_path, caplog):
    line = Line(tmp_path, "a", "b")
    with serving(line) as served:
        assert served.forms() == {"cls/a": FORM, "cls/b": FORM}
        before = served.judged()
        assert logged(caplog) == []
        line.write_weights("b", seed=5)
        change = served.reload()
        assert (change.replaced, dict(change.quarantined)) == (("cls/b",), {})
        assert served.forms() == {"cls/a": FORM, "cls/b": Precision.FP32}
        after = served.judged()
        assert (after[0].label, after[0].score) == (before[0].label, before[0].score)
        assert after[1].score != before[1].score
        (reason,) = logged(caplog)
        assert reason.startswith(f"not_calibrated expert=cls/b precision={FORM} runs_as=fp32 reason=its calibration is")
        line.calibrate("b")
        assert served.reload().replaced == ("cls/b",)
        assert served.forms() == {"cls/a": FORM, "cls/b": FORM}
        again = served.judged()
        assert all(outcome.verdict is Verdict.OK for outcome in again)
        assert again[1].score == pytest.approx(after[1].score, abs=0.1)
    assert len(logged(caplog)) == 1


@takes_eight_bits
def test_unreadable_calibration_makes_its_expert_run_in_fp32(tmp_path, caplog):
    line = Line(tmp_path, "a", "b")
    CalibrationFolder.beside(line.config.packed_folder).path("cls/a").write_text("{")
    assert line.forms() == {"cls/a": Precision.FP32, "cls/b": FORM}
    assert len(logged(caplog)) == 1


def test_missing_operators_make_all_experts_run_in_fp32_logged_once(tmp_path, monkeypatch, caplog):
    line = Line(tmp_path)
    monkeypatch.setattr(operators, "why_absent", lambda dtype: "sums are off")
    with serving(line) as served:
        assert served.forms() == dict.fromkeys(("cls/a", "cls/b"), Precision.FP32)
        assert all(outcome.verdict is Verdict.OK for outcome in served.judged())
    advice = "advice=write `precision: auto` or fp32"
    assert logged(caplog, "form_absent") == [f"form_absent precision={FORM} runs_as=fp32 reason=sums are off {advice}"]
    assert logged(caplog) == []


def test_processors_without_the_form_run_its_experts_in_fp32(tmp_path):
    config = Line(tmp_path).config
    assert precision_of(config, "cls/a", "cpu", None, None) is FORM
    assert precision_of(config, "cls/a", "cuda", None, None) is Precision.FP32
