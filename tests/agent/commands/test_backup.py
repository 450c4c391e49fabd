"""Backup of a line, and restore."""

import json
import os
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from datetime import UTC, datetime
from hashlib import sha256

import pytest

from agent.commands.backup import back_up, restore
from agent.config import read_line
from agent.faults.errors import AlreadyRunning
from agent.line_file.promotions import keeping_promotions, promotion_of
from agent.records.database import state_held
from agent.records.result_reader import ResultReader
from agent.records.result_writer import ResultStore
from agent.records.station.alarms import open_alarms, raise_alarm
from agent.records.station.audit import AuditTrail, audit_page
from agent.records.station.reviews import ReviewReader, Reviews
from agent.records.station.shifts import Shifts
from experts.errors import ConfigError
from experts.expert import Verdict
from tests.lines import result

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
LINE = """
line: demo
state: ./state
experts:
  cls/r: {architecture: resnet18, weights: r.safetensors, labels: [ok, bad],
          input: {size: [64, 64], normalize: imagenet}}
routes:
  r: [{expert: cls/r, pass: [ok]}]
"""


def judged(config, *keys):
    with closing(ResultStore(config.results_file)) as store:
        for key in keys:
            store.record(result(key, Verdict.NG))
        while store.statistics().pending:
            time.sleep(0.001)


def test_backup_restores_reviews_audit_and_alarms(config, tmp_path):
    with closing(ResultStore(config.results_file)) as store:
        review = Reviews(store, Shifts((NOON.time(),)), lambda: NOON).add(1, Verdict.OK, "ann")
        AuditTrail(store, lambda: NOON).record("ann", "operate", "review", "1", "done", "ab")
        store.write(lambda database: raise_alarm(database, "disk", "no room", NOON))
    audited, alarms = audit_page(config.results_file), open_alarms(config.results_file)
    back_up(config, tmp_path / "backup")
    config.results_file.unlink()
    restore(tmp_path / "line.yaml", tmp_path / "backup")
    assert ReviewReader(config.results_file).of_result(1) == (review,)
    assert audit_page(config.results_file) == audited != ()
    assert open_alarms(config.results_file) == alarms != []


def keys(config):
    return [row.subject.key for row in ResultReader(config.results_file).query()]


def calibration_of(config):
    return config.packed_folder / "calibrations" / "cls" / "r.json"


def identity(config):
    with closing(sqlite3.connect(config.results_file)) as connection:
        return connection.execute("SELECT id FROM identity").fetchone()[0]


@pytest.fixture
def config(tmp_path):
    (tmp_path / "line.yaml").write_text(LINE)
    config = read_line(tmp_path / "line.yaml")
    judged(config, "a", "b")
    config.profile_file.write_bytes(b"measured")
    calibration_of(config).parent.mkdir(parents=True)
    calibration_of(config).write_text("{}")
    return config


def test_restore_brings_back_the_backup_and_puts_existing_files_aside(config, tmp_path):
    back_up(config, tmp_path / "saved")
    judged(config, "c")
    config.profile_file.write_bytes(b"other")
    calibration_of(config).write_text("newer")
    before = identity(config)
    done = restore(tmp_path / "line.yaml", tmp_path / "saved")
    assert keys(config) == ["a", "b"]
    assert config.profile_file.read_bytes() == b"measured"
    assert identity(config) != before, "its numbers come again: no reader may take them for the earlier ones"
    assert calibration_of(config).read_text() == "{}"
    assert not done.is_line_file_kept
    aside = {path.name.partition(".replaced-")[0]: path for path in done.aside}
    assert aside["r.json"].read_text() == "newer"
    assert aside["profile.db"].read_bytes() == b"other"
    with closing(sqlite3.connect(aside["results.db"])) as connection:
        assert connection.execute("SELECT count(*) FROM results").fetchone() == (3,)


def test_promotions_and_proofs_are_restored_from_a_backup(config, tmp_path):
    entry = config.document.values["experts"]["cls/r"]
    experts = {"cls/r": entry | {"shadow": "cls/n"}, "cls/n": entry | {"weights": "n.safetensors"}}
    (tmp_path / "line.yaml").write_text(json.dumps(config.document.values | {"experts": experts}))
    config = read_line(tmp_path / "line.yaml")
    made = promotion_of(config.document, "cls/r", "cls/n", "ann", "2026-05-01")
    with keeping_promotions(config.state, [made]):
        (config.state / "proofs.json").write_text("[]")
    back_up(read_line(tmp_path / "line.yaml"), tmp_path / "saved")
    (config.state / "promotions.json").unlink()
    (config.state / "proofs.json").unlink()
    restore(tmp_path / "line.yaml", tmp_path / "saved")
    assert read_line(tmp_path / "line.yaml").promotions == (made,)
    assert (config.state / "proofs.json").read_text() == "[]"


class Killed(BaseException):
    """Not caught by `except Exception`."""


def test_restore_killed_at_any_step_leaves_the_earlier_or_the_restored_results(config, tmp_path, monkeypatch):
    back_up(config, tmp_path / "saved")
    judged(config, "c")
    left = [0]

    def killing(call):
        def called(*given, **named):
            left[0] -= 1
            if not left[0]:
                raise Killed
            return call(*given, **named)

        return called

    for name in ("link", "rename", "replace"):
        monkeypatch.setattr(os, name, killing(getattr(os, name)))
    for step in range(1, 9):
        left[0] = step
        with suppress(Killed):
            restore(tmp_path / "line.yaml", tmp_path / "saved")
        assert config.results_file.exists(), f"killed at step {step}"
        assert keys(config) in (["a", "b"], ["a", "b", "c"])
    left[0] = 0
    restore(tmp_path / "line.yaml", tmp_path / "saved")
    assert keys(config) == ["a", "b"]


def test_log_of_a_killed_restore_is_not_replayed_into_the_next_one(config, tmp_path):
    back_up(config, tmp_path / "saved")
    restoring = config.results_file.with_name("results.db.restoring")
    with closing(sqlite3.connect(shutil.copy(config.results_file, tmp_path / "other.db"))) as connection:
        connection.execute("UPDATE results SET key = 'of another backup' || seq")
        connection.commit()
        shutil.copy(tmp_path / "other.db-wal", f"{restoring}-wal")
    restore(tmp_path / "line.yaml", tmp_path / "saved")
    assert keys(config) == ["a", "b"]


def test_line_is_restored_where_nothing_of_it_is_left(config, tmp_path):
    back_up(config, tmp_path / "saved")
    other = tmp_path / "other" / "top.yaml"
    restore(other, tmp_path / "saved")
    made = read_line(other)
    assert keys(made) == ["a", "b"]
    assert calibration_of(made).read_text() == "{}"
    assert made.state == tmp_path / "other" / "state"


def test_backup_beside_a_running_agent_is_of_one_moment(config, tmp_path):
    with state_held(config.state), closing(ResultStore(config.results_file)) as store:
        store.record(result("c", Verdict.NG))
        while store.statistics().pending:
            time.sleep(0.001)
        back_up(config, tmp_path / "saved")
        (tmp_path / "line.yaml").unlink()
        with pytest.raises(AlreadyRunning):
            restore(tmp_path / "line.yaml", tmp_path / "saved")
        assert not (tmp_path / "line.yaml").exists()
    (tmp_path / "line.yaml").write_text(f"{LINE}# edited\n")
    assert restore(tmp_path / "line.yaml", tmp_path / "saved").is_line_file_kept
    assert (tmp_path / "line.yaml").read_text().endswith("# edited\n")
    assert keys(config) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda saved: (saved / "results.db").write_bytes(b"cut"), "results.db is missing or was changed"),
        (lambda saved: (saved / "profile.db").unlink(), "profile.db is missing or was changed"),
        (lambda saved: (saved / "backup.json").unlink(), "is not a backup of a line"),
        (lambda saved: _edit(saved, format=9), "of format 9"),
        (lambda saved: _edit(saved, files={"../x": "ab"}), "'../x'"),
        (lambda saved: _edit(saved, files=None), "is not a backup of a line"),
        (lambda saved: _edit(saved, files=["line.yaml"]), "is not a backup of a line"),
        (lambda saved: _edit(saved, files={}), "names no line.yaml"),
        (lambda saved: _edit(saved, line="other"), "is a backup of line 'other'"),
    ],
)
def test_altered_backup_changes_nothing(config, tmp_path, spoil, told):
    back_up(config, tmp_path / "saved")
    judged(config, "c")
    spoil(tmp_path / "saved")
    with pytest.raises(ConfigError, match=told):
        restore(tmp_path / "line.yaml", tmp_path / "saved")
    assert keys(config) == ["a", "b", "c"]


def test_backup_with_a_refused_line_file_names_that_file(config, tmp_path):
    back_up(config, tmp_path / "saved")
    file = tmp_path / "saved" / "line.yaml"
    file.write_text(LINE.replace("resnet18", "resnet17"))
    _edit(tmp_path / "saved", files={"line.yaml": sha256(file.read_bytes()).hexdigest()})
    with pytest.raises(ConfigError, match="resnet17") as refused:
        restore(tmp_path / "other.yaml", tmp_path / "saved")
    assert str(file) in str(refused.value)
    assert not (tmp_path / "other.yaml").exists()


def _edit(saved, **changes):
    manifest = saved / "backup.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))


def test_damaged_results_are_not_backed_up_and_no_folder_is_overwritten(config, tmp_path):
    config.results_file.write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="is damaged"):
        back_up(config, tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["line.yaml", "state"]
    (tmp_path / "saved").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        back_up(config, tmp_path / "saved")


def test_backup_keeps_the_unfinished_folder_of_another_one(config, tmp_path):
    others = tmp_path / ".saved.unfinished"
    others.mkdir()
    (others / "results.db").write_bytes(b"half")
    back_up(config, tmp_path / "saved")
    assert (others / "results.db").read_bytes() == b"half"
    assert (tmp_path / "saved" / "backup.json").is_file()
