"""Named presets: the compared systems, as switches of one Engine.

``coserve`` is ours; ``paper`` is the CoServe paper without our additions; the Samba-CoE forms are its baselines
(section 5.1) and none, em, em-ra its ablations (section 5.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Assigning(StrEnum):
    MAKESPAN = "makespan"  # section 4.2
    ROUND_ROBIN = "round-robin"
    FIRST = "first"  # a single executor


class Evicting(StrEnum):
    LOOKAHEAD = "lookahead"  # furthest queued use, then the two stages
    TWO_STAGE = "two-stage"  # section 4.3
    LRU = "lru"
    FIFO = "fifo"


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    assigning: Assigning
    arranging: bool  # a request is queued behind the last one of its expert, not at the tail (section 4.2)
    evicting: Evicting
    placing: bool  # experts are placed by usage probability before the first request (section 4.1)
    overlapping: bool = False  # loads run while the executor works: prefetch, and resident groups run meanwhile
    bounded: bool = False  # overtaking ends after max_overtake_s


PRESETS = {
    policy.name: policy
    for policy in (
        Policy("coserve", Assigning.MAKESPAN, True, Evicting.LOOKAHEAD, True, overlapping=True, bounded=True),
        Policy("paper", Assigning.MAKESPAN, True, Evicting.TWO_STAGE, True),
        Policy("samba", Assigning.FIRST, False, Evicting.LRU, False),
        Policy("samba-fifo", Assigning.FIRST, False, Evicting.FIFO, False),
        Policy("samba-parallel", Assigning.ROUND_ROBIN, False, Evicting.LRU, False),
        Policy("none", Assigning.ROUND_ROBIN, False, Evicting.FIFO, False),
        Policy("em", Assigning.ROUND_ROBIN, False, Evicting.TWO_STAGE, True),
        Policy("em-ra", Assigning.ROUND_ROBIN, True, Evicting.TWO_STAGE, True),
    )
}
