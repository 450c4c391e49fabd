"""How long OpenMP's threads wait for the next operator before they sleep: the settings that a box can be measured in.

Between two operators of a model lie microseconds; a thread that sleeps has to be woken, one that spins takes a core
from decoding and loading meanwhile. Which is better depends on the processor, so it is measured (`coserve profile`) and
set where an agent starts. The variables are read when the library loads, with torch: later they change nothing.
The default is ours, 10,000 pauses of the processor: from 30 us to 250 us, as long as it pauses. By themselves the
libraries wait for milliseconds: alone that is up to a tenth faster (a line of ResNet18, 2 cores), but beside other work
on the same cores an operator may wait so for a thread that has lost its core (2 cores, others at work: of a ResNet18
that takes 9 ms, every tenth run took 640, and with ours 54), which does not show where one expert is measured alone. So
no setting waits longer than the default.
GNU's library (libgomp) reads the first, LLVM's and Intel's the second.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT = "default"
SPINNING: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        DEFAULT: MappingProxyType({"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}),  # 1 ms is the least of the second
        "short": MappingProxyType({"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}),
        "none": MappingProxyType({"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}),
    }
)
WAIT_POLICY = "OMP_WAIT_POLICY"  # what the standard has instead: spin, or do not
VARIABLES = frozenset({WAIT_POLICY, *(name for setting in SPINNING.values() for name in setting)})
