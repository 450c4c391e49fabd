"""What another form and more memory would gain: by the constants measured there, with what speaks against it."""

import random
from dataclasses import replace

import pytest

from agent.core.performance import Footprint, SharedTensors
from agent.deployment.deployment import Overrides, planned, profiled_box
from agent.deployment.performance_matrix import in_form
from agent.device_profile.records import Agreement, ExpertForm, ImageDecoding
from experts.expert import Precision
from profiler.planning.advice import LEAST
from profiler.planning.plan import LinePlan
from profiler.simulation.forecast import forecast, scenario_of
from profiler.workload.traces import TracedArrival
from tests.profiler.lines import PackedFakes, kind_of

EXPERTS, PLACES = 6, 2
BF16, FP32 = Precision.BF16, Precision.FP32


class TwoForms(PackedFakes):
    """Six packed fakes in fp32, room for two; measured in bf16, too: half the bytes, half the time."""

    def __init__(self, folder):
        super().__init__(folder, EXPERTS, places=PLACES)
        kinds = (kind_of(self.kind), kind_of(self.kind, BF16, 0.5))
        self.profile = replace(self.profile, kinds=kinds, precisions={(self.kind, "cpu"): "fp32"})

    def agreed(self, **more):
        found = Agreement("cls/f0", self.kind, "cpu", "bf16", 8, 0, 0.001, 0.02, "sha", 8)
        return replace(self.profile, agreements=(replace(found, **more),))

    def setup(self, form=None):
        return planned(self.config, profiled_box(self.profile), self.profile, Overrides(form=form))

    def advice(self, profile=None, requests=80):
        return LinePlan(self.config, profile or self.profile, trace(requests)).advice()


def trace(requests, every_s=0.002):
    rng = random.Random(5)
    return [TracedArrival(every_s * number, f"c{rng.randrange(EXPERTS)}") for number in range(requests)]


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    return TwoForms(tmp_path_factory.mktemp("line"))


def test_shared_tensors_are_not_shared_between_forms(line):
    setup = line.setup()
    row = replace(setup.matrix.experts["cpu"]["cls/f0"], footprint=Footprint(600, (SharedTensors("backbone", 400),)))
    shared = replace(setup.matrix, experts={"cpu": {"cls/f0": row}})
    found = in_form(shared, line.profile, BF16, {"cls/f0": line.kind}, setup.executors)
    assert found.experts["cpu"]["cls/f0"].footprint == Footprint(300, (SharedTensors("backbone@bf16", 200),))


@pytest.mark.parametrize(
    ("more", "remark"),
    [
        ({}, ""),
        ({"images": 0}, "is not proven to agree with fp32"),
        ({"labels_differ": 1}, "does not agree with fp32 on the samples of 1 of its experts"),
    ],
    ids=["agrees", "no images", "differs"],
)
def test_gain_of_a_form_is_the_simulated_one_with_its_remark(line, more, remark):
    advice = line.advice(line.agreed(**more))
    scenario = scenario_of(line.config.catalog.graph, line.profile, trace(80))
    form = {gain.change: gain for gain in advice.gains}["bf16 instead of fp32"]
    assert form.images_per_s == forecast(scenario, line.setup(BF16)).images_per_s > LEAST * advice.images_per_s
    assert (form.form, form.budget_bytes) == ("bf16", None)
    assert form.remark == (f"{line.kind} {remark}" if remark else "")


def test_plan_states_the_proof_of_a_chosen_form(line):
    why = "in the same numbers, proven by outputs (largest difference 3.3e-06)"
    chosen = ExpertForm("cls/f0", "cpu", line.kind, "bf16", why, "sha")
    advice = line.advice(replace(line.profile, forms={("cls/f0", "cpu"): chosen}))
    assert f"1 expert runs in bf16: {why}." in advice.sentences


def test_form_that_is_no_faster_is_not_listed(line):
    slow = kind_of(line.kind, BF16, K_s=0.05)
    advice = line.advice(replace(line.profile, kinds=(line.profile.kinds[0], slow)))
    assert [gain.form for gain in advice.gains] == [None]
    assert advice.sentences[-1] == "No other form that was measured would gain: bf16."


def test_gain_is_bounded_by_what_the_cores_can_decode(line):
    """bf16 leaves the one core more time for decoding, and gains; that decoding is the limit then is told with it."""
    plain = line.advice()
    seconds = 1.0 / plain.images_per_s
    decoding = ImageDecoding("cls/f0", 1, 1.0, seconds, seconds, 0, 0, 0.0, 0.02, "sha")
    slow = line.advice(replace(line.profile, decodings=(decoding,)))
    assert slow.images_per_s <= slow.decoding.images_per_s < plain.images_per_s
    forms = [gain for gain in slow.gains if gain.form]
    assert forms
    for gain in slow.gains:
        assert slow.images_per_s < gain.images_per_s < plain.images_per_s
        assert gain.remark.endswith("decoding is the limit then") == (gain.form is not None)
    factor = forms[0].images_per_s / slow.images_per_s
    assert any(f"{factor:.2f} times as many" in sentence for sentence in slow.sentences)
