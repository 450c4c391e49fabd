"""Process that packs ONNX graphs, see ``sandbox``: a fork for each job, bounded before it reads the graph.

A job is a pickle of the parent. Its answers are what ``packed`` raised, if it did not return, and the fork's exit code.
After IDLE_S without a job the process ends.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from experts.backends.onnx.backend import packed as pack
from experts.children.child import in_a_fork, parent
from experts.children.limits import answer
from experts.children.messages import packed

if TYPE_CHECKING:
    from pathlib import Path

    from experts.children.limits import ResourceLimits
    from experts.children.messages import Channel
    from experts.expert import Expert

IDLE_S = 20.0
TOO_LARGE = "packing and trying it takes more memory than a model may"
UNFORESEEN = "it cannot be packed: "


def main() -> None:
    agent = parent()
    assert agent is not None, "a child"
    while agent.is_told(IDLE_S) and (job := agent.receive()) is not None:
        code = in_a_fork(partial(_pack, agent, *pickle.loads(job)))
        agent.send(packed(code))


def _pack(agent: Channel, expert: Expert, folder: Path, limits: ResourceLimits) -> None:
    limits.keep()
    answer(agent, partial(_write, expert, folder), too_large=TOO_LARGE, unforeseen=UNFORESEEN)


def _write(expert: Expert, folder: Path) -> None:
    packable = pack(expert)
    save_file({name: tensor.contiguous() for name, tensor in packable.tensors.items()}, folder / "tensors")
    (folder / "program").write_bytes(packable.program)


if __name__ == "__main__":
    main()
