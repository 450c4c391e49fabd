"""Cores within the control groups of this process, by a tree as the kernel shows it."""

import os

import pytest

from experts.backends.control_groups import cores, own_groups


@pytest.fixture
def unit(tmp_path, monkeypatch):
    """A unit in a slice; eight cores by the affinity."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "membership").write_text("0::/work.slice/unit\n")
    unit = tmp_path / "groups" / "work.slice" / "unit"
    unit.mkdir(parents=True)
    return unit


def counted(unit):
    groups = unit.parents[1]
    return cores(groups, groups.parent / "membership")


@pytest.mark.parametrize(
    ("of_unit", "of_slice", "found"),
    [
        ("max 100000", "max 100000", 8),
        ("400000 100000", "max 100000", 4),
        ("400000 100000", "250000 100000", 2),  # the tightest; half a core carries no thread
        ("50000 100000", "max 100000", 1),
        ("1600000 100000", "max 100000", 8),
        ("nonsense", "", 8),
    ],
)
def test_tightest_quota_of_control_groups_bounds_the_threads(unit, of_unit, of_slice, found):
    (unit / "cpu.max").write_text(f"{of_unit}\n")
    (unit.parent / "cpu.max").write_text(f"{of_slice}\n")
    assert counted(unit) == found


def test_affinity_bounds_the_threads_without_control_groups(unit, tmp_path):
    assert counted(unit) == 8
    assert own_groups(tmp_path / "groups", tmp_path / "absent") == []
