"""The plan of a packed line of fakes, and of texts beside images: figures by hand, every policy, what is refused."""

import json
from dataclasses import replace

import pytest

from agent.core.performance import SSD, PoolSpec
from agent.core.policy import PRESETS
from agent.core.request import Work
from agent.device_profile.records import ImageDecoding
from experts.errors import ConfigError
from experts.graph import ExpertGraph, RouteStep
from profiler.planning.advice import Limit
from profiler.planning.plan import SHIFT_S, LinePlan, as_json, plan_row, plan_table
from profiler.simulation.forecast import Scenario, draw_steps, forecast
from profiler.tables import WIDTH
from profiler.workload.traces import TracedArrival, board_trace
from tests.profiler.lines import (
    IMAGES,
    OK,
    SLOT_BYTES,
    SSD_BYTES_PER_S,
    TEXTS,
    PackedFakes,
    arrivals,
    merged,
    row,
    setup_of,
)

WORKSPACE_BYTES = PackedFakes.WORKSPACE_BYTES
EXPERTS = 4
ONE_PLACE = {"host": SLOT_BYTES + WORKSPACE_BYTES}
BOARD = {"components": {"c0": 4, "c1": 3, "c2": 2, "c3": 1}, "takt_s": 5.0}
GRAPH = ExpertGraph(
    ["i", "r", "a", "b"],
    {
        "part": (RouteStep("i", OK),),
        "assistant": (RouteStep("r", frozenset(), then={"one": "a", "other": "b"}),),
    },
)
TEXT = Work(20, 30, 50)


@pytest.fixture(scope="module")
def packed_line(tmp_path_factory):
    return PackedFakes(tmp_path_factory.mktemp("line"), EXPERTS, boards={"main": BOARD})


def planned(line, trace, policies=(None,), memories=(None,), *, config=None, profile=None, **more):
    line_plan = LinePlan(config or line.config, profile or line.profile, trace, **more)
    return [line_plan.row(policy, memory) for memory in memories for policy in policies]


def advised(line, trace, policy=None, memory=None, *, config=None, profile=None, **more):
    return LinePlan(config or line.config, profile or line.profile, trace, **more).advice(policy, memory)


def trace_of(components, every_s=0.0):
    return [TracedArrival(every_s * number, f"c{component}") for number, component in enumerate(components)]


def test_plan_row_equals_one_by_hand(packed_line):
    """Samba in a memory for one: three loads of 0.1 s, each before one image of 0.03 s.

    Two experts have to be read, 0.2 s of the SSD, as none is there at the start; the best start holds one of them.
    """
    (row,) = planned(packed_line, trace_of("010"), ["samba"], [ONE_PLACE])
    assert (row.policy, row.requests, row.executors) == ("samba", 3, {"cpu": 1})
    assert row.memory == {"host": SLOT_BYTES, "host_workspace": WORKSPACE_BYTES}
    assert row.seconds == pytest.approx(0.39)
    assert row.images_per_s == pytest.approx(3 / 0.39)
    assert (row.switches, row.switching_loads, row.evictions, row.bytes_read) == (3, 3, 2, 3 * SLOT_BYTES)
    assert row.loads == {"ssd_host": 3, "host_device": 0, "ssd_device": 0}
    assert (row.p50_wait_s, row.p99_wait_s) == pytest.approx((0.26, 0.39))
    assert (row.bound.switches, row.bound.fcfs_switches) == (1, 2)
    assert (row.bound.compute_s, row.bound.io_s) == pytest.approx((0.04 + 0.03, 0.1))
    assert row.bound.seconds == row.bound.io_s
    assert row.roofline_images_per_s == pytest.approx(3 / 0.2)
    assert row.roofline_fraction == pytest.approx(0.2 / 0.39)
    assert row.required_images_per_s == pytest.approx(10 / 5)
    assert row.takt_met is True
    assert row.bytes_read_per_shift == round(SLOT_BYTES * 2 * SHIFT_S)


def test_slow_trace_shows_whether_the_takt_is_met(packed_line):
    """Ten images every 0.25 s: 40 images/s, of which batches of four allow 66, and one image after another 33."""
    config = packed_line.changed(boards={"main": BOARD | {"takt_s": 0.25}})
    trace = trace_of("0123" * 10, every_s=1.0)
    rows = planned(packed_line, trace, ["coserve", "samba"], [packed_line.room(EXPERTS)], config=config)
    assert [row.required_images_per_s for row in rows] == pytest.approx([40.0, 40.0])
    assert all(row.images_per_s < 1.1 for row in rows)
    assert [row.takt_met for row in rows] == [True, False]


def test_every_policy_in_every_memory_stays_above_its_bounds(packed_line):
    trace = board_trace(packed_line.config, boards=6, seed=1)
    memories = [packed_line.room(places) for places in (1, 2, 4)]
    rows = planned(packed_line, trace, sorted(PRESETS), memories)
    for each in rows:
        assert each.switching_loads >= each.bound.switches
        assert each.seconds >= each.bound.seconds - 1e-9
        assert 0.0 < each.roofline_fraction <= 1.0 + 1e-9
        assert each.p50_wait_s <= each.p99_wait_s
    bounds = [rows[at].bound for at in (0, len(PRESETS), 2 * len(PRESETS))]
    assert [bound.switches for bound in bounds] == [3, 2, 0]
    assert planned(packed_line, trace, sorted(PRESETS), memories[:1]) == rows[: len(PRESETS)]


def test_plan_for_a_faster_ssd_is_faster(packed_line):
    (row,) = planned(packed_line, trace_of("010"), ["samba"], [ONE_PLACE], ssd_bytes_per_s=10 * SSD_BYTES_PER_S)
    assert row.seconds == pytest.approx(3 * (0.01 + 0.03))
    assert row.bound.io_s == pytest.approx(0.01)


def test_table_and_json_have_every_row_and_sentence(packed_line):
    trace = trace_of("0123" * 5)
    rows = planned(packed_line, trace, ["coserve", "samba-parallel"])
    advice = advised(packed_line, trace, "samba")
    text = plan_table(rows, advice)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    header, first, second, *_ = text.splitlines()
    assert header.split()[:3] == ["policy", "memory", "images/s"]
    assert first.split()[:4] == ["coserve", "0.6", "MiB", f"{rows[0].images_per_s:.2f}"]
    assert second.startswith("samba-parallel ")
    words = " ".join(text.split())
    assert all(" ".join(sentence.split()) in words for sentence in advice.sentences)
    read = json.loads(json.dumps(as_json(rows, advice)))
    row = read["rows"][0]
    assert row["bound"].keys() >= {"switches", "fcfs_switches", "seconds"}
    expected = {"policy", "requests", "seconds", "images_per_s", "switches", "loads", "evictions", "bytes_read"}
    expected |= {"p50_wait_s", "p99_wait_s", "takt_met", "required_images_per_s", "bytes_read_per_shift"}
    assert row.keys() >= expected | {"roofline_images_per_s", "roofline_fraction", "memory", "executors"}
    assert (read["advice"]["limit"], read["advice"]["sentences"]) == (advice.limit, list(advice.sentences))
    assert as_json(rows)["advice"] is None


@pytest.mark.parametrize(
    ("components", "policy", "memory", "said"),
    [
        ("01", None, {"host": SLOT_BYTES // 2 + WORKSPACE_BYTES}, "experts.cls/f0: needs 0.2 MiB, but memory.host"),
        ("01", "coserv", None, "no policy 'coserv' - did you mean 'coserve'?"),
        ("01", None, {"hots": 5}, "unknown memory hots"),
        ("", None, None, "an empty queue"),
        ("9", None, None, "component 'c9', which has no route"),
    ],
)
def test_plan_of_an_impossible_setup_is_refused(packed_line, components, policy, memory, said):
    with pytest.raises(ConfigError) as caught:
        planned(packed_line, trace_of(components), [policy], [memory])
    assert said in str(caught.value)


def test_invalid_line_or_profile_is_refused(packed_line):
    (kind,) = packed_line.profile.kinds
    for config, other, said in (
        (packed_line.changed(state="./elsewhere"), kind, "not packed in fp32 - run `coserve profile"),
        (None, replace(kind, kind="another"), "the trace needs cls/f0, which cannot be served: no expert of its kind"),
    ):
        with pytest.raises(ConfigError) as caught:
            planned(packed_line, trace_of("0"), config=config, profile=replace(packed_line.profile, kinds=(other,)))
        assert said in str(caught.value)


def photographs(packed_line, **more):
    """One image takes a core 129 ms to decode, and both cores 62 ms to compute."""
    first, second, *_ = sorted(packed_line.config.catalog.experts)
    (kind,) = packed_line.profile.kinds
    computing = replace(kind, threads=2, K_s=0.062, B_s=0.0, samples="24 images from inbox/done")
    decoding = ImageDecoding(first, 2, 24.0, 2 * 0.129, 2 * 0.05, 2, 1, 0.0, 0.02, "5a")
    return replace(
        packed_line.profile,
        box=replace(packed_line.profile.box, cores=2),
        kinds=(computing,),
        decodings=(replace(decoding, **more), replace(decoding, expert=second, **more)),
    )


def test_decoding_of_large_photographs_is_the_limit_and_remedies_are_listed(packed_line):
    advice = advised(packed_line, trace_of("01" * 100), profile=photographs(packed_line))
    assert advice.limit is Limit.DECODING
    assert advice.sentences[1:3] == (
        "Decoding is the limit: it takes 51% of the cores' time for an image (129 of 253 ms of one core), so that 2 "
        "cores reach 7.9 images/s at most, and executors, which would run 16.1, wait for images 51% of the time.",
        "In images/s, these would allow up to: a further core 11.9, JPEGs decoded to fewer pixels (2 experts "
        "decide differently on them) 11.5, images of half the pixels 10.6.",
    )
    told = json.loads(json.dumps(as_json((), advice)))["advice"]["decoding"]
    figures = told["images_per_s"], told["decoding_share"], told["waiting_fraction"]
    assert figures == pytest.approx((2 / 0.253, 0.129 / 0.253, 1 - 0.124 / 0.253))
    assert told["help"][0] == {"change": "a further core", "images_per_s": pytest.approx(3 / 0.253)}


@pytest.mark.parametrize("images", [None, 0], ids=["ahead", "with their batch"])
def test_planned_rate_includes_decoding_on_the_cores(packed_line, images):
    """100 images in batches of at most four: all but what an image alone leaves of the two cores is made use of."""
    config = packed_line.config.having(memory={} if images is None else {"images": images})
    (row,) = planned(packed_line, trace_of("01" * 50), config=config, profile=photographs(packed_line))
    assert row.cores_images_per_s == pytest.approx(2 / 0.253)
    assert 0.95 * row.cores_images_per_s < row.images_per_s <= row.cores_images_per_s
    assert row.roofline_images_per_s == row.cores_images_per_s
    undecoded = replace(photographs(packed_line), decodings=())
    (alone,) = planned(packed_line, trace_of("01" * 50), config=config, profile=undecoded)
    assert alone.images_per_s == pytest.approx(1 / 0.062, rel=0.05)


def setup_with(lease_bytes=10_000):
    texts = replace(TEXTS, lease_bytes=10)
    rows = {name: row(name, IMAGES if name == "i" else texts, 4, 0.4) for name in "rabi"}
    pools = (PoolSpec("host", 16, 4, lease_bytes=lease_bytes),)
    return setup_of(rows, room=pools, routes=GRAPH, usage=dict.fromkeys(rows, 0.5), quantum_s=0.02)


def scenario_of(trace):
    return Scenario(GRAPH, tuple(trace), draw_steps(trace, GRAPH, {}, seed=0), {SSD: 10.0}, {})


def images(count):
    return arrivals(["part"] * count, 0.1)


def texts(count, every_s):
    return [TracedArrival(every_s * number, expert="a", work=TEXT) for number in range(count)]


def test_texts_and_images_are_reported_separately():
    trace = merged(images(50), texts(8, 0.5))
    row = plan_row(scenario_of(trace), setup_with(), required_images_per_s=10.0)
    assert (row.requests, row.texts) == (58, 8)
    assert row.written_tokens_per_s == pytest.approx(8 * 30 / row.seconds)
    assert row.text_p50_s > 30 * 0.003
    assert row.p50_wait_s < row.text_p50_s  # an image waits for a quantum, not for a text
    assert row.takt_met
    assert row.bound.compute_s >= 8 * (20 * 0.0005 + 30 * 0.003)
    assert "tokens/s" in plan_table([row])
    assert as_json([row])["rows"][0]["texts"] == 8


@pytest.mark.parametrize(
    ("trace", "is_met"),
    [
        (merged(images(30), texts(30, 0.1)), False),  # as many texts, a tenth of a second each, leave no time
        (images(30), True),
        (texts(1, 0.0), None),
    ],
    ids=["texts and images", "images", "texts"],
)
def test_texts_come_with_images_at_the_rate_of_the_takt(trace, is_met):
    assert plan_row(scenario_of(trace), setup_with(), required_images_per_s=10.0).takt_met is is_met


def test_text_that_never_has_room_is_refused():
    trace = [TracedArrival(0.0, "assistant", work=Work(90, 30, 120))]
    with pytest.raises(ConfigError) as caught:
        forecast(scenario_of(trace), setup_with(lease_bytes=1000))
    assert "a text of 120 tokens for r, and texts.kv has room for 100 - raise it" in str(caught.value)
