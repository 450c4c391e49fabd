"""``coserve bench cluster``: equal arrivals for both contestants, missed targets, and a small run of all."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest

from experts.errors import CoServeError
from experts.packed.weights import slot_bytes
from proof.cluster import nodes
from proof.cluster.report import ALL, HALF, ONE, PACE, PACED, measure_cluster, targets_of
from proof.cluster.turns import OURS, ClusterTurn, turn_of
from proof.cluster.workload import Workload, paper_device

DEVICE = paper_device()
WORKLOAD = Workload(DEVICE, images=300)
SMALL = Workload(
    replace(DEVICE, weight_bytes=slot_bytes(1), ssd_bytes_per_s=1e7, K_s=0.001, B_s=0.001),
    experts=6,
    held_each=1,
    images=60,
)


def test_load_takes_as_long_as_a_resnet101_of_the_papers_ssd():
    assert pytest.approx(178e6 / 530e6, rel=0.002) == DEVICE.load_s
    assert pytest.approx(16 / (16 * 0.0222 + 0.0178)) == DEVICE.most_images_per_s


def test_arrivals_are_reproducible_and_as_many_for_each_worker():
    everything = list(WORKLOAD.quantities)
    third = WORKLOAD.by_usage[::3]
    assert WORKLOAD.trace(everything, 3) == WORKLOAD.trace(everything, 3)
    alone, all_of_them = WORKLOAD.trace(third, 1), WORKLOAD.trace(everything, 3)
    assert len(alone) * 3 == len(all_of_them) == 300
    assert {arrival.component for arrival in alone} <= set(third)
    assert alone[1].at_s == pytest.approx(3 * all_of_them[1].at_s)
    assert WORKLOAD.trace(everything, 3, every_s=0.5)[2].at_s == 1.0


def test_third_of_the_components_has_about_a_third_of_the_usage():
    quantities = WORKLOAD.quantities
    shares = [sum(quantities[name] for name in WORKLOAD.by_usage[start::3]) for start in range(3)]
    assert max(shares) < 1.3 * min(shares)


def test_every_worker_has_memory_for_its_share_and_one_batch(tmp_path):
    WORKLOAD.write_experts(tmp_path)
    config = WORKLOAD.line(tmp_path, "127.0.0.1:1", 3, 20, WORKLOAD.by_usage)
    (kind,) = config.cluster.workers
    assert kind.count == 3
    assert kind.memory.host - kind.memory.workspace == 20 * DEVICE.weight_bytes
    assert len(config.catalog.experts) == 120


def test_turn_reports_median_and_99th_percentile_waits():
    turn = turn_of(HALF, OURS, 5.0, [1.0] * 60 + [2.0] * 40, loads=4)
    assert (turn.images_per_s, turn.wait_p50_s, turn.wait_p99_s) == (20.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("together_s", "switches", "peer_s", "reached"),
    [(10.0, 0, 40.0, [True, True, True]), (12.0, 1, 29.0, [False, False, False])],
)
def test_missed_targets_of_a_cluster_are_reported(together_s, switches, peer_s, reached):
    turns = [
        ClusterTurn(ONE, OURS, 100, 10.0, 1.0, 1.0, 0, 0),
        ClusterTurn(ALL, OURS, 300, together_s, 1.0, 1.0, 0, switches),
        ClusterTurn(HALF, OURS, 300, 10.0, 1.0, 1.0, 50, 30),
        ClusterTurn(HALF, "peer, slow", 300, 50.0, 1.0, 1.0, 200),
        ClusterTurn(HALF, "peer, best", 300, peer_s, 1.0, 1.0, 200),
    ]
    found = targets_of(turns, WORKLOAD)
    assert [target.reached for target in found] == [*reached, None]
    assert "peer, best" in found[2].what


def test_missing_ray_serve_is_reported_with_what_to_install(monkeypatch):
    monkeypatch.setattr(nodes, "why_absent", lambda: None)
    monkeypatch.setattr(nodes, "find_spec", lambda name: None)
    with pytest.raises(CoServeError, match=r"ray\[data,serve\]"):
        nodes.require_ray()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray Serve
@pytest.mark.skipif(any(find_spec(name) is None for name in nodes.SERVE_MODULES), reason="Ray Serve is not installed")
def test_cluster_measurement_has_all_cases_and_leaves_nothing(tmp_path):
    found = measure_cluster(tmp_path, lambda *_: None, SMALL, turns=1)
    assert not list(tmp_path.iterdir())
    told = json.loads(json.dumps(found.as_json()))
    assert [row["case"] for row in told["rows"]] == [ONE, ALL, *[HALF] * 3, *[PACED] * 3]
    backlog, paced = ([row["contestant"] for row in told["rows"] if row["case"] == case] for case in (HALF, PACED))
    assert backlog == paced
    assert OURS in paced
    best = max(turn.images_per_s for turn in found.rows if turn.case == HALF and turn.contestant != OURS)
    arriving_s = (SMALL.images - 1) / (PACE * best)
    assert all(row["seconds"] > arriving_s for row in told["rows"] if row["case"] == PACED)
    assert "emulated" in found.text()
