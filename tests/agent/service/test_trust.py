"""Experts of a served line without proof: said wherever their verdicts are shown, and, if wanted, never trusted."""

import pytest

from agent.deployment.packed_copies import keep_proof
from experts.expert import Prediction, Verdict
from experts.packed.sources import sha256_of
from experts.proving.answers import KnownAnswer
from experts.proving.comparing import compare
from tests.agent.service.fake_line import asked, picture
from tests.agent.service.test_line_metrics import page
from tests.lines import order as order_of

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN
GREEN, RED = picture(), picture((200, 10, 30))


def judged(service, component="c0", image=GREEN):
    ((part,),) = asked(service, order_of(image, component=component))
    return part


def prove(line, name="cls/f0", agreed=True, why=""):
    expert = line.config.catalog.experts[name]
    known = [KnownAnswer(line.folder, label, score=0.9) for label in ("ok", "bad" if agreed else "ok")]
    predictions = [Prediction(label, 0.9) for label in ("ok", "bad")]
    comparison = compare(expert, known, predictions)
    return keep_proof(line.config, name, ("fp32", sha256_of(expert)), comparison, ("ann", why))


@pytest.fixture
def line(line):
    line.fake(1, weight_bytes=900_000)  # equal entries and weights are proven together
    return line


@pytest.fixture
def strict(line):
    line.document["require_proof"] = True
    return line


def test_verdict_of_an_unproven_expert_is_unknown_with_the_remedy(strict):
    prove(strict, "cls/f1")
    with strict.served() as service:
        part = judged(service)
        assert (part.verdict, part.label, judged(service, "c1").verdict) == (UNKNOWN, "ok", OK)
    remedy = f"run `coserve experts verify {strict.folder / 'line.yaml'} cls/f0 --check DATA`"
    assert part.reason == f"cls/f0 is unproven: its trainer's answers are not known - {remedy}"


def test_proof_written_beside_the_agent_counts_without_a_restart(strict, caplog):
    with strict.served() as service:
        assert (
            "experts_unproven count=2 cls/f0, cls/f1: its trainer's answers are not known - prove them" in caplog.text
        )
        assert judged(service).verdict is UNKNOWN
        prove(strict)
        service.inspector.trust.step()
        assert judged(service).verdict is OK
        prove(strict, agreed=False)
        service.inspector.trust.step()
        assert judged(service).reason.startswith("cls/f0 is unproven: 1 of 2 known answers are the same in fp32")


def test_reload_with_other_weights_is_judged_by_its_own_proofs(strict):
    for name in ("cls/f0", "cls/f1"):
        prove(strict, name)
    with strict.served() as service:
        assert judged(service).verdict is OK
        strict.fake(0, weight_bytes=800_000)
        strict.write()
        assert service.desk.reload().replaced == ("cls/f0",)
        assert [judged(service, component).verdict for component in ("c0", "c1")] == [UNKNOWN, OK]
        strict.document["require_proof"] = False
        strict.write()
        assert service.desk.reload().needs_restart == ()
        assert judged(service).verdict is OK


def test_unproven_expert_is_shown_by_status_metrics_and_rows(line):
    line.document["api"] = {"http": "127.0.0.1:0"}
    prove(line, "cls/f1")
    with line.served() as service:
        assert [judged(service, component).verdict for component in ("c0", "c1")] == [OK, OK]
        assert service.desk.status().unproven == {"cls/f0": "its trainer's answers are not known"}
        metrics = page(service, "/metrics")[1]
        assert 'coserve_expert_proven{expert="cls/f0"} 0.0' in metrics
        assert 'coserve_expert_proven{expert="cls/f1"} 1.0' in metrics
    steps = {row.experts: row.steps[0].unproven for row in line.rows}
    assert steps == {("cls/f0",): True, ("cls/f1",): False}


def test_expert_trusted_by_a_person_is_proven_with_the_person_and_reason(strict):
    kept = prove(strict, agreed=False, why="one label of the trainer is wrong")
    with strict.served() as service:
        assert judged(service).verdict is OK
    assert kept.text == "1 of 2 known answers are the same in fp32, trusted by ann: one label of the trainer is wrong"
