"""Check that a source still has the bytes that it was packed from; a start reads its stamp alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil

from experts.expert import Precision
from experts.packed.manifests import ManifestFolder
from experts.packed.sources import sha256_of, stamp_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from experts.expert import Expert
    from experts.packed.weights import PackedExpert, SegmentStore


def drop_if_stale(store: SegmentStore, expert: Expert, packed: PackedExpert, pause: Callable[[], None]) -> bool:
    """Hash the source. True where its bytes changed and its stamp did not: the next packing packs it again.

    ``pause`` is called between two reads; an exception of it ends the check. A source hashed since the box booted is
    not read; the next packing finds a replaced one. Raises LoadError, WeightsMissing, OSError.
    """
    manifests = ManifestFolder(store.directory / "manifests")
    path, found = manifests.path(expert.id, packed.precision), manifests.read(expert.id, packed.precision)
    if found is None or found.packed != packed or found.source.stamp != stamp_of(expert):
        return False
    if psutil.boot_time() < path.stat().st_mtime <= time.time():
        return False
    if sha256_of(expert, pause) == packed.source_sha256:
        path.touch()
        return False
    if found.source.stamp != stamp_of(expert):
        return False
    with store.locked():
        for precision in Precision:
            manifests.delete(expert.id, precision)
    return True
