"""The golden set of a running line: known answers, compared again by what serves while the line is idle."""

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from agent.deployment.packed_copies import keep_proof
from agent.line_file.proofs import kept_proofs
from agent.service.inspections import golden_source
from experts.backends.fake import FakeSkeleton
from experts.expert import Prediction, Verdict
from experts.packed.sources import sha256_of
from experts.proving.answers import keep_answers, read_answers
from experts.proving.comparing import compare
from tests.agent.service.fake_line import asked, picture
from tests.lines import order as order_of
from tests.pictures import saved
from tests.waiting import until

OK, UNKNOWN = Verdict.OK, Verdict.UNKNOWN
LABELS = {"cls/f0": "ok", "cls/f1": "bad"}


class Wall:
    def __init__(self):
        self.now = datetime.now(UTC)

    def __call__(self):
        return self.now


@pytest.fixture
def wall():
    return Wall()


@pytest.fixture
def broken(monkeypatch):
    """While it is set, what is served answers with another label than its weights and input give."""
    is_broken, infer = threading.Event(), FakeSkeleton.infer

    def answers(self, expert, batch):
        found = infer(self, expert, batch)
        return tuple(Prediction("bad", 0.9) for _ in found) if is_broken.is_set() else found

    monkeypatch.setattr(FakeSkeleton, "infer", answers)
    return is_broken


@pytest.fixture
def golden(line, tmp_path):
    """Both experts are proven by three images each; every eight hours that is tried again."""
    for number, (name, label) in enumerate(LABELS.items()):
        folder = tmp_path / "data" / name / label
        for image in range(3):
            saved(folder / f"{image}.png", (60 * image, 200, 30))
        keep_answers([replace(each, score=0.9) for each in read_answers(folder.parent)], tmp_path / "checks" / name)
        line.fake(number, label=label, weight_bytes=1_000_000 + number)
        line.document["experts"][name]["check"] = f"checks/{name}"
    line.document["routes"]["c1"][0]["pass"] = ["bad"]
    line.document["golden"] = {"every": "8h"}
    for name in LABELS:
        prove(line, name)
    return line


def prove(line, name):
    expert = line.config.catalog.experts[name]
    known = read_answers(expert.check)
    comparison = compare(expert, known, [Prediction(each.label, 0.9) for each in known])
    keep_proof(line.config, name, ("fp32", sha256_of(expert)), comparison, ("ann", ""))


def alarms(service):
    return {each.name: each.message for each in service._alarms() if each.name.startswith("golden")}


def proofs(line):
    return {each.expert: each for each in kept_proofs(line.folder / "state")}


def judged(service, component="c0"):
    ((part,),) = asked(service, order_of(picture(), component=component))
    return part


def test_proven_experts_are_compared_with_known_answers_once_per_interval(golden, wall):
    before = proofs(golden)
    with golden.served(wall=wall) as service:
        assert judged(service).verdict is OK
        wall.now += timedelta(hours=9)
        until(lambda: {each.by for each in proofs(golden).values()} == {"golden"})
        assert alarms(service) == {}
    after = proofs(golden)
    assert {name: (each.images, each.agreed, each.holds) for name, each in after.items()} == dict.fromkeys(
        LABELS, (3, 3, True)
    )
    assert {each.at for each in after.values()} == {wall.now}
    assert {name: each.identity for name, each in after.items()} == {
        name: each.identity for name, each in before.items()
    }
    assert len(golden.rows) == 1


@pytest.mark.parametrize("on_difference", ["alarm", "stop"])
def test_differing_golden_answer_raises_an_alarm_and_withholds_ok_if_wanted(golden, wall, broken, on_difference):
    golden.document["golden"]["on_difference"] = on_difference
    with golden.served(wall=wall) as service:
        broken.set()
        wall.now += timedelta(hours=9)
        until(lambda: "golden/cls/f0" in alarms(service))
        broken.clear()
        message = alarms(service)["golden/cls/f0"]
        assert "expert cls/f0 answers otherwise than proven: 0 of 3 known answers are the same in fp32" in message
        until(lambda: proofs(golden)["cls/f1"].by == "golden")
        part = judged(service)
        assert (part.verdict, part.label) == (OK if on_difference == "alarm" else UNKNOWN, "ok")
        assert on_difference == "alarm" or "run `coserve experts verify" in part.reason
        assert judged(service, "c1").verdict is OK
    with golden.served(wall=wall) as service:  # also after a restart, until it is verified
        assert judged(service).verdict is (OK if on_difference == "alarm" else UNKNOWN)
        prove(golden, "cls/f0")
        service.inspector.trust.step()
        assert (judged(service).verdict, alarms(service)) == (OK, {})


def test_known_answers_that_cannot_be_read_are_an_alarm_that_names_the_file(golden, wall):
    (golden.folder / "checks" / "cls" / "f0" / "answers.json").write_text("[{")
    with golden.served(wall=wall) as service:
        wall.now += timedelta(hours=9)
        until(lambda: "golden/cls/f0" in alarms(service))
        message = alarms(service)["golden/cls/f0"]
    assert "expert cls/f0 was not compared with its known answers" in message
    assert f"{golden.folder / 'checks' / 'cls' / 'f0' / 'answers.json'}:1" in message


def test_golden_comparison_without_idle_memory_raises_an_alarm_after_an_interval(golden, wall):
    for number, (name, label) in enumerate(LABELS.items()):
        golden.fake(number, label=label, weight_bytes=7_000_000 + number)  # there is room for one of them
        prove(golden, name)
    with golden.served(wall=wall) as service:
        assert judged(service).verdict is OK
        wall.now += timedelta(hours=17)
        until(lambda: proofs(golden)["cls/f0"].by == "golden")
        until(lambda: "golden" in alarms(service))
        found = "known answers were not compared in the last interval: cls/f1 (1 in all): the line had no idle time"
        until(lambda: alarms(service)["golden"].startswith(found))
        assert judged(service, "c1").verdict is OK  # it is in memory now
        until(lambda: not alarms(service))


@pytest.mark.parametrize(
    ("every", "began", "earlier"),
    [("8h", "08:30", "00:30"), ("shift", "14:00", "06:00"), ("day", "00:00", "00:00")],
)
def test_golden_interval_begins_with_a_shift_day_or_hours(golden, every, began, earlier):
    golden.document["golden"]["every"] = every
    now = datetime.now().astimezone().replace(hour=16, minute=30, second=0, microsecond=0)
    found = golden_source._periods(golden.config, golden.config.golden, now)
    assert [each.astimezone().strftime("%H:%M") for each in found] == [began, earlier]
