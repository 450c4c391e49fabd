import os
from contextlib import closing

import pytest

from experts.children import bounded
from experts.children.bounded import BoundedProcess, BoundedWork, ResourceLimits
from experts.children.child import parent
from experts.children.messages import SIZE, packed
from experts.errors import LoadError, WeightsCorrupt, WeightsRefused

LIMITS = ResourceLimits(1 << 32, 1 << 20, 5, 1)


def ends_amid_its_answer():
    parent()._socket.sendall(SIZE.pack(1_000_000) + b"half")
    os._exit(9)


def claims_more_than_any_answer():
    parent()._socket.sendall(SIZE.pack(1 << 60))
    os._exit(9)


def send_an_error_of_no_class():
    parent().send(packed(["annotations", "said"]))
    os._exit(0)


def send_another_shape():
    parent().send(packed({"no": "pair"}))
    os._exit(0)


def result(run):
    work = BoundedWork(run, LIMITS, "too large", lambda code: f"ended ({code})")
    with closing(BoundedProcess()) as process:
        return process.result(work, "cls/x")


@pytest.mark.parametrize("run", [ends_amid_its_answer, claims_more_than_any_answer])
def test_endless_answer_of_a_child_ends_at_the_time_limit(run, monkeypatch):
    monkeypatch.setattr(bounded, "GRACE_S", 0.2)
    with pytest.raises(LoadError, match="has ended"):
        result(run)


@pytest.mark.parametrize("run", [send_an_error_of_no_class, send_another_shape])
def test_answer_of_another_shape_is_corrupt_weights(run):
    with pytest.raises(WeightsCorrupt):
        result(run)


def test_ended_work_is_refused_with_its_exit_code():
    with pytest.raises(WeightsRefused, match=r"ended \(3\)"):
        result(exits)


def exits():
    os._exit(3)
