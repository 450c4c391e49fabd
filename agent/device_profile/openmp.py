"""How long OpenMP's threads wait for the next operator before they sleep: the settings that a box can be measured in.

Operators are microseconds apart: a sleeping thread has to be woken, a spinning one takes a core from decoding and
loading. `coserve profile` measures which is better; an agent sets it at its start, as the libraries read the variables
when they load. The default is 10,000 pauses, 30 us to 250 us. The libraries' own is milliseconds: up to a tenth faster
alone (ResNet18, 2 cores). Beside other work an operator then waits for a thread that lost its core: every tenth run of
9 ms took 640 ms, with ours 54. Profiling one expert alone does not show that, so no setting waits longer than the
default. libgomp reads the first variable, LLVM's and Intel's libraries the second.
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
