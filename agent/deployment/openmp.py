"""Spinning of OpenMP's threads before they sleep: 10,000 pauses, 30 us to 250 us.

The libraries' default of milliseconds is up to a tenth faster alone (ResNet18, 2 cores). Beside other work, every tenth
run of 9 ms took 640 ms with the default, and 54 ms with this setting. libgomp reads the first variable, others the
second.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from agent.config import set_unless_given

if TYPE_CHECKING:
    from collections.abc import Mapping

SPINNING: Mapping[str, str] = MappingProxyType({"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"})  # 1 ms is the least
VARIABLES = frozenset({"OMP_WAIT_POLICY", *SPINNING})  # the first is OpenMP's own: spin, or do not


def set_spinning() -> None:
    """Set the variables of this process, unless the environment sets any; call before torch is loaded."""
    set_unless_given(SPINNING, VARIABLES)
