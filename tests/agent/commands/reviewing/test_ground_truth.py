"""What people say of a served line's verdicts: exported, and the ground truth of its next version."""

import json
import re
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database

from agent.records.database import migrations
from agent.records.result_writer import ResultStore
from agent.records.truth.shadow_answers import read_comparison
from tests.agent.commands.rejudging.conftest import ServedLine
from tests.agent.service.fake_line import picture
from tests.commands import coserve
from tests.waiting import until


def printed(*words):
    return json.loads(coserve(*words, "--json", check=0).stdout)


def counts(figures):
    return {name: (figures[name]["count"], figures[name]["of"]) for name in ("precision", "recall", "escapes")}


def review(line, said):
    """The answers of the running agent; ``said``: the person's verdict by the ref of the image."""
    seqs = {row.subject.ref: row.seq for row in line.results.query()}
    return [printed("review", "add", line.file, seqs[ref], f"--{verdict}") for ref, verdict in said.items()]


@pytest.fixture
def line(tmp_path):
    """Six images, all NG by an expert whose shadow calls them OK; people call two of them bad."""
    line = ServedLine(tmp_path)
    line.add_expert(2, has_route=False)
    line.document["experts"]["cls/f0"]["shadow"] = "cls/f2"
    line.fake(0, label="bad")
    line.fake(2, weight_bytes=900_000)
    line.watch()
    for number in range(6):
        line.drop(f"B{number}_c0_R{number}.png", picture((40 * number, 0, 0)))
    with line.served():
        until(lambda: line.unfiled() == 0)
        until(lambda: (found := read_comparison(line.config.results_file, "cls/f0", "cls/f2")) and found.images == 6)
        line.reviews = review(line, {"R0": "ok", "R1": "ok", "R2": "ok", "R3": "ng", "R4": "ng"})
    return line


def test_review_is_added_by_the_running_agent_in_the_name_of_the_caller(line):
    assert [row["finding"] for row in line.reviews] == ["false_call"] * 3 + ["agree"] * 2
    assert {row["who"] for row in line.reviews} == {"owner"}
    with line.served():
        last = line.reviews[-1]["result"]
        done = coserve("review", "add", line.file, last, "--ng", "--label", "Riß", "--reason", "seen", check=0)
        assert done.stdout == f"review 6 of result {last}: agree, by owner\n"
        refused = coserve("review", "add", line.file, "99", "--ok")
        assert (refused.exit_code, "no result 99" in refused.stderr) == (1, True)
    (latest,) = [row for row in printed("review", "list", line.file)["reviews"] if row["seq"] == last]
    assert (latest["number"], latest["label"], latest["reason"]) == (6, "Riß", "seen")
    gone = coserve("review", "add", line.file, "1", "--ok")
    assert (gone.exit_code, "is the agent running" in gone.stderr) == (1, True)


def test_false_call_is_exported_and_counts_for_the_version_that_avoids_it(line):
    export = printed("review", "export", line.write(), line.folder / "data")
    assert (export["crops"], export["left_out"]) == ({"c0/ok": 3, "c0/bad": 2}, {})
    (row,) = printed("experts", "compare", line.file, "cls/f0")["reviewed"]
    assert (row["expert"], row["before"]["images"], row["after"]["images"]) == ("cls/f0", 5, 5)
    assert counts(row["before"]) == {"precision": (2, 5), "recall": (2, 2), "escapes": (0, 2)}
    assert counts(row["after"]) == {"precision": (0, 0), "recall": (0, 2), "escapes": (2, 2)}
    assert (row["before"]["false_calls"]["share"], row["after"]["false_calls"]["share"]) == (1.0, 0.0)
    shown = coserve("experts", "compare", line.file, "cls/f0", check=0).stdout
    assert "cls/f0 on 5 reviewed images: before, then after" in shown
    assert "  precision     2 of 5, 40.0% [11.8%, 76.9%]      none reviewed" in shown


def test_example_of_the_docs_prints_what_it_shows(line, monkeypatch):
    page = (Path(__file__).parents[4] / "docs" / "models.md").read_text("utf-8")
    text = page.partition("## Reviews:")[2].partition("```console\n")[2].partition("```")[0]
    text = text.replace("cls/resistor-0402", "cls/f0").replace("resistor-0402", "c0")
    line.write()
    monkeypatch.chdir(line.folder)
    printed = ""
    for command in re.findall(r"^\$ coserve (.*)$", text, re.MULTILINE):
        printed += f"$ coserve {command}\n" + coserve(*command.split(), check=0).stdout
    assert printed == text


def test_promotion_shows_the_figures_and_warns_of_more_escapes_once(line):
    done = coserve("experts", "promote", line.write(), "cls/f0", check=0)
    assert "escapes       0 of 2, 0.0% [0.0%, 65.8%]        2 of 2, 100.0% [34.2%, 100.0%]" in done.stdout
    assert done.stderr == "WARNING: cls/f0 lets more defects escape than before, by the images that people reviewed\n"
    back = coserve("experts", "promote", line.file, "cls/f0", check=0)  # now other versions stand in the file
    assert ("reviewed images" in back.stdout, back.stderr) == (False, "")


@pytest.mark.parametrize("source", ["reviewed", "results"])
def test_candidate_is_measured_on_the_reviewed_images(line, source):
    row = printed("experts", "compare", line.write(), "cls/f0", "--over", source)
    assert (row["images"], row["ng_to_ok"]) == ((5, 5) if source == "reviewed" else (6, 6))
    (reviewed,) = row["reviewed"]
    assert counts(reviewed["before"])["precision"] == (2, 5)
    assert counts(reviewed["after"])["escapes"] == (2, 2)


def test_rejudged_archive_shows_figures_of_each_expert_before_and_after(line):
    line.fake(0, label="ok")
    row = printed("rejudge", line.write(), "reviewed", "--out", line.folder / "again.parquet")
    (reviewed,) = row["reviewed"]
    assert (reviewed["expert"], row["images"]) == ("cls/f0", 5)
    assert (counts(reviewed["before"])["escapes"], counts(reviewed["after"])["escapes"]) == ((0, 2), (2, 2))


def without_reviews(file):
    with closing(ResultStore(file)) as store:
        store.write(lambda database: database.execute("DELETE FROM reviews"))


def of_the_version_before_reviews(file):
    """Its results and shadows' answers, in a file that no later agent has opened."""
    earlier = file.with_name("earlier.db")
    with closing(Database(earlier)) as database:
        migrations.apply(database, stop_before="version_0_2")
        database.attach("later", file)
        with database.atomic():
            for table in ("results", "shadow_answers", "shadow_drops"):
                columns = ", ".join(column.name for column in database[table].columns)
                database.execute(f"INSERT INTO {table} SELECT {columns} FROM later.{table}")
    earlier.rename(file)


@pytest.mark.parametrize("made", [without_reviews, of_the_version_before_reviews])
def test_comparison_without_reviews_claims_nothing(line, made):
    made(line.config.results_file)
    assert printed("experts", "compare", line.write(), "cls/f0")["reviewed"] == []
    assert "reviewed" not in coserve("experts", "compare", line.file, "cls/f0", check=0).stdout
    assert printed("rejudge", line.file, "results", "--out", line.folder / "again.parquet")["reviewed"] == []
    assert printed("review", "list", line.file) == {"reviews": []}
    assert len(coserve("results", line.file, check=0).stdout.splitlines()) == 6
    for words in (("review", "export", line.file, "data"), ("rejudge", line.file, "reviewed", "--out", "of.parquet")):
        refused = coserve(*words)
        assert (refused.exit_code, "Traceback" in refused.output) == (78, False)
    assert coserve("experts", "promote", line.file, "cls/f0", check=0).stderr == ""
