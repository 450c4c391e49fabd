"""Files that appear whole, in folders that others may write to."""

import os

import pytest

from experts.filesystem import open_folder, whole_file, whole_text_file


def test_file_appears_whole_and_a_killed_writers_draft_is_replaced(tmp_path):
    (tmp_path / ".a.tmp").write_bytes(b"half")
    with whole_file(tmp_path / "a") as file:
        file.write(b"first")
        assert not (tmp_path / "a").exists()
    with whole_text_file(tmp_path / "a") as text:
        text.write("zweite Fassung: ü\n")
        assert (tmp_path / "a").read_bytes() == b"first"
    assert ((tmp_path / "a").read_text("utf-8"), os.listdir(tmp_path)) == ("zweite Fassung: ü\n", ["a"])


@pytest.mark.parametrize("has_rivals", [False, True])
def test_failed_write_leaves_the_earlier_file(tmp_path, has_rivals):
    (tmp_path / "a").write_bytes(b"first")

    def fail():
        with whole_file(tmp_path / "a", has_rivals=has_rivals) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert ((tmp_path / "a").read_bytes(), os.listdir(tmp_path)) == (b"first", ["a"])


def test_link_at_the_draft_or_at_the_name_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"untouched")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a", ".a.tmp"):
        (folder / name).symlink_to(tmp_path / "elsewhere")
    with whole_file(folder / "a", below=folder) as file:
        file.write(b"ours")
    assert ((tmp_path / "elsewhere").read_bytes(), (folder / "a").read_bytes()) == (b"untouched", b"ours")
    assert not (folder / "a").is_symlink()


def test_link_among_the_folders_is_refused_below_the_named_one(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "named").symlink_to(tmp_path / "elsewhere")  # whoever wrote the line file may mean a link
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path)
    with whole_file(tmp_path / "named" / "a", below=tmp_path / "named") as file:
        file.write(b"ours")
    with pytest.raises(NotADirectoryError, match=r"'link' is a link .* remove it"):
        open_folder(tmp_path / "named" / "link", tmp_path / "named").__enter__()
    assert (tmp_path / "elsewhere" / "a").read_bytes() == b"ours"
