"""Promotion of a served line over `/api`: in its state, by the weights that shall serve, once or not at all."""

import os
from contextlib import contextmanager

import grpc
import pytest

from agent.config import read_line
from agent.doors.http import station
from agent.doors.proto import inspection_pb2 as pb
from agent.doors.proto import inspection_pb2_grpc
from agent.lines.promotion import discard, promote
from tests.agent.service.station.test_station import Web, let_go, with_door
from tests.waiting import until


@pytest.fixture
def shadowed(line):
    """A line whose f0 has f2 in its shadow."""
    line.add_expert(2, has_route=False)
    line.document["experts"]["cls/f0"]["shadow"] = "cls/f2"
    line.fake(2, B_s=0.001)
    return with_door(line)


def weights(web):
    return {each["id"]: each["sha256"] for each in web.json("/api/experts")["experts"]}


@contextmanager
def served(line):
    """Its station as a master sees it, and the weights of each expert."""
    with line.served() as service:
        web = Web(service, "master")
        yield web, weights(web)


def promoting(web, sha256, expert="cls/f0"):
    return web.json("/api/experts/promote", {"expert": expert, "sha256": sha256})


def outcomes(web):
    """Of the audited calls, the latest first."""
    return [each["outcome"] for each in web.json("/api/audit")["entries"]]


def test_promotion_serves_the_shadow_and_leaves_the_line_file_unchanged(shadowed):
    file = shadowed.folder / "line.yaml"
    with shadowed.served() as service:
        web, before = Web(service, "master"), file.read_bytes()
        old = weights(web)
        done = promoting(web, old["cls/f2"])
        assert (done["shadow"], done["keys"], done["reload"]["is_applied"]) == ("cls/f2", ["weights"], True)
        swapped = {**old, "cls/f0": old["cls/f2"], "cls/f2": old["cls/f0"]}
        assert weights(web) == swapped
        assert web.json("/api/reload", method="POST")["is_applied"]
        assert (weights(web), file.read_bytes()) == (swapped, before)
        assert web.json("/api/line")["is_served"] is True
        assert (
            web.error("/api/experts/promote", {"expert": "cls/f1", "sha256": old["cls/f1"]}, 404)["field"] == "expert"
        )
    with served(shadowed) as (_, again):  # the next start
        assert again == swapped


def test_repeated_promotion_changes_nothing_and_other_weights_are_refused(shadowed):
    with served(shadowed) as (web, old):
        for _ in range(2):
            assert promoting(web, old["cls/f2"])["reload"]["is_applied"]
            assert weights(web)["cls/f0"] == old["cls/f2"]
        promoting(web, old["cls/f0"])
        assert weights(web) == old
        assert web.error("/api/experts/promote", {"expert": "cls/f0", "sha256": "0" * 64}, 400)["field"] == "sha256"
        assert web.error("/api/experts/promote", {"expert": "cls/f0"}, 400)["field"] == "sha256"
        assert weights(web) == old


def test_refused_promotion_is_not_applied_at_the_next_start(shadowed):
    with served(shadowed) as (web, old):
        shadowed.fake(0, weight_bytes=30_000_000)
        done = promoting(web, old["cls/f2"])["reload"]
        assert not done["is_applied"]
        until(lambda: [each.partition(":")[0] for each in outcomes(web)] == ["not applied"])
        assert weights(web) == old
    shadowed.fake(0)
    with served(shadowed) as (_, again):
        assert again == old


def test_promotion_beside_unserved_changes_of_the_line_file_is_refused(shadowed):
    with served(shadowed) as (web, _):
        shadowed.add_expert(3)
        shadowed.write()
        wanted = {"expert": "cls/f0", "sha256": weights(web)["cls/f2"]}
        assert "reload it first" in web.error("/api/experts/promote", wanted, 503)["message"]
        assert set(weights(web)) == {"cls/f0", "cls/f1", "cls/f2"}


def test_edited_promoted_entry_is_refused_and_the_served_line_stays(shadowed):
    with served(shadowed) as (web, old):
        promoting(web, old["cls/f2"])
        shadowed.document["experts"]["cls/f2"]["weights"] = str(shadowed.folder / "f1.yaml")
        shadowed.write()
        done = web.json("/api/reload", method="POST")
        assert not done["is_applied"]
        assert "cls/f0 serves the entry of cls/f2, promoted by master" in done["problems"][0]
        assert "--discard" in done["problems"][0]
        assert weights(web)["cls/f0"] == old["cls/f2"]
        assert discard(shadowed.folder / "line.yaml", "cls/f0")
        assert web.json("/api/reload", method="POST")["is_applied"]
        assert weights(web)["cls/f0"] == old["cls/f0"]


def test_promote_command_moves_a_promotion_into_the_line_file(shadowed):
    file = shadowed.folder / "line.yaml"
    with served(shadowed) as (web, old):
        promoting(web, old["cls/f2"])
        assert promote(file, "cls/f0") == ("cls/f2", ("weights",))
        assert web.json("/api/reload", method="POST")["replaced"] == []
        assert weights(web)["cls/f0"] == old["cls/f2"]
        assert read_line(file).promotions == ()


def held_reload(line):
    """A line file whose reload waits for a pipe's bytes."""
    pipe = line.folder / "f3.onnx"
    os.mkfifo(pipe)
    line.add_expert(3, has_route=False)
    line.document["experts"]["cls/f3"] |= {"architecture": "onnx", "weights": str(pipe)}
    line.write()
    return pipe


def test_reload_that_outlives_its_call_is_audited_at_its_own_end(shadowed, monkeypatch):
    monkeypatch.setattr(station, "CHANGE_S", 0.2)
    with shadowed.served() as service:
        web, pipe = Web(service, "master"), held_reload(shadowed)
        assert "it goes on" in web.error("/api/reload", status=503, method="POST")["message"]
        until(lambda: [each.partition(":")[0] for each in outcomes(web)] == ["NOT_NOW"])
        until(lambda: let_go(pipe) is None and len(outcomes(web)) == 2)
        assert outcomes(web)[0] == "done"


def test_reload_over_grpc_whose_caller_leaves_is_audited_at_its_own_end(shadowed):
    shadowed.document["api"]["grpc"] = [f"unix:{shadowed.folder}/grpc.sock"]
    with shadowed.served() as service, grpc.insecure_channel(service.api.addresses[0]) as channel:
        web, pipe, master = (
            Web(service, "master"),
            held_reload(shadowed),
            [("authorization", "Bearer secret-of-master")],
        )
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            inspection_pb2_grpc.InspectionStub(channel).Reload(pb.ReloadRequest(), timeout=2.0, metadata=master)
        until(lambda: outcomes(web) == ["cut off"], otherwise=lambda: str(outcomes(web)))
        until(lambda: let_go(pipe) is None and len(outcomes(web)) == 2)
        assert outcomes(web)[0] == "done"
