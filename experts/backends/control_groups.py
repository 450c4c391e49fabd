"""Limits of this process's control groups (version 2: systemd unit, slice, container), and the cores within them."""

from __future__ import annotations

import os
from pathlib import Path

GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def own_groups(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> list[Path]:
    """Control groups of this process, innermost first."""
    lines = text_of(membership).splitlines()
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return []
    inner = Path(own)
    return [groups / inner, *(groups / parent for parent in inner.parents)]


def cores(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Cores that this process may keep busy: of its affinity, and whole ones of each `cpu.max` above it; at least one.

    The kernel stops all threads of a group for the rest of a period once they have used its quota.
    """
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in own_groups(groups, membership):
        quota_us, _, period_us = text_of(group / "cpu.max").partition(" ")
        if quota_us.isdigit() and period_us.isdigit():  # else `max`, or the root
            found = min(found, int(quota_us) // int(period_us))
    return max(found, 1)


def text_of(file: Path) -> str:
    """Content of a file of the kernel's, stripped; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
