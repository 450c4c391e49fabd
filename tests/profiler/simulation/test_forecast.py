"""Forecasts: figures by hand, routes that no policy changes, and lines that cannot be planned."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.performance import SSD, Performance, PoolSpec
from agent.core.policy import PRESETS
from agent.device_profile.records import LinkSpeed, UsageProfile
from experts.errors import ConfigError
from profiler.simulation.forecast import (
    draw_steps,
    forecast,
    quantile_s,
    reaches,
    scenario_of,
    with_expert_bytes,
    with_ssd,
)
from profiler.workload.traces import TracedArrival
from tests.profiler.lines import graph_of, profile_of, row, setup_of

SSD_BYTES_PER_S = 10_000.0
EXPERT_BYTES = 1_000  # a load takes 0.1 s
PERFORMANCE = Performance(K_s=0.01, B_s=0.02, max_batch=4, workspace_bytes=10)
LINKS = (LinkSpeed(SSD, SSD_BYTES_PER_S),)


def stored(pass_rates=None, speedups=None, links=LINKS):
    usage = UsageProfile({}, pass_rates or {}, "computed from quantities")
    return profile_of(links=links, usage=usage, speedups=speedups or {})


def setting(graph, places, executors=1, extra_load_s=0.0, processor="cpu", policy="paper"):
    """A box with room for so many experts, of EXPERT_BYTES each."""
    load_s = EXPERT_BYTES / SSD_BYTES_PER_S + extra_load_s
    rows = {name: row(name, PERFORMANCE, EXPERT_BYTES, load_s) for name in sorted(graph.experts)}
    pools = (PoolSpec("host", places * EXPERT_BYTES, 100),)
    return setup_of(rows, [processor] * executors, pools, policy=policy, routes=graph)


AB = graph_of({"a": ["a"], "b": ["b"]})


def test_first_come_first_served_equals_a_case_by_hand():
    """Room for one: load a, run it; load b, run it; load a again, run it: 3 x (0.1 + 0.03) s."""
    scenario = scenario_of(AB, stored(), [TracedArrival(0.0, "a"), TracedArrival(0.0, "b"), TracedArrival(0.0, "a")])
    found = forecast(scenario, setting(AB, places=1, policy="samba"))
    assert found.seconds == pytest.approx(0.39)
    assert found.waits_s == pytest.approx((0.13, 0.26, 0.39))
    assert (found.switches, found.evictions, found.bytes_read) == (3, 2, 3 * EXPERT_BYTES)
    assert found.loads == {"ssd_host": 3}
    assert found.loads_to({"host"}) == 3
    assert found.loads_to({"device"}) == 0
    assert (quantile_s(found.waits_s, 0.5), quantile_s(found.waits_s, 0.99)) == pytest.approx((0.26, 0.39))
    assert [quantile_s([0.03] * 99 + [0.13], quantile) for quantile in (0.5, 0.99, 1.0)] == [0.03, 0.03, 0.13]
    assert found.resident_at_start == frozenset()


def test_initial_placement_is_not_counted():
    """The paper's policy begins with a in memory; b makes it go before its second request comes: two loads."""
    scenario = scenario_of(AB, stored(), [TracedArrival(0.5, "a"), TracedArrival(0.5, "b"), TracedArrival(0.51, "a")])
    found = forecast(scenario, setting(AB, places=1))
    assert found.resident_at_start == {"a"}
    assert (found.switches, found.evictions, found.bytes_read) == (2, 2, 2 * EXPERT_BYTES)
    roomy = forecast(scenario, setting(AB, places=2))
    assert roomy.resident_at_start == {"a", "b"}
    assert (roomy.switches, roomy.evictions, roomy.bytes_read, roomy.loads) == (0, 0, 0, {})
    assert roomy.seconds == pytest.approx(0.5 + 0.03 + 0.03 + 0.03)


def test_other_ssd_changes_the_reading_and_nothing_else():
    """A load takes 0.05 s beside its 0.1 s of reading; ten times as fast an SSD leaves 0.06 s."""
    scenario = scenario_of(AB, stored(), [TracedArrival(0.0, "a")])
    slow = setting(AB, places=1, extra_load_s=0.05, policy="samba")
    assert forecast(scenario, slow).seconds == pytest.approx(0.15 + 0.03)
    assert forecast(*with_ssd(scenario, slow, 10 * SSD_BYTES_PER_S)).seconds == pytest.approx(0.06 + 0.03)


def test_added_expert_memory_leaves_workspaces_unchanged():
    found = with_expert_bytes(setting(AB, places=1), {"host": 7, "device": 9})
    assert found.pools == found.limits.pools == (PoolSpec("host", 7, 100),)


def test_accelerators_executors_share_it_and_a_cpus_do_not():
    """Two batches at once on a processor that is no faster for it take twice as long each."""
    trace = [TracedArrival(0.0, "a"), TracedArrival(0.0, "b")]
    speedups = {"cuda": (1.0, 1.0), "cpu": (1.0, 1.0)}
    scenario = scenario_of(AB, stored(speedups=speedups), trace)
    on_cuda = forecast(scenario, setting(AB, places=2, executors=2, processor="cuda"))
    on_cpu = forecast(scenario, setting(AB, places=2, executors=2))
    assert (on_cuda.seconds, on_cpu.seconds) == pytest.approx((0.06, 0.03))


# -- routes --

ROUTES = {"u": ["a", "x"], "v": ["b", "y", "x"], "w": ["c"]}
TRACE = [TracedArrival(0.004 * n, "uvw"[n % 3]) for n in range(600)]


def test_steps_are_drawn_by_the_pass_rates():
    graph = graph_of(ROUTES)
    steps = draw_steps(TRACE, graph, {"a": 0.25, "b": 0.0}, seed=3)
    counts = Counter(expert for experts in steps for expert in experts)
    assert (counts["a"], counts["b"], counts["c"], counts["y"]) == (200, 200, 200, 0)
    assert 30 <= counts["x"] <= 70
    assert all(list(experts) == ROUTES["uvw"[n % 3]][: len(experts)] for n, experts in enumerate(steps))
    assert steps == draw_steps(TRACE, graph, {"a": 0.25, "b": 0.0}, seed=3)
    assert steps != draw_steps(TRACE, graph, {"a": 0.25, "b": 0.0}, seed=4)
    assert steps[:50] == draw_steps(TRACE[:50], graph, {"a": 0.25, "b": 0.0}, seed=3)


@settings(max_examples=15)
@given(st.sampled_from(sorted(PRESETS)), st.floats(0, 1), st.integers(3, 5), st.integers(0, 9))
def test_every_policy_runs_the_drawn_steps(policy, rate, places, seed):
    graph = graph_of(ROUTES)
    trace = [*TRACE[:60], TracedArrival(1.0, expert="y")]
    scenario = scenario_of(graph, stored({"a": rate, "b": rate}), trace, seed)
    plain = setting(graph, places, policy=policy)
    found = forecast(scenario, plain)
    assert found == forecast(scenario, plain)
    assert len(found.waits_s) == len(trace)
    work_s = Counter(expert for experts in scenario.steps for expert in experts).total() * PERFORMANCE.K_s
    assert found.seconds >= work_s


def test_predictions_lead_a_request_along_its_steps_and_no_further():
    graph = graph_of(ROUTES)
    scenario = scenario_of(graph, stored({"a": 0.5}), TRACE, seed=1)
    for number in range(60):
        component, experts = scenario.trace[number].component, scenario.steps[number]
        walked = [experts[0]]
        while (
            following := graph.judge(component, len(walked) - 1, scenario.predict(number, walked[-1])).next_expert
        ) is not None:
            walked.append(following)
        assert tuple(walked) == experts


def keeps_up(trace, places, policy, images_per_s):
    scenario, setup = scenario_of(AB, stored(), trace), setting(AB, places, policy=policy)
    return reaches(scenario, setup, forecast(scenario, setup), images_per_s)


def steady(count, images_per_s):
    return [TracedArrival(n / images_per_s, "ab"[n % 2]) for n in range(count)]


BURSTS = [TracedArrival(float(n // 40), "ab"[n % 2]) for n in range(120)]


@pytest.mark.parametrize(
    ("trace", "places", "policy", "kept_up", "missed"),
    [
        # batches of four images take 0.06 s: 66 images/s can be had, however slowly or fast these came
        *((steady(count, offered), 2, "paper", 60.0, 70.0) for count, offered in ((1, 1.0), (7, 500.0), (50, 1.0))),
        # one after another, each loaded anew: 0.13 s an image, 7.69 images/s; later images wait ever longer
        (steady(2, 1.0), 1, "samba", 7.6, 7.8),
        # 7.69 images/s one by one, and more as soon as two for the same expert wait
        (steady(50, 1.0), 1, "paper", 12.0, 200.0),
        # 40 images at once each second: in batches of four and two loads 0.6 s or some more, never 0.5 s
        (BURSTS, 2, "paper", 40.0, 80.0),
        (BURSTS, 1, "paper", 40.0, 200.0),
        (BURSTS, 1, "samba", 7.0, 40.0),
    ],
)
def test_line_keeps_up_if_no_queue_grows(trace, places, policy, kept_up, missed):
    assert keeps_up(trace, places, policy, kept_up)
    assert not keeps_up(trace, places, policy, missed)


def test_trace_at_the_exact_rate_is_not_missed_for_its_last_images_wait():
    """20 images in 0.475 s, the last of which is there some 0.05 s later: past the 0.5 s that 20 images have."""
    scenario, setup = scenario_of(AB, stored(), steady(20, 40.0)), setting(AB, places=2)
    played = forecast(scenario, setup)
    assert played.loads == {}
    assert played.images_per_s < 40.0
    assert reaches(scenario, setup, played, 40.0)


def test_experts_in_memory_at_the_start_do_not_hide_a_growing_queue():
    """a is there and b is loaded: 0.16 s for the first two, but 0.26 s for each two after these."""
    played = forecast(scenario_of(AB, stored(), steady(2, 500.0)), setting(AB, places=1))
    assert played.images_per_s > 12.0
    assert played.resident_at_start == {"a"}
    assert keeps_up(steady(2, 500.0), 2, "samba", 12.0)
    assert not keeps_up(steady(2, 500.0), 1, "samba", 12.0)


def test_repeated_trace_keeps_the_asked_rate_and_its_bursts():
    scenario = scenario_of(
        AB,
        stored(),
        [TracedArrival(5.0, "a"), TracedArrival(5.0, "b"), TracedArrival(7.0, "a"), TracedArrival(7.0, "a")],
    )
    assert scenario.offered_images_per_s == pytest.approx(1.5)
    slower, faster = scenario.repeated(2, 1.0), scenario.repeated(2, 3.0)
    assert [arrival.at_s for arrival in slower.trace] == pytest.approx([0, 0, 2, 2, 4, 4, 6, 6])
    assert [arrival.at_s for arrival in faster.trace] == pytest.approx([0, 0, 1, 1, 4 / 3, 4 / 3, 7 / 3, 7 / 3])
    assert [arrival.component for arrival in faster.trace] == list("abaaabaa")
    assert faster.steps == scenario.steps * 2


# -- what cannot be planned --


def test_unknown_targets_of_a_trace_are_all_reported_with_close_names():
    trace = [TracedArrival(0.0, "alpha1"), TracedArrival(0.0, "alpha1"), TracedArrival(0.0, expert="cls/q")]
    with pytest.raises(ConfigError) as caught:
        scenario_of(graph_of({"alpha": ["cls/p"]}), stored(), trace)
    first, second = (str(problem) for problem in caught.value.problems)
    assert "component 'alpha1', which has no route on this line - did you mean 'alpha'?" in first
    assert "expert 'cls/q', which this line does not have - did you mean 'cls/p'?" in second


WIDE = graph_of({"a": ["a"], "z": ["z"]})


@pytest.mark.parametrize(
    ("graph", "profile", "trace", "setup", "problem"),
    [
        (AB, {}, [], {"places": 1}, "an empty queue"),
        (AB, {"links": ()}, [TracedArrival(0.0, "a")], {"places": 1}, "no speed of its SSD - run `coserve profile`"),
        (AB, {}, [TracedArrival(0.0, "a")], {"places": 0, "policy": "coserve"}, r"host, for a.*plan with more memory"),
        (WIDE, {}, [TracedArrival(0.0, "z")], {"places": 1}, "no executor can run z, executors are on: cpu - add one"),
    ],
)
def test_unplannable_line_is_refused_with_its_reason(graph, profile, trace, setup, problem):
    with pytest.raises(ConfigError, match=problem):
        forecast(scenario_of(graph, stored(**profile), trace), setting(AB, **setup))
