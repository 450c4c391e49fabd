"""`coserve results`: printed rows, and a file that appears whole or not at all."""

import csv
import json
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from agent.cli.app import app
from agent.commands import results as command
from agent.records.boards import BoardVerdict
from agent.records.result_writer import ResultStore
from agent.records.results import KeptMap
from experts.expert import Verdict
from tests.agent.line_files import LineFile, expert, fake, route
from tests.lines import result

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


def coserve(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def line(tmp_path):
    """A line that has judged two boards of one image each."""
    fake(tmp_path / "f.yaml")
    file = LineFile(tmp_path, experts={"cls/f": expert("f.yaml")}, routes={"c0": route("cls/f")}).write()
    with closing(ResultStore(tmp_path / "state" / "results.db")) as store:
        for number, verdict in enumerate((Verdict.OK, Verdict.NG)):
            at = NOON + timedelta(seconds=10 * number)
            told = {"line": "test", "component": "c0", "image": f"ä{number}.png", "board": f"B{number}"}
            store.record(result(f"k{number}", verdict, arrived_at=at, seconds=0.5, **told))
            takt_s = 10.0 if number else None
            store.record_board(BoardVerdict(f"B{number}", "main", verdict, at, at, {}, {verdict: 1}, takt_s=takt_s))
    return file


def test_results_go_to_a_file_and_say_how_many(line, tmp_path):
    done = coserve("results", line, "--out", tmp_path / "out.jsonl")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'out.jsonl'}: 2 rows\n")
    rows = [json.loads(row) for row in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [(row["seq"], row["image"], row["verdict"]) for row in rows] == [(1, "ä0.png", "OK"), (2, "ä1.png", "NG")]
    done = coserve("results", line, "--format", "csv", "--verdict", "NG", "--out", tmp_path / "out.csv", "--json")
    assert json.loads(done.stdout) == {"file": str(tmp_path / "out.csv"), "rows": 1}
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as stream:
        assert [row["image"] for row in csv.DictReader(stream)] == ["ä1.png"]
    assert coserve("results", line, "--format", "csv", "--bom").stdout.startswith("\ufeffseq,key,")
    assert coserve("results", line, "--format", "csv", "--bom", "--out", tmp_path / "out.csv").exit_code == 0
    assert (tmp_path / "out.csv").read_bytes().startswith(b"\xef\xbb\xbfseq,key,")
    assert b"\r" not in (tmp_path / "out.csv").read_bytes()
    for options in ((), ("--boards",)):
        filled = coserve("results", line, "--format", "csv", *options).stdout
        empty = coserve("results", line, "--format", "csv", "--verdict", "UNKNOWN", *options).stdout
        assert filled.splitlines()[:1] == empty.splitlines(), "a header, also without rows"


def test_boards_have_their_takt(line, tmp_path):
    absent = tmp_path / "nowhere" / "out.csv"
    done = coserve("results", line, "--boards", "--out", absent)
    assert (done.exit_code, f"{absent}: No such file or directory" in done.stderr) == (78, True)
    assert coserve("results", line, "--boards", "--out", tmp_path / "boards.jsonl").exit_code == 0
    rows = [json.loads(row) for row in (tmp_path / "boards.jsonl").read_text("utf-8").splitlines()]
    assert [(row["serial"], row["takt_s"], row["revisions"]) for row in rows] == [("B0", None, 0), ("B1", 10.0, 0)]


def test_the_newest_boards_of_a_verdict_are_read_in_parts(line, monkeypatch):
    monkeypatch.setattr("agent.records.result_reader.READ_ROWS", 1)
    for options, serials in (
        ((), ["B0", "B1"]), (("--limit", "1"), ["B1"]), (("--verdict", "OK", "--limit", "1"), ["B0"]),
        (("--since", "2026-05-01T12:00:01+00:00"), ["B1"]), (("--since", "2999-01-01"), []),
    ):  # fmt: skip
        done = coserve("results", line, "--boards", "--json", *options)
        assert [row["serial"] for row in json.loads(done.stdout)["results"]] == serials


def test_a_file_that_could_not_be_finished_leaves_the_old_one_and_no_draft(line, tmp_path):
    """No partial file appears under the file's name."""
    target = tmp_path / "out" / "results.csv"
    target.parent.mkdir()
    target.write_text("as it was")

    def rows():
        yield {"seq": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        command.write_file(rows(), "csv", target)
    assert target.read_text() == "as it was"
    assert [path.name for path in target.parent.iterdir()] == ["results.csv"]


def test_maps_are_written_as_pictures_that_rows_name(line, tmp_path):
    with closing(ResultStore(tmp_path / "state" / "results.db")) as store:
        maps = (KeptMap(1, "anomaly/solder", b"\x89PNG"),)
        store.record(result("k9", Verdict.NG, line="test", component="c0", image="x.png", arrived_at=NOON, maps=maps))
    shown = coserve("results", line, "--json", "--maps", tmp_path / "maps")
    rows = json.loads(shown.stdout)["results"]
    assert [row["maps"] for row in rows] == [[], [], [str(tmp_path / "maps" / "3-1-anomaly-solder.png")]]
    assert (tmp_path / "maps" / "3-1-anomaly-solder.png").read_bytes() == b"\x89PNG"
    assert "maps" not in json.loads(coserve("results", line, "--json").stdout)["results"][0]
