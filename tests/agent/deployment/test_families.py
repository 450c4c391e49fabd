"""Families: who is of one with whom, by what copies hold in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.deployment.families import families
from agent.runtime.expert_copy import ExpertCopy
from experts.expert import Expert, InputSpec
from experts.packed.weights import PackedExpert, Segment


def copy_of(name, *shared, program="p", precision="bf16", takes_texts=True):
    """``shared``: (name, size) of the segments that it holds beside its own."""
    segments = tuple(Segment(sha256, size_bytes, ()) for sha256, size_bytes in shared)
    architecture, size = ("llm", None) if takes_texts else ("resnet18", InputSpec(8, 8))
    expert = Expert(name, architecture, Path("w"), (), size)
    packed = PackedExpert(name, architecture, precision, "", "", Segment(name, 1, ()), segments, program)
    return ExpertCopy(f"{name}@{precision}", expert, packed)


TRUNK, TAIL = ("trunk", 100), ("tail", 10)


def grouped(*copies):
    """The names of each family's copies."""
    found = families(copies)
    return {frozenset(name.partition("@")[0] for name in found if found[name] == each) for each in found.values()}


def test_those_who_hold_a_segment_together_are_of_one():
    assert grouped(copy_of("a", TRUNK), copy_of("b", TRUNK), copy_of("c", TAIL)) == {frozenset("ab")}


def test_a_segment_of_one_alone_makes_none():
    assert families([copy_of("a", TRUNK), copy_of("b", TAIL), copy_of("c")]) == {}


@pytest.mark.parametrize("other", [{"program": "q"}, {"precision": "fp32"}, {"takes_texts": False}])
def test_all_but_the_weights_has_to_be_the_same(other):
    assert families([copy_of("a", TRUNK), copy_of("b", TRUNK, **other)]) == {}
