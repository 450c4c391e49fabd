"""The drive of a folder, as Linux names it."""

import os

import pytest

from agent.runtime.machine.detection import drive_of


@pytest.fixture
def numbers(tmp_path):
    """Block devices by number, and this folder's device among them."""
    system = tmp_path / "sys"
    device = os.stat(tmp_path).st_dev

    def made(block):
        (system / "numbers").mkdir(exist_ok=True)
        (system / "numbers" / f"{os.major(device)}:{os.minor(device)}").symlink_to(system / block)
        return system / "numbers"

    for disk, serial in (("nvme0n1", "S1"), ("nvme1n1", "S2")):
        (system / disk / "device").mkdir(parents=True)
        (system / disk / "device" / "model").write_text("Samsung 990  \n")
        (system / disk / "device" / "serial").write_text(serial)
        (system / disk / f"{disk}p1").mkdir()
    (system / "dm-0" / "slaves").mkdir(parents=True)
    for disk in ("nvme0n1", "nvme1n1"):
        (system / "dm-0" / "slaves" / disk).symlink_to(system / disk / f"{disk}p1")
    return made


@pytest.mark.parametrize(
    ("block", "drive"),
    [
        ("nvme0n1", "Samsung 990 S1"),
        ("nvme1n1/nvme1n1p1", "Samsung 990 S2"),
        ("dm-0", "Samsung 990 S1 + Samsung 990 S2"),
        ("absent", ""),
    ],
    ids=["disk", "partition", "volume", "unknown"],
)
def test_a_folder_s_drive_is_named_by_model_and_serial_number(tmp_path, numbers, block, drive):
    assert drive_of(tmp_path / "state" / "packed", numbers(block)) == drive
