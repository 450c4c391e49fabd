"""A snapshot of packed weights: hard links to a line's packed files, which its agent may replace meanwhile.

A snapshot takes no space and stands beside the packed files, on their filesystem. Snapshots of killed processes are
removed when the next one is made.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from experts.packed.weights import SegmentStore

log = logging.getLogger(__name__)

SNAPSHOTS = "snapshots"
LINKED = ("segments", "programs", "manifests")


@contextmanager
def snapshot(store: SegmentStore) -> Iterator[Path]:
    """A folder with everything that is packed in ``store``, while the context lasts.

    The folder is empty where the filesystem has no hard links: experts are packed there again.
    """
    folder = store.directory.with_name(SNAPSHOTS)
    with ExitStack() as ending:
        with store.locked():
            folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(folder)
            links = Path(tempfile.mkdtemp(dir=folder))
            ending.callback(shutil.rmtree, links, ignore_errors=True)
            ending.callback(os.close, _hold(links))
            _link(store.directory, links)
        yield links


def _link(source: Path, links: Path) -> None:
    try:
        for file in (file for name in LINKED for file in (source / name).rglob("*") if file.is_file()):
            link = links / file.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, link)
    except OSError as error:
        log.warning("snapshot_not_linked folder=%s reason=%s: its experts are packed again", links, error.strerror)


def _hold(links: Path) -> int:
    """Lock a snapshot that is in use; the lock ends with the process."""
    descriptor = os.open(links, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_abandoned(folder: Path) -> None:
    for links in folder.iterdir():
        try:
            os.close(_hold(links))
        except BlockingIOError:
            continue
        shutil.rmtree(links, ignore_errors=True)
