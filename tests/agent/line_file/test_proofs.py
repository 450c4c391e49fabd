"""Proofs of a line's experts: what they are bound to, and how they are kept."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from agent.device_profile.identity import verdict_sha256
from agent.line_file.proofs import FILE_NAME, KEPT, Proof, kept_proofs, proof_identity, proven, save_proof
from experts.expert import Expert, InputSpec, Precision
from experts.graph import ExpertGraph, RouteStep

EXPERT = Expert(
    "cls/a", "resnet18", Path("a.safetensors"), ("ok", "bad"), InputSpec(64, 64), check=Path("checks/cls-a")
)
SHA = "ab" * 32
PACKED = Path("/nowhere")


def identity(expert=EXPERT, sha256=SHA, form=Precision.FP32):
    return proof_identity(expert, sha256, form, PACKED)


def proof(of=None, expert="cls/a", images=20, agreed=20, **more):
    counts = {"images": images, "passing": 10, "others": images - 10, "agreed": agreed, "difference": 0.001}
    return Proof(
        expert=expert, form="fp32", identity=of or identity(), at="2026-11-29T06:00:00Z", by="ann", **counts, **more
    )


def reasons(*proofs, expert=EXPERT, forms=((Precision.FP32, SHA),)):
    lack = proven([expert], {expert.id: forms}, proofs, PACKED).lacks.get(expert.id)
    return None if lack is None else lack.why


@pytest.mark.parametrize(
    "changed",
    [
        {"labels": ("bad", "ok")},
        {"input": InputSpec(64, 64, interpolation="bicubic")},
        {"confidence": 0.5},
        {"threshold": 0.5},
        {"stem": "3x3"},
    ],
)
def test_changed_entry_makes_an_expert_unproven(changed):
    assert reasons(proof()) is None
    assert "proven with another entry" in reasons(proof(), expert=replace(EXPERT, **changed))


@pytest.mark.parametrize(("images", "is_enough"), [(20, True), (10, False)])
def test_nothing_found_expert_is_proven_with_and_without_defects(images, is_enough):
    expert = replace(EXPERT, nothing_found="pass")
    given = proof(identity(expert), images=images, agreed=images)
    lack = "it passes what has no box, and was not compared on images with and without"
    assert reasons(given, expert=expert) == (None if is_enough else lack)
    assert reasons(given.model_copy(update={"why": "by eye"}), expert=expert) == (None if is_enough else lack)


def test_changed_weights_or_form_make_an_expert_unproven():
    assert reasons(proof(), forms=((Precision.FP32, "cd" * 32),))
    assert reasons(proof(), forms=((Precision.FP32, SHA), (Precision.BF16, SHA)))
    assert reasons(proof(), proof(identity(form=Precision.BF16)), forms=((Precision.BF16, SHA),)) is None


def test_upgraded_library_makes_an_expert_unproven(monkeypatch):
    before = proof()
    monkeypatch.setattr("agent.line_file.proofs._versions", lambda: ("2.0",))
    assert "other libraries" in reasons(before)


def test_promoted_version_keeps_its_proof():
    moved = replace(EXPERT, id="cls/b", weights=Path("b.safetensors"), pin=True, check=None)
    assert reasons(proof(), expert=moved) is None


def test_disagreeing_comparison_proves_nothing_unless_a_person_trusts_it():
    assert reasons(proof(agreed=17)) == "17 of 20 known answers are the same in fp32"
    assert reasons(proof(images=0, agreed=0))
    assert reasons(proof(blind="it finds nothing")).endswith("are the same in fp32, but it finds nothing")
    assert reasons(proof(agreed=17, why="the labels of 3 images are wrong")) is None


def test_expert_without_known_answers_differs_from_one_not_yet_compared():
    assert reasons() == "not compared with its known answers yet"
    assert reasons(expert=replace(EXPERT, check=None)) == "its trainer's answers are not known"


def test_proofs_of_other_experts_stay_and_one_of_the_same_identity_is_replaced(tmp_path):
    state = tmp_path / "state"
    first, other, again = proof(agreed=3), proof("other", "cls/b"), proof()
    for each in (first, other, again):
        save_proof(state, each)
    assert sorted(kept_proofs(state), key=lambda each: each.expert) == [again, other]
    for number in range(KEPT + 3):
        save_proof(state, proof(f"form {number}"))
    assert len(kept_proofs(state)) == 1 + KEPT
    assert os.listdir(state) == [FILE_NAME]


@pytest.mark.parametrize("content", ["[{", "[1]", '[{"expert": "cls/a"}]', ""])
def test_damaged_proofs_file_proves_nothing_and_is_rewritten(tmp_path, content, caplog):
    (tmp_path / FILE_NAME).write_text(content)
    assert kept_proofs(tmp_path) == ()
    assert "proofs_not_read" in caplog.text
    save_proof(tmp_path, proof())
    assert kept_proofs(tmp_path) == (proof(),)


def test_proof_of_an_earlier_profile_holds_for_an_unchanged_entry():
    graph = ExpertGraph(["cls/a"], {"r": (RouteStep("cls/a", frozenset({"ok"})),)})
    assert verdict_sha256(graph, EXPERT) == "40cbef9ee6abe67faa2e19e188126a811315035720b2a9e20d747478ad677fa5"
