"""Usage probabilities by hand: computed, counted on samples by the real engine, and learned from served history."""

import io
import json
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.commands.results import result_rows
from agent.device_profile.records import UsageOrigin
from agent.records.export import write_rows
from agent.records.result_writer import ResultStore
from agent.records.verdict import Step
from experts.errors import ConfigError
from experts.expert import Verdict
from experts.graph import ExpertGraph, RouteStep
from profiler.usage import (
    FEW_REQUESTS,
    RouteCount,
    usage_from_results,
    usage_from_samples,
)
from tests.lines import result
from tests.pictures import saved
from tests.profiler.lines import fakes, write_line

GOOD_RED, BAD_RED = 40, 160  # of an image that a fake without a label of its own calls ok, and bad
NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN
SERVED_ROWS = [(("cls/a", "det/x"), OK), (("cls/a", "det/x"), OK), (("cls/a",), NG), (("cls/b", "det/x"), NG)]


def quiet(stage, done, total):
    pass


@pytest.fixture
def line(tmp_path):
    """Two components, each with its classifier, and a detector after both; cls/b always finds a defect."""
    experts, step = {}, {"pass": ["ok"]}
    for name, label in (("cls/a", "ok"), ("cls/b", "bad"), ("det/x", "ok")):
        weights = f"{name[-1]}.yaml"
        (tmp_path / weights).write_text(json.dumps({"weight_bytes": 100_000, "label": label}))
        experts[name] = fakes(1, weights, labels=["ok", "bad"])["experts"]["cls/f0"]
    routes = {
        component: [{"expert": name, **step}, {"expert": "det/x", **step}]
        for component, name in (("c0", "cls/a"), ("c1", "cls/b"))
    }
    sections = {
        "boards": {"one": {"components": {"c0": 3, "c1": 1}}},
        "memory": {"host": "20MiB", "workspace": "10MiB"},
    }
    return write_line(tmp_path, {"line": "test", "state": "./state", "experts": experts, "routes": routes} | sections)


def crops(folder, component, count, label="any", red=None):
    for number in range(count):
        saved(folder / component / label / f"{number}.png", (number if red is None else red, 100, 30))


def serve(config, rows, line="test"):
    """A results database with these (experts, verdict) rows."""
    path = config.state / "results.db"
    with closing(ResultStore(path)) as store:
        for number, (experts, verdict) in enumerate(rows):
            steps = (Step("det/a", 'a "quoted", one'),)
            at = NOON + timedelta(seconds=number)
            store.record(result(f"{line}-{number}", verdict, line=line, finished_at=at, experts=experts, steps=steps))
    return path


def test_usage_counted_on_samples_weighs_components_as_the_boards_do(line, tmp_path):
    """2 images of c0 stand for 6 requests of 8, 6 of c1 for 2. All together: 12 of 14 pass, (12 + 0.5) / 15 = 5 / 6.

    cls/a: (6 + 5/6) / 7; cls/b: (0 + 5/6) / 3; det/x: 0.75 and 0.25 of those.
    """
    crops(tmp_path / "crops", "c0", 2)
    crops(tmp_path / "crops", "c1", 6)
    found = usage_from_samples(line, tmp_path / "crops", quiet)
    rates = {"cls/a": (6 + 5 / 6) / 7, "cls/b": (5 / 6) / 3, "det/x": (6 + 5 / 6) / 7}
    assert found.usage.pass_rates == pytest.approx(rates)
    after = 0.75 * rates["cls/a"] + 0.25 * rates["cls/b"]
    assert found.usage.probabilities == pytest.approx({"cls/a": 0.75, "cls/b": 0.25, "det/x": after})
    assert (found.usage.origin, found.usage.requests) == (UsageOrigin.COUNTED, 8)
    assert found.notes == (f"only 8 requests were counted: rough until there are {FEW_REQUESTS}",)


def test_count_of_some_samples_keeps_the_folders_mix_of_good_and_bad(line, tmp_path):
    """A tenth of 200 is bad, and of the 100 that are run, give or take one: 90 of 100 pass, and then one more."""
    (tmp_path / "a.yaml").write_text(json.dumps({"weight_bytes": 100_000}))  # by the colour of what it sees
    crops(tmp_path / "crops", "c0", 180, "ok", red=GOOD_RED)
    crops(tmp_path / "crops", "c0", 20, "missing", red=BAD_RED)
    usage = usage_from_samples(line, tmp_path / "crops", quiet, most=100).usage
    assert usage.requests == 100
    assert usage.pass_rates["cls/a"] == pytest.approx(0.9, abs=0.011)


def test_missing_samples_are_noted(line, tmp_path):
    crops(tmp_path / "crops", "c0", 3)
    (tmp_path / "crops" / "c0" / "any" / "3.png").write_bytes(b"no image")
    found = usage_from_samples(line, tmp_path / "crops", quiet)
    assert found.usage.requests == 3
    assert found.usage.probabilities["cls/b"] == 0.25
    assert 0 < found.usage.pass_rates["cls/b"] < 1
    broken, missing, few = found.notes
    assert broken.startswith("1 files are broken and were left out: ")
    assert missing.startswith("no sample of 1 components, ")
    assert missing.endswith(": c1")
    assert few.startswith("only 3 requests")


def test_samples_without_a_judgeable_image_are_an_error(line, tmp_path):
    with pytest.raises(ConfigError, match="line test has no sample image yet - let it serve first"):
        usage_from_samples(line, None, quiet)
    crops(tmp_path / "crops", "c0", 2)
    (tmp_path / "a.yaml").write_text("weight_bytes: none")
    with pytest.raises(ConfigError, match=r"none of 2 sample images could be judged: .*a\.yaml does not declare"):
        usage_from_samples(line, tmp_path / "crops", quiet)


@pytest.mark.parametrize("output", ["database", "jsonl", "csv"])
def test_usage_is_learned_from_served_results(line, tmp_path, output):
    """4 rows; all together 5 of 7 pass: (5 + 0.5) / 8 = 0.6875. cls/a: (2 + 0.6875) / 4, cls/b: (1 + 0.6875) / 2.

    One request more, half c0 and half c1, reaches det/x with (0.671875 + 0.84375) / 2.
    """
    file = serve(line, [*SERVED_ROWS, ((), UNKNOWN)])
    if output != "database":
        text, file = io.StringIO(), tmp_path / "printed"
        write_rows(result_rows(line, None, None, None), output, text)
        file.write_text(text.getvalue())
    usage = usage_from_results(file, line).usage
    assert usage.pass_rates == pytest.approx({"cls/a": 0.671875, "cls/b": 0.84375, "det/x": 0.671875})
    expected = {"cls/a": 3.5 / 5, "cls/b": 1.5 / 5, "det/x": (3 + 0.7578125) / 5}
    assert usage.probabilities == pytest.approx(expected)
    assert (usage.origin, usage.requests) == (UsageOrigin.SERVED, 4)


def test_request_that_ended_unknown_gives_no_evidence_on_its_last_expert(line):
    served = usage_from_results(serve(line, [*SERVED_ROWS, (("cls/b",), UNKNOWN)]), line).usage
    assert served.requests == 5
    assert served.pass_rates["cls/b"] == pytest.approx(0.84375)
    assert served.probabilities["cls/b"] == pytest.approx((2 + 0.5) / 6)


def test_rows_left_out_of_a_history_are_counted_in_notes(line):
    serve(line, [(("cls/a",), OK)] * 3, line="other")
    rows = [*SERVED_ROWS, (("cls/a", "det/gone"), OK), (("cls/gone",), NG), (("cls/gone",), NG), ((), UNKNOWN)]
    found = usage_from_results(serve(line, rows), line)
    assert found.usage.requests == 4
    assert found.notes == (
        "rows of other lines: 3 of other",
        "3 rows name experts that this line does not have: cls/gone (2), det/gone (1)",
        "1 rows have no expert: their images could not be judged",
        f"only 4 requests were counted: rough until there are {FEW_REQUESTS}",
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"history: cannot be read \(No such file or directory\) - name"),
        (b"SQLite format 3\0 and no more", "not a results database of this version"),
        (b"\x89PNG\r\n\x1a\n", "neither a database nor text"),
        (b"", "no column line, experts, verdict - name a results"),
    ],
)
def test_files_that_are_no_history_are_refused(line, tmp_path, content, said):
    if content is not None:
        (tmp_path / "history").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        usage_from_results(tmp_path / "history", line)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"line": "test", "experts": ["cls/a"]', r"rows:2:1: syntax: not JSON .* - remove this line"),
        ("[1]", r"rows:2:1: syntax: not a JSON object"),
        ('{"line": "test", "verdict": "OK"}', r"rows:2:1: experts: is missing"),
        ('{"line": "test", "verdict": "OK", "experts": "cls/a"}', r"rows:2:1: experts: 'cls/a' is no list of experts"),
        ('{"line": "test", "verdict": "OK", "experts": ["a", "a"]}', r"rows:2:1: experts: .* names an expert twice"),
        ('{"line": "test", "verdict": "FINE", "experts": []}', r"rows:2:1: verdict: 'FINE' is not OK, NG, UNKNOWN"),
    ],
)
def test_unreadable_row_is_an_error_with_its_place(line, tmp_path, row, message):
    file = tmp_path / "rows"
    file.write_text('{"line": "test", "verdict": "OK", "experts": ["cls/a"]}\n' + row + "\n")
    with pytest.raises(ConfigError, match=message):
        usage_from_results(file, line)


def test_history_without_usable_rows_is_an_error(line):
    path = serve(line, [])
    with pytest.raises(ConfigError, match="holds no result yet - let the line serve first"):
        usage_from_results(path, line)
    serve(line, SERVED_ROWS, line="other")
    with pytest.raises(
        ConfigError, match=r"no row of line 'test', only of other \(4\) - name the results of this line"
    ):
        usage_from_results(path, line)
    serve(line, [(("cls/gone",), OK)])
    with pytest.raises(ConfigError, match="none of its 1 rows of line 'test' names an expert of it"):
        usage_from_results(path, line)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([OK, NG, UNKNOWN])), max_size=60))
def test_no_expert_has_probability_zero_and_first_experts_add_up_to_one(drawn):
    routes = {
        f"c{number}": (RouteStep(f"e{number}", frozenset({"ok"})), RouteStep("det", frozenset({"ok"})))
        for number in range(4)
    }
    graph = ExpertGraph([*(f"e{number}" for number in range(4)), "det"], routes)
    count = RouteCount()
    for number, steps, verdict in drawn:
        count.add([f"e{number}", "det"][: 1 + steps % 2], verdict)
    rates = count.pass_rates(dict.fromkeys(graph.experts))
    usage = count.probabilities(graph, rates)
    assert all(0 < rate < 1 for rate in rates.values())
    assert all(0 < probability < 1 for probability in usage.values())
    assert sum(usage[f"e{number}"] for number in range(4)) == pytest.approx(1.0)
