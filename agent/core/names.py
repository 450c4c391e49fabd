"""Names in the Engine: an expert's, ``cls/r`` or ``cls/r+2``, and a copy's, ``cls/r+2@bf16``.

A line file names ``cls/r``. If a reload replaces that expert, its successor gets a number, so that accepted requests
finish under the earlier name. A copy is an expert in one form. Ids of a line file have neither sign.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experts.expert import Precision

GENERATION, FORM = "+", "@"
GENERATIONS = re.compile(r"\+[0-9]+(?![\w.+-])")


def successor_name(expert: str, generation: int) -> str:
    return f"{expert}{GENERATION}{generation}"


def line_name(expert: str) -> str:
    return expert.partition(GENERATION)[0]


def with_line_names(text: str) -> str:
    return GENERATIONS.sub("", text) if GENERATION in text else text


def copy_name(expert: str, precision: Precision) -> str:
    return f"{expert}{FORM}{precision}"


def expert_of(copy: str) -> str:
    return copy.rpartition(FORM)[0]


def form_of(copy: str) -> str:
    return copy.rpartition(FORM)[2]
