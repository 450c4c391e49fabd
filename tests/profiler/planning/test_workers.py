"""Plans of a line on several workers, by hand and in whole."""

import json

import pytest

from agent.core.performance import SSD, PoolSpec
from experts.errors import ConfigError
from profiler.planning.workers import on_workers, plan_workers, workers_json, workers_text
from profiler.simulation.decoders import ImageTimes
from profiler.simulation.forecast import Scenario, draw_steps, forecast
from profiler.tables import WIDTH
from tests.profiler.lines import IMAGES, arrivals, drawn, graph_of, row, setup_of

NAMES = [f"e{number}" for number in range(8)]
CHAINS = {name: [name] for name in NAMES} | {"pair": ["e0", "e1"]}


def setup_with(room=4, policy="coserve", **more):
    usage = dict.fromkeys(NAMES, 1 / 8)
    return setup_of({name: row(name) for name in NAMES}, room=room, routes=CHAINS, usage=usage, policy=policy, **more)


def scenario_of(trace, images=None):
    graph = graph_of(CHAINS)
    return Scenario(graph, tuple(trace), draw_steps(trace, graph, {}, seed=0), {SSD: 10.0}, {}, images)


def spread(count=200, every_s=0.004):
    return scenario_of(arrivals([NAMES[number * 5 % 8] for number in range(count)], every_s))


def test_each_worker_is_like_the_box_with_its_own_drive():
    pools = (PoolSpec("host", 4, 1), PoolSpec("device", 3, 2, cache="host"))
    rows = {name: row(name, load_s={SSD: 0.1, "host": 0.05}) for name in NAMES}
    setup, placement = on_workers(setup_of(rows, ("cuda", "cuda"), pools), 2)
    assert setup.pools == (
        PoolSpec("w1/host", 4, 1, drive="w1/ssd"),
        PoolSpec("w1/device", 3, 2, cache="w1/host", drive="w1/ssd"),
        PoolSpec("w2/host", 4, 1, drive="w2/ssd"),
        PoolSpec("w2/device", 3, 2, cache="w2/host", drive="w2/ssd"),
    )
    assert [(spec.id, spec.processor, spec.pool) for spec in setup.executors] == [
        (0, "w1/cuda", "w1/device"), (1, "w1/cuda", "w1/device"),
        (2, "w2/cuda", "w2/device"), (3, "w2/cuda", "w2/device"),
    ]  # fmt: skip
    assert setup.limits.placement == placement.pools
    assert len(placement.pools) == 6


def test_place_for_each_expert_removes_switches():
    found = plan_workers(spread(), setup_with(), 3)
    assert [row.workers for row in found.rows] == [1, 2, 3]
    assert [row.unplaced for row in found.rows] == [4, 0, 0]
    assert [row.switches > 0 for row in found.rows] == [True, False, False]
    assert found.rows[0].images_per_s < found.rows[1].images_per_s
    assert (found.sufficient, found.complete) == (2, 2)
    (first, _) = found.sentences
    assert first == "No request waits for a switch from 2 workers on; every expert has a place from 2 workers on."
    assert set(found.placement.pools) == set(NAMES)


def test_more_workers_than_were_tried_are_named():
    found = plan_workers(spread(), setup_with(room=2), 2)
    assert (found.sufficient, found.complete) == (None, 4)
    first, second, *_ = found.sentences
    assert first == "With 2 workers requests still wait for switches; every expert has a place from 4 workers on."
    assert second == "Experts without a place, which are loaded for their requests: e4, e5, e6 and 1 others."


def test_lost_worker_costs_time_and_no_answer():
    found = plan_workers(spread(), setup_with(), 3)
    assert found.loss.failed == 0
    assert found.loss.images_per_s < found.rows[-1].images_per_s
    assert found.loss.loads > found.rows[-1].loads
    assert "no request is without its answer" in found.sentences[-1]
    assert plan_workers(spread(), setup_with(), 1).loss is None


def test_every_worker_decodes_on_its_own_cores():
    """Decoding is the limit: 0.1 s for each image on one core of each worker."""
    scenario = scenario_of(arrivals(NAMES * 10), ImageTimes(1, dict.fromkeys(NAMES, 0.1)))
    one, two = (forecast(scenario, on_workers(setup_with(8, prepared_bytes=10**6), n)[0]).seconds for n in (1, 2))
    assert one >= 80 * 0.1
    assert one == pytest.approx(2 * two, rel=0.1)


def test_images_that_a_lost_worker_decoded_are_decoded_elsewhere():
    trace, _ = drawn(CHAINS, 120)
    scenario = scenario_of(trace, ImageTimes(2, dict.fromkeys(NAMES, 0.02)))
    found = plan_workers(scenario, setup_with(prepared_bytes=100), 2)
    assert found.loss.failed == 0
    assert found.loss.loads > found.rows[-1].loads


def test_table_and_json_show_which_experts_are_placed_where():
    found = plan_workers(spread(), setup_with(), 2)
    text = workers_text(found)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert text.splitlines()[2].split()[:4] == ["2", f"{found.rows[1].images_per_s:.2f}", "0", "0"]
    places = [line.split()[:2] for line in text.splitlines() if line.startswith(("w1  ", "w2  "))]
    assert places == [["w1", "4"], ["w2", "4"]]
    told = json.loads(json.dumps(workers_json(found)))
    assert told["sufficient"] == 2
    assert sorted(name for each in told["placement"]["workers"].values() for name in each["experts"]) == NAMES
    assert told["placement"]["pools"]["e0"] == told["placement"]["pools"]["e1"]  # on one route
    assert told["loss"]["failed"] == 0


def test_policy_of_one_executor_is_refused_for_workers():
    with pytest.raises(ConfigError, match="policy samba has one executor"):
        plan_workers(spread(), setup_with(policy="samba"), 2)


def test_executors_slow_down_those_of_their_own_worker_only():
    """Two executors of a processor are worth one; those of two workers are worth two."""
    setup = setup_of({name: row(name) for name in NAMES}, ("cuda", "cuda"), 8, usage=dict.fromkeys(NAMES, 1 / 8))
    graph = graph_of({name: [name] for name in NAMES})
    trace = arrivals(NAMES * 20)
    scenario = Scenario(graph, tuple(trace), draw_steps(trace, graph, {}, 0), {SSD: 10.0}, {"cuda": (1.0, 1.0)})
    one, two = (forecast(scenario, on_workers(setup, count)[0]).seconds for count in (1, 2))
    assert one >= 160 * IMAGES.latency_s(4) / 4
    assert one == pytest.approx(2 * two, rel=0.1)
