"""Names that can be claimed, found again, put away and explained; folders that are left behind."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.sources.folder.files.identity import NAME_BYTES, fitted, sighting_of
from agent.sources.folder.files.inbox import Inbox, is_own
from agent.sources.folder.files.readiness import Sighting
from agent.sources.folder.files.selection import MARKER, FileSelection

LONGEST = "R" * (NAME_BYTES - 4) + ".png"
ID = "1a-2b-3c~"


@pytest.fixture
def inbox(tmp_path):
    return Inbox(tmp_path, "demo")


def write(inbox, relpath, mtime_ns=1000000000):
    file = inbox.root / relpath
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"bytes of " + os.fsencode(relpath))
    os.utime(file, ns=(mtime_ns, mtime_ns))
    sighting = sighting_of(file)
    assert sighting is not None
    return sighting


PART = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=250)
NUMBER = st.integers(0, 2**64 - 1)


@given(st.lists(PART, min_size=1, max_size=3), NUMBER, NUMBER, st.integers(-(2**63), 2**63 - 1))
@example([LONGEST], 1, 1, -1)
@example(["sub", "é" * 120 + ".png"], 1, 1, -86_400_000_000_000)
@example(["line\nbreak é~@.png"], 1, 1, 0)
@example([f".{ID}", "x"], 1, 1, 1)
@example([ID, f"{ID}x"], 2**64 - 1, 2**64 - 1, -(2**63))
@example([ID, ID, "R" * 240], 1, 1, 1)
def test_claimed_name_of_any_identity_is_read_back(tmp_path_factory, parts, inode, size_bytes, mtime_ns):
    relpath, sighting = "/".join(parts), Sighting(inode, size_bytes, mtime_ns)
    if (
        FileSelection().ignores(relpath)
        or is_own(relpath)
        or any(len(os.fsencode(part)) > NAME_BYTES for part in parts)
    ):
        return
    inbox = Inbox(tmp_path_factory.mktemp("inbox"), "demo")
    (inbox.root / relpath).parent.mkdir(parents=True, exist_ok=True)
    (inbox.root / relpath).touch()
    claimed = inbox.claim(relpath, sighting)
    assert list(inbox.recover()) == [claimed]
    assert inbox.relpath_of(inbox.key(claimed)) == relpath
    assert list(inbox.recover({str(claimed.path)})) == []
    inbox.unclaim(claimed)
    assert (inbox.root / relpath).exists()
    assert list(inbox.work.iterdir()) == []
    inbox.delete(inbox.claim(relpath, sighting))
    assert list(inbox.recover()) == []


@pytest.mark.parametrize(
    ("name", "levels"), [("d" * NAME_BYTES, 20), pytest.param("ddd", 1100, marks=pytest.mark.slow)]
)
def test_subfolders_too_deep_to_be_named_hide_no_other_file(inbox, name, levels):
    write(inbox, "1.png")
    above = os.open(inbox.root, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=above)
        below = os.open(name, os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = below
    os.close(above)
    try:
        assert [found.relpath for found in inbox.scan()] == ["1.png"]
    finally:
        subprocess.run(["rm", "-r", name], cwd=inbox.root, check=True)  # pytest could not


@pytest.mark.parametrize("length", range(NAME_BYTES - 20, NAME_BYTES + 1))
def test_files_with_names_of_any_length_are_put_away_and_explained(inbox, length):
    names = [f"{'R' * (length - 5)}{number}.png" for number in range(3)]
    explained = set()
    for again in range(2):  # a second time, their names are taken
        for name in names:
            claimed = inbox.claim(name, write(inbox, name, again))
            placed = inbox.put_away(claimed, "failed", f"1a-2b-{again}")
            assert placed.read_bytes() == b"bytes of " + name.encode()
            assert placed.suffix == ".png"
            inbox.explain(placed, {"file": name})
            explained.add(placed)
    files = sorted(os.listdir(inbox.root / "failed"))
    assert len(explained) == 6
    assert len(files) == 12
    errors = [name for name in files if name.endswith(".error.json")]
    assert sorted(json.loads((inbox.root / "failed" / name).read_text())["file"] for name in errors) == sorted(
        names * 2
    )
    assert not [name for name in files if name.endswith(".tmp")]


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=300), st.sampled_from(["", ".error.json", "~1-2-3.png"])
)
def test_shortened_name_fits_and_keeps_its_ending(name, ending):
    cut = fitted(name, ending, NAME_BYTES)
    assert len(cut.encode()) <= NAME_BYTES
    assert cut.endswith(ending)
    assert (cut == name + ending) is (len((name + ending).encode()) <= NAME_BYTES)
    one, other = (f"{name}{'R' * NAME_BYTES}{last}" for last in "xy")
    assert fitted(one, ending, NAME_BYTES) != fitted(other, ending, NAME_BYTES)


def test_name_that_is_not_utf_8_is_shortened_too():
    name = os.fsdecode(b"\xff" * 250)
    assert len(os.fsencode(fitted(name, ".error.json", NAME_BYTES))) <= NAME_BYTES


def test_agent_that_leaves_a_folder_removes_only_its_own_empty_folders(inbox, tmp_path):
    other = Inbox(tmp_path, "other")
    mine, theirs = (one.claim(name, write(one, name)) for one, name in ((inbox, "1.png"), (other, "2.png")))
    inbox.leave()
    assert mine.path.exists()
    inbox.delete(mine)
    inbox.leave()
    assert not inbox.work.exists()
    other.leave()
    assert theirs.path.exists()
    other.delete(theirs)
    other.leave()
    assert list(tmp_path.iterdir()) == []
    inbox.leave()  # the folder itself is none of the agent's


@pytest.mark.parametrize("is_seen", [False, True])
def test_claim_succeeds_while_another_agent_removes_the_folder_of_claims(inbox, monkeypatch, is_seen):
    mkdir, met = os.mkdir, []

    def removed_at_once(path, mode=511, *, dir_fd=None):
        is_met = Path(path).name == ".work" and len(met) < 3
        if is_met:
            met.append(path)
        if is_met and is_seen:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        mkdir(path, mode, dir_fd=dir_fd)
        if is_met:
            os.rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", removed_at_once)
    claimed = inbox.claim("1.png", write(inbox, "1.png"))
    assert len(met) == 3
    assert claimed.path.exists()


def test_vanished_folder_is_not_created_for_a_claim(tmp_path):
    inbox = Inbox(tmp_path / "share", "demo")
    with pytest.raises(FileNotFoundError) as raised:
        inbox.claim("1.png", Sighting(1, 1, 1))
    assert raised.value.errno == errno.ENOENT
    assert not (tmp_path / "share").exists()


class TestLinksInTheFolder:
    """Links that lie in a watched folder lead to no file of the agent's."""

    @pytest.fixture
    def database(self, tmp_path):
        state = tmp_path / "state"
        state.mkdir()
        (state / "results.db").write_bytes(b"verdicts")
        return state / "results.db"

    def test_explanation_is_not_written_through_a_link_at_its_draft(self, inbox, database):
        placed = inbox.put_away(inbox.claim("a.png", write(inbox, "a.png")), "failed", "1")
        for name in (".a.png.error.json.tmp", "a.png.error.json"):
            (placed.parent / name).symlink_to(database)
        inbox.explain(placed, {"file": "a.png"})
        assert database.read_bytes() == b"verdicts"
        assert json.loads((placed.parent / "a.png.error.json").read_text()) == {"file": "a.png"}
        assert sorted(os.listdir(placed.parent)) == ["a.png", "a.png.error.json"]

    @pytest.mark.parametrize("shelf", ["failed", "done/2026-05-01"])
    def test_file_is_not_put_away_through_a_link(self, inbox, database, shelf):
        claimed = inbox.claim("a.png", write(inbox, "a.png"))
        (inbox.root / shelf.partition("/")[0]).symlink_to(database.parent)
        with pytest.raises(NotADirectoryError, match="is a link"):
            inbox.put_away(claimed, shelf, "1")
        assert os.listdir(database.parent) == ["results.db"]
        assert claimed.path.exists(), "it is tried again once the link is gone"

    @pytest.mark.parametrize("exchanged", ["claims", "folder of the marker"])
    def test_folder_exchanged_for_a_link_costs_no_file_behind_the_link(self, inbox, tmp_path, exchanged):
        claimed = inbox.claim("sub/a.png", write(inbox, "sub/a.png"))
        (inbox.root / "sub" / f"a.png{MARKER}").touch()
        link = claimed.path.parent if exchanged == "claims" else inbox.root / "sub"
        link.rename(tmp_path / "foreign")
        link.symlink_to(tmp_path / "foreign")
        kept = os.listdir(tmp_path / "foreign")
        with pytest.raises(NotADirectoryError, match="is a link"):
            inbox.delete(claimed) if exchanged == "claims" else inbox.drop_marker("sub/a.png")
        assert os.listdir(tmp_path / "foreign") == kept

    def test_file_is_not_claimed_through_or_into_a_link(self, inbox, database):
        sighting = write(inbox, "sub/results.db")
        (inbox.root / "sub" / "results.db").unlink()
        (inbox.root / "sub").rmdir()
        (inbox.root / "sub").symlink_to(database.parent)
        with pytest.raises(NotADirectoryError):
            inbox.claim("sub/results.db", sighting)
        assert database.read_bytes() == b"verdicts"
        sighting = write(inbox, "a.png")
        inbox.work.rmdir()
        inbox.work.symlink_to(database.parent)
        with pytest.raises(NotADirectoryError):
            inbox.claim("a.png", sighting)
        assert os.listdir(database.parent) == ["results.db"]
