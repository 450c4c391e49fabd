"""Plans of lines with language models: texts beside images, by hand and in whole."""

from dataclasses import replace

import pytest

from agent.core.performance import SSD, PoolSpec
from agent.core.request import Work
from experts.errors import ConfigError
from experts.graph import ExpertGraph, RouteStep
from profiler.planning.plan import as_json, plan_row, plan_table
from profiler.simulation.forecast import Scenario, draw_steps, forecast
from profiler.workload.traces import TracedArrival
from tests.profiler.lines import IMAGES, OK, TEXTS, arrivals, merged, row, setup_of

GRAPH = ExpertGraph(
    ["i", "r", "a", "b"],
    {
        "part": (RouteStep("i", OK),),
        "assistant": (RouteStep("r", frozenset(), then={"one": "a", "other": "b"}),),
    },
)
TEXT = Work(20, 30, 50)


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


def test_texts_and_images_are_told_apart():
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


def test_a_text_that_never_has_room_is_refused():
    trace = [TracedArrival(0.0, "assistant", work=Work(90, 30, 120))]
    with pytest.raises(ConfigError) as caught:
        forecast(scenario_of(trace), setup_with(lease_bytes=1000))
    assert "a text of 120 tokens for r, and texts.kv has room for 100 - raise it" in str(caught.value)
