"""Traces: every mistake is told by file, line and key, and what is written reads back."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.request import Work
from experts.errors import ConfigError
from profiler.workload import traces
from profiler.workload.traces import MOST_PROBLEMS, TracedArrival, board_trace, read_trace
from tests.profiler.lines import fakes, write_line


def line_of(folder, **more):
    expert = fakes(1)["experts"]["cls/f0"]
    routes = {
        "alpha": [{"expert": "cls/a", "pass": ["ok"]}, {"expert": "det/x", "pass": ["ok"]}],
        "beta": [{"expert": "cls/b", "pass": ["ok"]}],
    }
    experts = dict.fromkeys(("cls/a", "cls/b", "det/x"), expert)
    return write_line(folder, {"line": "t", "state": "./state", "experts": experts, "routes": routes} | more)


@pytest.fixture
def catalog(tmp_path):
    return line_of(tmp_path).catalog


def trace_file(folder, *lines):
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def problems_of(path, catalog, **options):
    with pytest.raises(ConfigError) as caught:
        read_trace(path, catalog, **options)
    return [str(problem).removeprefix(f"{path.parent}/") for problem in caught.value.problems]


def test_hour_of_a_day_counts_from_its_first_arrival(tmp_path, catalog):
    day = [{"t": 28_800 + t, "component": "alpha"} for t in (0.5, 0.5, 1.25, 3600.5)]
    assert [arrival.at_s for arrival in read_trace(trace_file(tmp_path, *day), catalog)] == [0.0, 0.0, 0.75, 3600.0]
    backwards = trace_file(tmp_path, {"t": 28_800, "component": "alpha"}, {"t": 28_799.5, "component": "alpha"})
    (problem,) = problems_of(backwards, catalog)
    assert "trace.jsonl:2:2: t: 28799.5 runs backwards, line 1 has 28800.0" in problem


GOOD = {"t": 1, "component": "alpha"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{'t': 1}", "trace.jsonl:2:1: syntax: not JSON (Expecting property name"),
        ("[1]", "trace.jsonl:2:1: syntax: [1] is not an object"),
        (f'{{"t": -{"7" * 5001}, "component": "alpha"}}', "777... is a number of 5001 digits - write seconds such as"),
        ('{"t": 1, "t": 2, "component": "alpha"}', "trace.jsonl:2:2: t: is there twice"),
        ({**GOOD, "imag": "x"}, "trace.jsonl:2:32: imag: unknown key - did you mean 'image'?"),
        ({"component": "alpha"}, "trace.jsonl:2:1: t: is missing"),
        ({"t": "1", "component": "alpha"}, 't: "1" is not a number'),
        ({"t": True, "component": "alpha"}, "t: true is not a number"),
        ('{"t": NaN, "component": "alpha"}', "t: NaN is not a number"),
        ('{"t": 1e+308, "component": "alpha"}', "t: 1e+308 is too large: no trace lasts over 1e+09 s - write seconds"),
        ({"t": -0.1, "component": "alpha"}, "t: -0.1 is before the start"),
        ({"t": 0.5, "component": "alpha"}, "trace.jsonl:2:2: t: 0.5 runs backwards, line 1 has 1.0 - sort the lines"),
        ({"t": 1, "component": "alhpa"}, "component: no route for 'alhpa' - did you mean 'alpha'?"),
        ({"t": 1, "component": 5}, "component: 5 is not a name"),
        ({"t": 1, "expert": "cls/c"}, "expert: no expert 'cls/c' on this line - did you mean 'cls/"),
        ({**GOOD, "expert": "cls/a"}, "trace.jsonl:2:10: component: both component and expert"),
        ({"t": 1}, "component: neither component nor expert"),
        ({**GOOD, "image": "no.png"}, "trace.jsonl:2:32: image: "),
        ({**GOOD, "image": "\0" * 5000}, "is not there - copy it there"),
        ({**GOOD, "image": 3}, "image: 3 is not a path"),
    ],
)
def test_mistake_in_a_trace_is_reported_with_its_place(tmp_path, catalog, line, expected):
    (problem,) = problems_of(trace_file(tmp_path, GOOD, line, GOOD), catalog)
    assert expected in problem
    assert problem.startswith("trace.jsonl:2:")


def test_all_mistakes_of_a_trace_are_reported_together(tmp_path, catalog):
    path = trace_file(tmp_path, {"t": -1, "component": "x", "image": "no.png", "y": 1}, GOOD, {"t": 0, "expert": "z"})
    told = [problem.split(": ")[:2] for problem in problems_of(path, catalog)]
    keys = [("1", "y"), ("1", "t"), ("1", "component"), ("1", "image"), ("3", "t"), ("3", "expert")]
    assert [(place.split(":")[1], key) for place, key in told] == keys


def test_mistakes_beyond_the_limit_are_counted(tmp_path, catalog):
    problems = problems_of(trace_file(tmp_path, *[{"t": 0, "component": "x"}] * (MOST_PROBLEMS + 7)), catalog)
    assert len(problems) == MOST_PROBLEMS + 1
    assert problems[-1] == "trace.jsonl: and 7 mistakes more - correct these first"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n \n", "trace.jsonl: an empty queue"),
        (b"\xef\xbb\xbf", "trace.jsonl: an empty queue"),
        (b'{"t": 0, "component": "alpha"}\n{"t": "\xff"}\n', "trace.jsonl:2:8: encoding: byte 0xff is not UTF-8"),
    ],
)
def test_empty_trace_or_one_that_is_no_text_is_refused(tmp_path, catalog, content, said):
    (tmp_path / "trace.jsonl").write_bytes(content)
    (problem,) = problems_of(tmp_path / "trace.jsonl", catalog)
    assert problem.startswith(said)


def test_missing_trace_is_refused(tmp_path, catalog):
    assert problems_of(tmp_path / "no.jsonl", catalog)[0].startswith("no.jsonl: cannot be read (No such file")


TARGETS = st.sampled_from([("component", "alpha"), ("component", "beta"), ("expert", "cls/a"), ("expert", "det/x")])


@given(st.lists(st.tuples(st.floats(0, 1e6), TARGETS, st.booleans()), min_size=1, max_size=20))
def test_written_trace_reads_back(tmp_path_factory, drawn):
    folder = tmp_path_factory.mktemp("trace")
    image = folder / "bild ä.png"
    image.write_bytes(b"image")
    rows, arrivals = [], []
    for at_s, (key, name), has_image in sorted(drawn, key=lambda each: each[0]):
        rows.append({"t": at_s, key: name} | ({"image": image.name} if has_image else {}))
        shown = image if has_image else None
        arrivals.append(TracedArrival(at_s - rows[0]["t"], **{key: name}, image=shown))
    assert read_trace(trace_file(folder, *rows), line_of(folder).catalog) == tuple(arrivals)


def test_boards_come_one_takt_apart_with_all_their_components(tmp_path):
    config = line_of(tmp_path, boards={"main": {"components": {"alpha": 3, "beta": 5}, "takt_s": 2.5}})
    trace = board_trace(config, boards=3, seed=1)
    assert [arrival.at_s for arrival in trace] == pytest.approx(
        [2.5 * b + 0.004 * n for b in range(3) for n in range(8)]
    )
    orders = [tuple(arrival.component for arrival in trace[8 * b : 8 * b + 8]) for b in range(3)]
    assert all(Counter(order) == {"alpha": 3, "beta": 5} for order in orders)
    assert len(set(orders)) > 1
    assert trace == board_trace(config, boards=3, seed=1)
    assert trace != board_trace(config, boards=3, seed=2)


def test_board_types_take_turns_and_large_boards_overlap(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "IMAGE_INTERVAL_S", 0.5)
    boards = {
        "one": {"components": {"alpha": 4}, "takt_s": 1.0},
        "two": {"components": {"beta": 2}, "takt_s": 9.0},
    }
    trace = board_trace(line_of(tmp_path, boards=boards), boards=3, seed=0)
    expected = [(0.0, "alpha"), (0.5, "alpha"), (1.0, "alpha"), (1.0, "beta"), (1.5, "alpha"), (1.5, "beta")]
    assert [(arrival.at_s, arrival.component) for arrival in trace[:6]] == expected
    assert [arrival.at_s for arrival in trace[6:]] == [10.0, 10.5, 11.0, 11.5]


class TestTexts:
    @pytest.fixture
    def mixed(self, tmp_path):
        image = {"architecture": "fake", "weights": "w.yaml", "labels": ["ok"], "input": {"size": [8, 8]}}
        llm = {"architecture": "llm", "weights": "m"}
        experts = {"cls/a": image, "llm/a": llm, "llm/b": llm, "llm/r": llm | {"labels": ["a", "b"]}}
        texts = {
            "routes": {
                "assistant": {"router": "llm/r", "experts": {"a": "llm/a", "b": "llm/b"}},
                "by-rule": {"otherwise": "llm/a"},
            }
        }
        return line_of(tmp_path, experts=experts, routes={"alpha": [{"expert": "cls/a", "pass": ["ok"]}]}, texts=texts)

    def test_texts_of_a_trace_are_read_beside_images(self, tmp_path, mixed):
        path = trace_file(
            tmp_path,
            {"t": 0, "component": "alpha"},
            {"t": 1, "expert": "llm/a", "prompt": 120, "output": 60},
            {"t": 2, "component": "assistant", "prompt": 1, "output": 0},
        )
        assert read_trace(path, mixed.catalog, is_planned=True) == (
            TracedArrival(0.0, "alpha"),
            TracedArrival(1.0, expert="llm/a", work=Work(120, 60, 180)),
            TracedArrival(2.0, "assistant", work=Work(1, 0, 1)),
        )

    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ({"expert": "llm/a", "output": 4}, "prompt: is missing - tokens of the text"),
            (
                {"expert": "llm/a", "prompt": 0, "output": 4},
                "prompt: 0 is no number of tokens - write a whole number, 1",
            ),
            ({"expert": "llm/a", "prompt": 1, "output": 1.5}, "output: 1.5 is no number of tokens - write a whole"),
            ({"expert": "llm/a", "prompt": 1, "output": 10**9}, "output: 1000000000 is no number of tokens"),
            ({"component": "alpha", "prompt": 1}, "prompt: alpha takes images, which have no tokens - leave it out"),
            (
                {"component": "by-rule", "prompt": 1, "output": 1},
                "component: 'by-rule' is a route of rules, and a trace",
            ),
        ],
    )
    def test_wrong_text_of_a_trace_is_reported_with_its_place(self, tmp_path, mixed, row, expected):
        path = trace_file(tmp_path, {"t": 0, **row})
        (problem,) = problems_of(path, mixed.catalog, is_planned=True)
        assert problem.startswith("trace.jsonl:1:")
        assert expected in problem

    def test_texts_of_a_trace_are_planned_and_not_played(self, tmp_path, mixed):
        path = trace_file(tmp_path, {"t": 0, "expert": "llm/a", "prompt": 1, "output": 1})
        assert "llm/a takes texts, which are planned with but not played" in problems_of(path, mixed.catalog)[0]
