"""Folders on mounts that may be away."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent.places.mounts import MountedFolder


def test_folder_on_an_unmounted_mount_of_fstab_is_offline_from_the_first_start(tmp_path):
    mount = tmp_path / "my share"
    (mount / "line1").mkdir(parents=True)
    fstab = tmp_path / "fstab"
    fstab.write_text(
        f"# nas\n//nas/line {str(mount).replace(' ', chr(92) + '040')} cifs ro 0 0\n/dev/sdb none swap sw 0 0\n"
    )
    with pytest.raises(OSError, match=r"nothing is mounted at .*my share - mount its share or disk there"):
        MountedFolder(mount / "line1", tmp_path / "memory", fstab=fstab).find()
    MountedFolder(tmp_path / "other", tmp_path / "memory", fstab=fstab).make()
    assert (tmp_path / "other").is_dir()


def test_folder_that_was_there_is_remembered_over_a_restart_and_not_created(tmp_path):
    place = MountedFolder(tmp_path / "out", tmp_path / "memory")
    place.find()  # never there: nothing is away
    place.make()
    (tmp_path / "out").rmdir()
    for again in (place, MountedFolder(tmp_path / "out", tmp_path / "memory")):
        for look in (again.find, again.make):
            with pytest.raises(OSError, match="OFFLINE: it was there and is gone"):
                look()
    assert not (tmp_path / "out").exists()
    MountedFolder(tmp_path / "other", tmp_path / "memory").find()


def test_missing_parent_folder_is_not_created(tmp_path):
    with pytest.raises(OSError, match=r"a is missing - mount its share, or make the folder"):
        MountedFolder(tmp_path / "a" / "b", tmp_path / "memory").make()
    assert not (tmp_path / "a").exists()


BOUND = """
import subprocess, sys
from pathlib import Path
from agent.places.mounts import MountedFolder

disk, mount, fstab = (Path(each) for each in sys.argv[1:])
place = MountedFolder(mount, fstab=fstab)
try:
    place.find()
except OSError as error:
    print(error.strerror.partition(":")[0])
if subprocess.run(["mount", "--bind", disk, mount], capture_output=True).returncode:
    sys.exit(77)
place.find()
"""


def test_bind_mount_of_fstab_is_offline_until_it_is_mounted(tmp_path):
    disk, mount, fstab = (tmp_path / name for name in ("disk", "mount", "fstab"))
    disk.mkdir()
    mount.mkdir()
    fstab.write_text(f"{disk} {mount} none bind 0 0\n")
    apart = ["unshare", "--mount", "--propagation", "private"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace is not permitted here")
    command = [*apart, sys.executable, "-c", BOUND, disk, mount, fstab]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    if ended.returncode == 77:
        pytest.skip("mounting is not permitted here")
    assert (ended.returncode, ended.stdout) == (0, "OFFLINE\n"), ended.stderr
