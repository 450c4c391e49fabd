"""Archives judged anew: what is found, how often experts are loaded, what is written, and where a run goes on."""

import errno
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from base64 import b64decode
from collections import Counter
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from importlib.metadata import requires
from io import BytesIO

import pyarrow.parquet as pq
import pytest
from PIL import Image

from agent.commands.rejudging import rejudge as rejudging
from agent.commands.rejudging.agreement import beside, compare_answers
from agent.commands.rejudging.archive import GONE, ArchivedImage, ArchiveQuery, find_images
from agent.commands.rejudging.parts import parts_of, write_part
from agent.commands.rejudging.rejudge import candidate_line, groups_of, judge, patient_agent, rejudge
from agent.core.effects import StartLoad
from agent.core.engine import Engine
from agent.records.database import state_held
from agent.records.result_writer import ResultStore
from agent.subject import Subject
from experts.errors import ConfigError
from tests.agent.line_files import LineFile, expert, fake, route
from tests.agent.service.fake_line import picture
from tests.commands import coserve


def quiet(*_):
    pass


def archived(key, path, component, box=None):
    return ArchivedImage(Subject(key, "", path, datetime.now(UTC), component, box=box), path)


def rows_of(file):
    return pq.read_table(file).to_pylist()


def run_command(*arguments):
    """Exit code, and stdout; stderr where the command failed."""
    result = coserve(*arguments)
    return result.exit_code, result.stderr if result.exit_code else result.stdout


def judged(line, source="results", **query):
    """Rows of a run over the line as it is now, by image and ref."""
    out = line.folder / f"judged-{len(list(line.folder.glob('*.parquet')))}.parquet"
    done = rejudge(line.config, ArchiveQuery(str(source), **query), out, quiet)
    return done, {row["ref"]: row for row in rows_of(out)}


def state_of(line):
    """Files of the line's state, but for snapshots and the database's shared memory, with their content."""
    files = (file for file in (line.folder / "state").rglob("*") if file.is_file() and "-shm" not in file.name)
    return {str(file): file.read_bytes() for file in files if "snapshots" not in file.parts}


@contextmanager
def in_zone(monkeypatch, name):
    with monkeypatch.context() as changed:
        changed.setenv("TZ", name)
        time.tzset()
        yield
    time.tzset()


class TestJudgedImages:
    def test_stored_images_are_judged_where_the_agent_put_them(self, served):
        done, rows = judged(served)
        assert Counter(row["verdict"] for row in rows.values()) == {"OK": 6, "UNKNOWN": 1}
        assert all(row["agrees"] and row["stored_verdict"] == row["verdict"] for row in rows.values())
        assert (done["compared"], done["agreeing"], done["page"]) == (7, 7, None)
        assert rows["R4"]["experts"] == ["cls/f1"]
        assert rows["R4"]["scores"] == [0.9]
        assert rows["R4"]["stored_at"] is not None

    def test_stored_images_are_found_at_their_recorded_place_in_any_time_zone(self, line, monkeypatch):
        line.watch(stale_after_s=0.5)
        with in_zone(monkeypatch, "Etc/GMT-14"):  # 25 hours ahead of the reader
            line.drop("B9_c0_R9.png", b"no image at all")
            line.serve("B0_c0_R0.png")
        with in_zone(monkeypatch, "Etc/GMT+11"):
            places = {row.place for row in line.rows}
            assert all((line.inbox / place).is_file() for place in places)
            assert {place.split("/")[0] for place in places} == {"done", "failed"}
            for forgets_place in (False, True):  # so it is in a row of before
                if forgets_place:
                    with closing(sqlite3.connect(line.config.results_file)) as rows, rows:
                        rows.execute("UPDATE results SET detail = json_remove(detail, '$.place')")
                assert judged(line)[1].keys() == {"R0", "R9"}

    def test_file_moved_long_after_its_verdict_is_found_at_its_recorded_place(self, served):
        (found,) = (served.inbox / "done").rglob("B0_c0_R0.png")
        late = served.inbox / "done" / "2001-02-03" / found.name
        late.parent.mkdir()
        found.rename(late)
        assert judged(served)[0]["left_out"] == {GONE: 1}
        (key,) = [row.subject.key for row in served.rows if row.subject.ref == "R0"]
        with closing(ResultStore(served.config.results_file)) as store:
            store.place(key, "done/2001-02-03/B0_c0_R0.png")
        assert judged(served)[0]["left_out"] == {}

    def test_file_with_other_bytes_than_the_judged_ones_is_unknown(self, served):
        (found,) = (served.inbox / "done").rglob("B0_c0_R0.png")
        seen = found.stat()
        found.write_bytes(found.read_bytes()[:-1] + b"x")
        os.utime(found, ns=(seen.st_atime_ns, seen.st_mtime_ns))
        row = judged(served)[1]["R0"]
        assert row["verdict"] == "UNKNOWN"
        assert "holds another image now than the one that was judged" in row["reason"]

    def test_missing_image_is_left_out_and_counted(self, served):
        next((served.inbox / "done").rglob("B0_c0_R0.png")).unlink()
        done, rows = judged(served)
        assert "R0" not in rows
        assert done["left_out"] == {GONE: 1}

    def test_kept_images_are_judged_and_parts_of_a_frame_are_cut_as_they_were(self, line):
        line.document["records"] = {"images": "all"}
        line.watch(pattern=r"(?P<board>[^_.]+)(_.*)?\.\w+", board_type="main")
        line.serve("B1.png", image=picture(size=(32, 16)))
        with pytest.raises(ConfigError, match="kept has no image to judge"):  # a folder keeps its images itself
            find_images(line.config, ArchiveQuery("kept"))
        line.fake(1, label="bad")
        for source in ("results", line.inbox):
            done, rows = judged(line, source)
            assert {ref: (row["verdict"], row["box"]) for ref, row in rows.items()} == {
                "R1": ("OK", [0, 0, 16, 16]), "R2": ("NG", [16, 0, 32, 16]),
            }  # fmt: skip
            assert (done["compared"], done["agreeing"], done["ok_to_ng"]) == (2, 1, 1)

    def test_folder_of_images_is_named_by_the_pattern_of_the_inbox(self, served, tmp_path):
        folder = tmp_path / "month"
        folder.mkdir()
        for name in ("B7_c0_R7.png", "B8_c9_R8.png", "strange.png"):
            (folder / name).write_bytes(picture())
        done, rows = judged(served, folder)
        assert {ref: (row["board"], row["component"], row["stored_verdict"]) for ref, row in rows.items()} == {
            "R7": ("B7", "c0", None)
        }
        named, strange = sorted(done["left_out"])
        assert named == "no route for the component 'c9'"
        assert strange.startswith("the name does not match the pattern")
        assert (done["images"], done["compared"]) == (1, 0)

    def test_sidecars_name_the_images_of_a_folder(self, line, tmp_path):
        line.watch(identity="sidecar", pattern=None)
        folder = tmp_path / "month"
        folder.mkdir()
        (folder / "one.png").write_bytes(picture())
        (folder / "one.json").write_text(json.dumps({"board": "B1", "component": "c1", "ref": "R1"}))
        done, rows = judged(line, folder)
        assert (done["images"], done["left_out"]) == (1, {})
        assert (rows["R1"]["board"], rows["R1"]["experts"]) == ("B1", ["cls/f1"])

    def test_shelf_of_the_inbox_brings_its_stored_verdicts(self, served):
        served.fake(0, label="bad")
        _, rows = judged(served, served.inbox / "done", component="c0")
        assert {ref: (row["stored_verdict"], row["verdict"]) for ref, row in rows.items()} == {
            f"R{number}": ("OK", "NG") for number in range(4)
        }

    def test_query_narrows_by_time_component_and_expert(self, served):
        now = datetime.now(UTC)
        assert set(judged(served, expert="cls/f1")[1]) == {"R4", "R5"}
        assert len(judged(served, since=now - timedelta(hours=1), until=now)[1]) == 7
        for query, reason in (
            ({"until": now - timedelta(hours=1)}, "no image to judge"), ({"component": "c9"}, "no route for component"),
            ({"expert": "cls/f9"}, "no expert 'cls/f9'"),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=reason):
                find_images(served.config, ArchiveQuery("results", **query))

    def test_image_kept_in_the_archive_is_found_by_its_result(self, line):
        line.document["records"] = {"images": "all"}
        line.watch()
        line.serve("B0_c0_R0.png")
        (line.folder / "state" / "images" / "d").mkdir(parents=True)
        (line.folder / "state" / "images" / "d" / "x.png").write_bytes(picture())
        with sqlite3.connect(line.config.results_file) as database:
            database.execute("UPDATE results SET kept_as = 'd/x.png'")
        _, rows = judged(line, "kept")
        assert rows["R0"]["path"].endswith("images/d/x.png")


class TestJudgement:
    def test_each_expert_is_loaded_once_though_memory_holds_three_of_seven(self, tmp_path, monkeypatch):
        """Six classifiers take turns, each before one detector that all of them share."""
        names = [f"cls/f{number}" for number in range(6)]
        for name in (*names, "det/last"):
            fake(tmp_path / f"{name[4:]}.yaml", 4_000_000, K_s=0.001)
        line = LineFile(
            tmp_path,
            experts={name: expert(f"{name[4:]}.yaml") for name in (*names, "det/last")},
            routes={f"c{number}": route(name, "det/last") for number, name in enumerate(names)},
            memory={"host": "14MiB", "workspace": "1MiB"},
        )
        Image.new("RGB", (8, 8)).save(tmp_path / "i.png")
        loads, handle = Counter(), Engine.handle

        def counted(engine, event, now):
            effects = handle(engine, event, now)
            loads.update(effect.copy for effect in effects if isinstance(effect, StartLoad))
            return effects

        monkeypatch.setattr(Engine, "handle", counted)
        file = str(tmp_path / "i.png")
        images = [archived(str(number), file, f"c{number % 6}") for number in range(90)]
        config = line.config
        with patient_agent(config, quiet) as (agent, requests):
            (rows,) = judge(config, requests, images, quiet)
            statistics = agent.loop.statistics().engine
        assert {tuple(row["experts"]) for row in rows} == {(name, "det/last") for name in names}
        assert set(loads.values()) == {1}
        assert sum(statistics.loads.values()) == len(loads) == 7

    def test_groups_follow_the_experts_and_keep_parts_of_a_frame_together(self, served, monkeypatch):
        monkeypatch.setattr(rejudging, "GROUP_IMAGES", 4)
        images = [archived(f"{number}", f"{number}.png", f"c{number % 3 // 2}") for number in range(9)]
        images += [
            archived(f"f{frame}#{part}", f"f{frame}.png", f"c{part}", (0, 0, 1, 1))
            for part in range(2) for frame in range(20)
        ]  # fmt: skip
        groups = list(groups_of(images, served.config.catalog.graph))
        components = [[image.subject.component for image in group] for group in groups[:3]]
        assert components == [["c0"] * 4, ["c0"] * 2 + ["c1"] * 2, ["c1"]]
        frames = [{image.path for image in group} for group in groups[3:]]
        assert [len(each) for each in frames] == [16, 4]
        keys = [image.subject.key for group in groups for image in group]
        assert len(keys) == len(set(keys)) == 49

    def test_rejudging_beside_an_agent_changes_nothing_of_its_state(self, served):
        served.fake(0, label="bad")
        with state_held(served.config.state):
            before = state_of(served)
            done, _ = judged(served)
            assert state_of(served) == before
        assert done["ok_to_ng"] == 4
        assert list((served.config.state / "snapshots").iterdir()) == []


class TestParts:
    def test_interrupted_rejudging_resumes_where_it_stopped(self, served, tmp_path, monkeypatch):
        out, query = tmp_path / "out.parquet", ArchiveQuery("results")
        stored = rejudging.stored_answers

        answered = []

        def first_group_alone(config, keys):
            answered.extend(keys)
            if len(answered) > 3:
                raise KeyboardInterrupt
            return stored(config, keys)

        monkeypatch.setattr(rejudging, "GROUP_IMAGES", 3)
        monkeypatch.setattr(rejudging, "stored_answers", first_group_alone)
        with pytest.raises(KeyboardInterrupt):
            rejudge(served.config, query, out, quiet)
        assert not out.exists()
        monkeypatch.setattr(rejudging, "stored_answers", stored)
        seen = []
        done = rejudge(served.config, query, out, lambda *told: seen.append(told))
        assert (done["resumed"], done["images"]) == (3, 7)
        assert [count for stage, count, _ in seen if stage == "rejudge"] == [4, 5, 6, 7]
        assert len({row["key"] for row in rows_of(out)}) == pq.read_metadata(out).num_rows == 7
        assert not (tmp_path / "out.parquet.parts").exists()

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda line: line.fake(0, label="bad"), "another weights"),
            (lambda line: line.document.update(scheduling={"max_overtake_s": 7.0}), "another line file"),
            (lambda line: None, "another selection of images"),
        ],
    )
    def test_parts_of_other_weights_or_another_line_are_refused(self, served, tmp_path, monkeypatch, change, reason):
        out = tmp_path / "out.parquet"
        with monkeypatch.context() as broken:
            broken.setattr("agent.commands.rejudging.parts.merged_rows", lambda folder, file: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                rejudge(served.config, ArchiveQuery("results"), out, quiet)
        change(served)
        component = "c0" if "selection" in reason else None
        with pytest.raises(ConfigError, match=f"begun with {reason}.*remove that folder"):
            rejudge(served.config, ArchiveQuery("results", component=component), out, quiet)
        assert len(list((tmp_path / "out.parquet.parts").iterdir())) == 1

    def test_full_disk_or_a_second_run_ends_rejudging_with_a_message_and_keeps_answers(
        self, served, tmp_path, monkeypatch
    ):
        out, query = tmp_path / "out.parquet", ArchiveQuery("results")

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr("agent.commands.rejudging.parts.pq.ParquetWriter", full)
            with pytest.raises(ConfigError, match="No space left on device - what is judged is kept"):
                rejudge(served.config, query, out, quiet)
        with parts_of(out), pytest.raises(ConfigError, match="another run writes it"):
            rejudge(served.config, query, out, quiet)
        assert rejudge(served.config, query, out, quiet)["resumed"] == 7

    def test_refused_second_run_leaves_the_folder_of_the_first(self, served, tmp_path):
        out = tmp_path / "out.parquet"
        with parts_of(out) as folder:  # no part is written yet
            with pytest.raises(ConfigError, match="another run writes it"):
                rejudge(served.config, ArchiveQuery("results"), out, quiet)
            assert folder.is_dir()
            write_part(folder, {"line file": "a"}, [])
        assert len(list(folder.iterdir())) == 1

    def test_damaged_part_is_named_and_its_images_are_judged_again(self, served, tmp_path, monkeypatch):
        out, query = tmp_path / "out.parquet", ArchiveQuery("results")
        monkeypatch.setattr(rejudging, "GROUP_IMAGES", 3)
        with monkeypatch.context() as broken:
            broken.setattr("agent.commands.rejudging.parts.merged_rows", lambda folder, file: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                rejudge(served.config, query, out, quiet)
        first, *_ = sorted((tmp_path / "out.parquet.parts").iterdir())
        first.write_bytes(b"not Parquet")
        with pytest.raises(ConfigError, match=f"{first.name} is damaged .* - remove it"):
            rejudge(served.config, query, out, quiet)
        first.unlink()
        assert rejudge(served.config, query, out, quiet)["resumed"] == 4
        assert len({row["key"] for row in rows_of(out)}) == len(rows_of(out)) == 7

    def test_existing_output_file_is_not_replaced(self, served, tmp_path):
        (tmp_path / "out.parquet").write_text("dear")
        code, output = run_command("rejudge", served.write(), "results", "--out", tmp_path / "out.parquet")
        assert (code, (tmp_path / "out.parquet").read_text()) == (78, "dear")
        assert "exists - name another file" in output

    def test_missing_pyarrow_or_ray_is_named_with_its_extra_before_any_work(self, served, tmp_path, monkeypatch):
        arguments = ("rejudge", served.write(), "results", "--out", tmp_path / "out.parquet")
        monkeypatch.setattr("agent.cluster.extra.find_spec", lambda name: None)
        code, output = run_command(*arguments, "--cluster", "auto")
        assert (code, "coserve[cluster]" in output) == (78, True)
        monkeypatch.delitem(sys.modules, "agent.commands.rejudging.parts")
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        code, output = run_command(*arguments)
        assert (code, "pip install 'coserve[cluster]'" in output) == (78, True)
        assert not list(tmp_path.glob("out*"))


class TestComparison:
    def test_flips_are_counted_printed_and_shown_on_one_page(self, served, tmp_path):
        served.fake(1, label="bad")
        arguments = ("rejudge", served.write(), "results", "--out", tmp_path / "out.parquet")
        code, output = run_command(*arguments)
        assert code == 0
        assert "71.43%: 5 of 7 have the same verdict and label" in output
        assert "2 OK to NG, 0 NG to OK, 0 to UNKNOWN, 0 from UNKNOWN" in output
        assert "c1, cls/f1: 2 ok to ng of 2" in output
        page = (tmp_path / "out.html").read_text()
        assert page.count("<figure>") == page.count("data:image/jpeg;base64,") == 2
        assert not [word for word in ("<script", "http://", "https://", 'src="/') if word in page]
        thumbnail = page.partition("base64,")[2].partition('"')[0]
        assert Image.open(BytesIO(b64decode(thumbnail))).size == (8, 8)
        assert "<h2>OK to NG: 2</h2>" in page
        assert 'was <b class="OK">OK</b> ok 0.900<br>now <b class="NG">NG</b> bad 0.900' in page
        assert "<tr><td>c1<td>cls/f1<td>2<td>0<td>0<td>2<td>0<td>0<td>0" in page
        for file in tmp_path.glob("out.*"):
            file.unlink()
        row = json.loads(run_command(*arguments, "--json")[1])
        assert (row["images"], row["agreeing"], row["ok_to_ng"]) == (7, 5, 2)
        assert row["places"][0] | {"images": 2, "ok_to_ng": 2} == row["places"][0]

    def test_flips_on_the_page_are_most_certain_first_and_bounded(self):
        def row(number, before, now, scores):
            old, new = ({"verdict": each, "label": "l"} for each in (before, now))
            answer = new | {"key": str(number), "component": "c0", "score": scores[1], "experts": []}
            return beside(answer, old | {"score": scores[0]})

        rows = [
            row(0, "OK", "NG", (0.9, 0.5)), row(1, "OK", "NG", (0.8, 0.8)), row(2, "OK", "OK", (1.0, 1.0)),
            row(3, "NG", "OK", (0.99, 0.9)), row(4, "OK", "UNKNOWN", (0.9, None)), row(5, "UNKNOWN", "NG", (None, 0.9)),
        ]  # fmt: skip
        figures, flips = compare_answers(rows, most=3)
        assert [each["key"] for each in flips] == ["3", "1", "0"]
        counts = {"agreeing": 1, "other_label": 0, "ok_to_ng": 2, "ng_to_ok": 1, "to_unknown": 1, "from_unknown": 1}
        assert figures.items() >= counts.items()

    def test_file_name_is_escaped_on_the_page(self, served, tmp_path):
        name = "B<script>_c1_R7.png"
        served.serve(name)
        served.fake(1, label="bad")
        done, _ = judged(served)
        page = done["page"].read_text()
        assert "<script" not in page
        assert "B&lt;script&gt;" in page


class TestCandidates:
    def test_candidate_is_compared_with_the_present_expert_over_stored_images(self, served, tmp_path):
        fake(tmp_path / "candidate.yaml", 2_000_000, label="bad")
        packed = state_of(served)
        arguments = ("experts", "compare", served.write(), "cls/f1", "--over", "results")
        code, output = run_command(*arguments, "--weights", tmp_path / "candidate.yaml", "--page", tmp_path / "c.html")
        assert code == 0, output
        assert "0.00%: 0 of 2 have the same verdict and label" in output
        assert "2 OK to NG" in output
        assert (tmp_path / "c.html").read_text().count("<figure>") == 2
        assert state_of(served) == packed
        row = json.loads(run_command(*arguments, "--weights", tmp_path / "f1.yaml", "--json")[1])
        assert (row["images"], row["agreement"]) == (2, 1.0)

    def test_shadow_is_the_candidate_if_no_weights_are_given(self, served):
        served.add_expert(2, has_route=False)
        served.fake(2, label="bad")
        with pytest.raises(ConfigError, match="no shadow"):
            candidate_line(served.config, "cls/f1", None)
        served.document["experts"]["cls/f1"]["shadow"] = "cls/f2"
        code, output = run_command("experts", "compare", served.write(), "cls/f1", "--over", "results", "--json")
        assert (code, json.loads(output)["ok_to_ng"]) == (0, 2)

    def test_candidate_that_cannot_run_is_refused_before_any_image_is_judged(self, served, tmp_path):
        (tmp_path / "broken.yaml").write_text("weight_bytes: none")
        code, output = run_command(
            "experts", "compare", served.write(), "cls/f1", "--over", "results", "--weights", tmp_path / "broken.yaml"
        )
        assert code == 78
        assert "the candidate version of cls/f1 cannot run" in output


def test_archive_extra_has_what_the_commands_need():
    declared = [line for line in requires("coserve") or () if 'extra == "cluster"' in line]
    assert not declared or {re.match("[a-z]+", line)[0] for line in declared} == {"pyarrow", "ray"}
    look = "import agent.commands.rejudging.rejudge, agent.deployment.build, sys; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], check=True)  # a process of its own: other tests use ray
