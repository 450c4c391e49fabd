"""How many files each folder may have under way: one folder's backlog never keeps another's files waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def has_room(own: int, held: Sequence[int], limit: int) -> bool:
    """Whether a folder that holds ``own`` files may take one more; ``held``: what each folder holds, this one too.

    Half of the limit is kept for the folders, the same for each and at least one; the other half is anybody's. So a
    folder alone may hold all but what is kept for the others, and more than ``limit`` are held only by more folders.
    """
    kept = max(limit // (2 * len(held)), 1)
    common = limit - kept * len(held)
    return own < kept or sum(max(count - kept, 0) for count in held) < common
