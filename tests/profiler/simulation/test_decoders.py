"""Decoding under virtual time: hand-worked traces, and that no schedule decodes more than the cores can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.performance import Performance, PreparedForm
from profiler.simulation.decoders import ImageTimes, core_share
from profiler.workload.traces import TracedArrival
from tests.profiler.lines import arrivals, batches, row, setup_of
from tests.profiler.lines import simulator as simulator_of

SMALL = PreparedForm("stretched 8x8 unit", 10)
LARGE = PreparedForm("stretched 64x64 unit", 10)
ROOM = 10_000


def simulator(routes, image_s, cores=1, executors=("cpu",), *, K_s=0.1, max_batch=1, prepared_bytes=ROOM, forms=None):
    """All experts fit and take ``K_s`` an image, B is nothing; ``image_s``: what decoding takes, by expert."""
    performance = Performance(K_s, 0.0, max_batch, workspace_bytes=0)
    experts = sorted({expert for steps in routes.values() for expert in steps})
    rows = {name: row(name, performance, load_s=0.001, prepared=(forms or {}).get(name, SMALL)) for name in experts}
    setup = setup_of(rows, executors, len(rows), routes=routes, prepared_bytes=prepared_bytes)
    return simulator_of(setup, images=None if image_s is None else ImageTimes(cores, image_s))


A = {"a": ["a"]}


def asked(count, component="a"):
    return arrivals([component] * count)


@pytest.mark.parametrize(
    ("count", "image_s", "more", "seconds"),
    [
        pytest.param(3, None, {}, 0.3, id="images are there at once where no decoding time is known"),
        pytest.param(3, 0.2, {}, 3 * 0.3, id="one core decodes or computes, also ahead"),
        pytest.param(3, 0.2, {"prepared_bytes": 0}, 3 * 0.3, id="one core decodes or computes"),
        pytest.param(3, 0.2, {"executors": ("cuda",)}, 3 * 0.2 + 0.1, id="an accelerator computes beside decoding"),
        pytest.param(3, 0.2, {"executors": ("cuda",), "prepared_bytes": 0}, 3 * 0.3, id="but waits without room"),
        # the first one runs alone, then two at a time; four cores decode no image faster than two
        pytest.param(3, 0.2, {"cores": 2, "max_batch": 2, "prepared_bytes": 0}, 0.3 + 0.4, id="a core for each image"),
        pytest.param(3, 0.2, {"cores": 4, "max_batch": 2, "prepared_bytes": 0}, 0.3 + 0.4, id="and no more"),
        pytest.param(2, 0.2, {"cores": 2}, 0.2 + 2 * 0.1, id="one core decodes the next image ahead"),
        pytest.param(2, 0.2, {"cores": 2, "prepared_bytes": 0}, 2 * 0.3, id="one image alone has one core"),
    ],
)
def test_decoding_takes_the_cores_that_computing_leaves(count, image_s, more, seconds):
    """Each image computes for 0.1 s."""
    found = simulator(A, None if image_s is None else {"a": image_s}, **more).run(asked(count))
    assert found.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("cores", "seconds"), [(2, 0.3 + 0.1), (1, 0.1 + 0.25 + 0.1)])
def test_waiting_executor_leaves_its_share_of_the_cores(cores, seconds):
    """One waits for an image of 0.3 s, the other computes for 0.1 s: on a core each, or on one half of one each."""
    routes = {"a": ["a"], "b": ["b"]}
    built = simulator(routes, {"a": 1e-9, "b": 0.3}, cores=cores, executors=("cpu", "cpu"))
    found = built.run([*asked(1, "b"), *asked(1, "a")])
    assert (found.finished_s[0], found.finished_s[1]) == pytest.approx((seconds, 0.1))


@pytest.mark.parametrize(("second", "seconds"), [(SMALL, 0.2 + 2 * 0.1), (LARGE, 0.2 + 2 * 0.1)])
def test_image_held_for_a_later_step_is_not_decoded_again(second, seconds):
    found = simulator({"r": ["a", "b"]}, {"a": 0.2, "b": 0.2}, forms={"b": second}).run(asked(1, "r"))
    assert found.seconds == pytest.approx(seconds)


def test_lack_of_room_makes_each_step_decode_again():
    found = simulator({"r": ["a", "b"]}, {"a": 0.2, "b": 0.3}, prepared_bytes=0).run(asked(1, "r"))
    assert found.seconds == pytest.approx(0.2 + 0.1 + 0.3 + 0.1)


def test_expert_without_samples_has_average_images():
    times = ImageTimes(2, {"a": 0.1, "b": 0.3})
    assert (times.of("b"), times.of("c")) == pytest.approx((0.3, 0.2))


@pytest.mark.parametrize(("cores", "executors", "share"), [(2, 1, 2), (2, 2, 1), (3, 2, 1), (1, 2, 0.5), (4, 0, 4)])
def test_executors_share_the_cores(cores, executors, share):
    assert core_share(cores, executors) == share


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([0, 25, 100, ROOM]),
    st.lists(st.tuples(st.sampled_from(["a", "b", "ab"]), st.sampled_from([0.0, 0.03, 0.5])), min_size=1, max_size=40),
)
def test_decoding_and_computing_never_exceed_the_cores_time(cores, executors, max_batch, room, drawn):
    at_s, trace = 0.0, []
    for component, pause_s in drawn:
        at_s += pause_s
        trace.append(TracedArrival(at_s, component))
    image_s = {"a": 0.07, "b": 0.02}
    built = simulator(
        {"a": ["a"], "b": ["b"], "ab": ["a", "b"]},
        image_s,
        cores,
        ("cpu",) * executors,
        K_s=0.05,
        max_batch=max_batch,
        prepared_bytes=room,
    )
    found = built.run(trace)
    assert found.outcomes.keys() == set(range(len(trace)))
    computed_s = sum(0.05 * len(batch.requests) for _, batch in batches(found)) * core_share(cores, executors)
    decoded_s = sum(image_s[arrival.component[0]] for arrival in trace)
    first_s = trace[0].at_s
    assert (found.seconds - first_s) * cores >= (computed_s + decoded_s) * (1 - 1e-9)
