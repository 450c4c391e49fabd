"""The trace of a served line, read as Chrome's trace events."""

import json
from collections import defaultdict

import pytest

from agent.service.desk.tracing import Slice, _lanes, trace_of
from tests.agent.commands.test_asking import coserve
from tests.agent.service.fake_line import asked, ordered, picture
from tests.lines import order
from tests.waiting import until


class Decoded:
    """Slices and counters of a trace, by the name of their track."""

    def __init__(self, content):
        self.names, self.slices, self.counters = {}, defaultdict(list), defaultdict(list)
        under_way, latest_us = {}, 0
        for event in json.loads(content)["traceEvents"]:
            track, notes = event["tid"], event.get("args")
            if event["ph"] == "M":
                assert event["name"] == ("thread_name" if track else "process_name")
                self.names[track] = notes["name"]
                continue
            assert event["ts"] >= latest_us
            latest_us, name = event["ts"], self.names[track]
            if event["ph"] == "B":
                assert name not in under_way, "slices of one track overlap"
                under_way[name] = [event["name"], latest_us, None, notes]
                self.slices[name].append(under_way[name])
            elif event["ph"] == "E":
                under_way.pop(name)[2] = latest_us
            else:
                assert event["ph"] == "C"
                self.counters[event["name"]].append(notes["bytes"])
        self.under_way = under_way

    @property
    def batches(self):
        return [each for name, slices in self.slices.items() if name.startswith("executor") for each in slices]


@pytest.fixture
def tight_line(line):
    """Room for one of the two experts."""
    line.document["memory"] = {"host": "11500KB", "workspace": "10MB"}
    return line


def test_trace_has_the_batches_loads_decisions_and_memories(tight_line):
    with tight_line.served() as service:
        for component in ("c0", "c1", "c0", "c1"):
            asked(service, order(picture(), component=component))
        until(lambda: len(service.agent.loop.here.preparation.latest) == 4)  # noted after the answer
        statistics = service.agent.loop.statistics()
        decoded = Decoded(trace_of(service.agent.loop, "test", 600.0))
    assert decoded.names[0] == "coserve test"
    assert [each[0] for each in decoded.batches] == ["cls/f0", "cls/f1", "cls/f0", "cls/f1"]
    assert [each[3] for each in decoded.batches] == [{"requests": 1, "kind": "batch"}] * 4
    assert all(end >= begin for _, begin, end, _ in decoded.batches)
    loads = decoded.slices["link ssd to host"]
    assert len(loads) == sum(statistics.engine.loads.values())
    assert [each[3]["evicted"] for each in loads[1:]] == ["cls/f0", "cls/f1", "cls/f0"][: len(loads) - 1]
    assert {each[3]["claim"] for each in loads[1:]} == {"head"}
    decisions = [each[0] for each in decoded.slices["decisions"]]
    assert decisions[0] == "Started"
    assert decisions.count("Finished") == 4
    prepared = [each[0] for name, slices in decoded.slices.items() if "preparation" in name for each in slices]
    assert sorted(prepared) == ["cls/f0", "cls/f0", "cls/f1", "cls/f1"]
    (pool,) = statistics.engine.pools
    held = decoded.counters["memory host"]
    assert held[0] == 0
    assert held[-1] == pool.used_bytes
    assert max(held) <= pool.expert_bytes
    assert min(held) >= 0


def test_trace_command_fetches_it_over_the_agents_socket(line, tmp_path):
    line.document["api"] = {"grpc": []}  # and HTTP at the socket in the state folder
    out = tmp_path / "a.trace"
    with line.served() as service:
        asked(service, order(picture(), component="c0"))
        told = coserve("trace", line.file, "--last", "5m", "--out", out).stdout
        assert [each[0] for each in Decoded(out.read_bytes()).batches] == ["cls/f0"]
        assert told.startswith(f"{out}: {out.stat().st_size} bytes; open it at https://ui.perfetto.dev")
        there = service.web.addresses[0]
        coserve("trace", "--target", there, "--last", "60", "--out", out)
        assert Decoded(out.read_bytes()).batches
        unwritable = coserve("trace", line.file, "--out", tmp_path / "none" / "a.trace", check=78)
        assert "--out" in unwritable.stderr
    for words in (("--last", "1h"), ("--last", "0s"), ("--last", "11m"), ()):
        coserve("trace", *(line.file,)[: len(words)], *words, check=2)
    assert "is the agent running" in coserve("trace", line.file, "--out", out, check=1).stderr


def test_trace_leaves_running_batches_open_and_omits_older_ones(line, batches):
    with line.served() as service:
        asked(service, order(picture(), component="c0"))
        batches.clear()
        (caller,) = ordered(service, order(picture(), component="c1"))
        until(lambda: any(queue.running for queue in service.desk.status().queues))
        decoded = Decoded(trace_of(service.agent.loop, "test", 0.0))
        assert [(each[0], each[2]) for each in decoded.batches] == [("cls/f1", None)]
        assert list(decoded.under_way) == ["executor 0 cpu"]
        batches.set()
        caller.wait()


def test_slices_that_overlap_get_tracks_of_their_own():
    first, second, third = Slice(0.0, 2.0, "a", {}), Slice(1.0, None, "b", {}), Slice(2.0, 3.0, "c", {})
    assert _lanes([third, second, first]) == [[first, third], [second]]
