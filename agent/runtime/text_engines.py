"""The engines that run texts: one for each executor, over one arena of keys and values for each memory.

Guarantees: an arena is as large as its memory's share for leases, whatever runs there; how it rounds what a text holds
is what leases are counted by, so who has its lease finds room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from agent.runtime.machine.box import torch_device
from agent.runtime.texts import Reached
from experts.llm.names import EMBEDDING
from experts.llm.program import spec_of
from experts.llm.serving.engine import LlmEngine
from experts.llm.serving.extents import ExtentArena
from experts.llm.serving.kv import KvLayout
from experts.llm.serving.output_lengths import OutputLengths

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.core.performance import ExecutorSpec, Limits
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.texts import TextEngine
    from experts.llm.serving.kv import KvArena
    from experts.packed.weights import SegmentStore
