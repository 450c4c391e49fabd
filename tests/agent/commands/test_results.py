"""`coserve results`: printed rows, and a file that appears whole or not at all."""

import csv
import json
import os
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from agent.cli.records import time_of
from agent.commands import results as command
from agent.records.boards import BoardVerdict
from agent.records.result_writer import ResultStore
from agent.records.verdict import KeptMap
from experts.expert import Verdict
from tests.agent.line_files import LineFile, expert, fake, route
from tests.commands import coserve
from tests.lines import result

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
LATE, NIGHT = (datetime(2026, 11, 28, hour).astimezone() for hour in (22, 0))
ROOT = Path(__file__).parents[3]
PATIENCE_S = 90.0


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


def test_results_written_to_a_file_are_counted(line, tmp_path):
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
        columns = empty.strip().split(",")
        assert len(columns) == len(set(columns)), "each column once"


def test_boards_are_printed_with_their_takt(line, tmp_path):
    absent = tmp_path / "nowhere" / "out.csv"
    done = coserve("results", line, "--boards", "--out", absent)
    assert (done.exit_code, f"{absent}: No such file or directory" in done.stderr) == (78, True)
    assert coserve("results", line, "--boards", "--out", tmp_path / "boards.jsonl").exit_code == 0
    rows = [json.loads(row) for row in (tmp_path / "boards.jsonl").read_text("utf-8").splitlines()]
    assert [(row["serial"], row["takt_s"], row["revisions"]) for row in rows] == [("B0", None, 0), ("B1", 10.0, 0)]


def test_newest_boards_of_a_verdict_are_read_in_parts(line, monkeypatch):
    monkeypatch.setattr("agent.records.result_reader.READ_ROWS", 1)
    for options, serials in (
        ((), ["B0", "B1"]), (("--limit", "1"), ["B1"]), (("--verdict", "OK", "--limit", "1"), ["B0"]),
        (("--since", "2026-05-01T12:00:01+00:00"), ["B1"]), (("--since", "2999-01-01"), []),
    ):  # fmt: skip
        done = coserve("results", line, "--boards", "--json", *options)
        assert [row["serial"] for row in json.loads(done.stdout)["results"]] == serials


def test_unfinished_output_leaves_the_earlier_file_and_no_draft(line, tmp_path):
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


def test_anomaly_maps_are_written_as_pictures_named_in_rows(line, tmp_path):
    with closing(ResultStore(tmp_path / "state" / "results.db")) as store:
        maps = (KeptMap(1, "anomaly/solder", b"\x89PNG"),)
        store.record(result("k9", Verdict.NG, line="test", component="c0", image="x.png", arrived_at=NOON, maps=maps))
    shown = coserve("results", line, "--json", "--maps", tmp_path / "maps")
    rows = json.loads(shown.stdout)["results"]
    assert [row["maps"] for row in rows] == [[], [], [str(tmp_path / "maps" / "3-1-anomaly-solder.png")]]
    assert (tmp_path / "maps" / "3-1-anomaly-solder.png").read_bytes() == b"\x89PNG"
    assert "maps" not in json.loads(coserve("results", line, "--json").stdout)["results"][0]


def typed(*words, **environment):
    """The command as a program of its own, in a shell's environment."""
    command = [sys.executable, "-X", "utf8=0", ROOT / "coserve.py", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PATH": os.environ["PATH"], **environment}
    )


@pytest.mark.parametrize("output", ["csv", "jsonl"])
def test_locale_without_the_characters_of_a_name_gives_rows_in_utf_8(line, output):
    with typed("results", line, "--format", output, LC_ALL="POSIX", PYTHONCOERCECLOCALE="0") as process:
        told, error = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, error) == (0, b"")
    names = [row["image"] for row in csv.DictReader(told.decode("utf-8").splitlines())] if output == "csv" else [
        json.loads(row)["image"] for row in told.splitlines()
    ]  # fmt: skip
    assert names == ["ä0.png", "ä1.png"]


def test_full_disk_ends_a_command_with_one_line(line):
    with Path("/dev/full").open("wb") as full:
        for words in (["results", line], ["results", line, "--json"], ["config", "check", line]):
            done = subprocess.run(
                [sys.executable, ROOT / "coserve.py", *words], stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE_S
            )
            told = b"the output cannot be written: No space left on device - make room there\n"
            said = [each for each in done.stderr.splitlines(keepends=True) if not each.startswith(b"warning: ")]
            assert (done.returncode, said) == (1, [told]), words


def test_closed_pipe_ends_a_command_quietly(line):
    with closing(ResultStore(line.parent / "state" / "results.db")) as store:
        for number in range(2000):  # more than a pipe holds
            store.record(result(f"more{number}", Verdict.OK, line="test", component="c0", image="i" * 100))
    with typed("results", line) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("today", NIGHT), ("Yesterday", NIGHT - timedelta(days=1)), ("90m", LATE - timedelta(minutes=90)),
        ("1h", LATE - timedelta(hours=1)), ("7d ago", LATE - timedelta(days=7)), ("2026-11-28", NIGHT),
        ("2026-11-28 06:00", NIGHT + timedelta(hours=6)),
        ("2026-11-28T06:00+00:00", datetime(2026, 11, 28, 6, tzinfo=UTC)),
    ],
)  # fmt: skip
def test_usual_ways_to_write_a_time_are_understood(said, meant):
    assert time_of(said, "--since", LATE) == meant


@pytest.mark.parametrize("said", ["28.11.2026", "1764288000", "last week", "1", "h", "999999d"])
def test_unknown_way_to_write_a_time_is_refused_with_the_known_ones(line, said):
    for words in (["results", line], ["review", "list", line]):
        done = coserve(*words, "--since", said)
        told = " ".join(done.stderr.replace("\u2502", " ").split())
        assert (done.exit_code, "is not a time - write 2026-01-31" in told) == (2, True)
        assert all(word in told for word in ("today", "yesterday", "1h", "7d"))
