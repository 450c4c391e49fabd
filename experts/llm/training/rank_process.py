"""A rank's process of a training: ``python -m experts.llm.training.rank_process``, options of the rank's process.

Each rank reads teacher and texts itself. Rank 0 answers its driver, a message for a message: reports, then nothing
more once the student is written.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from experts.llm.parallel.messages import RankMessage
from experts.llm.parallel.rank_process import main
from experts.llm.training.distil import DistilOptions, read_lesson, write_student
from experts.llm.training.over_ranks import RankTraining
from experts.llm.training.staged import Schedule

if TYPE_CHECKING:
    from experts.children.messages import Channel
    from experts.llm.training.step import Losses


def train_rank(driver: Channel | None, _directory: Path | None, _device: object) -> None:
    asked = [None if driver is None else RankMessage.of(driver.receive() or b"").header]
    dist.broadcast_object_list(asked, 0)
    header: Any = asked[0]
    schedule = Schedule(**header["options"].pop("schedule"))
    options = DistilOptions(schedule=schedule, **header["options"])
    lesson = read_lesson(Path(header["teacher"]), [*map(Path, header["files"])], options)

    def tell(step: int, losses: Losses, held_out: float) -> None:
        if driver is not None:
            parts = [float(part) for part in (losses.cross_entropy, losses.divergence, losses.unevenness)]
            driver.send(RankMessage({"step": step, "losses": parts, "held_out": held_out}).packed())
            driver.receive()

    made = None if driver is None else Path(header["made"])
    write_student(lesson, RankTraining(lesson.spec, lesson.tensors), made, options, tell)
    if driver is not None:
        driver.send(RankMessage({}).packed())
        driver.receive()  # its end, or else the first rank to end would be reported as lost
    dist.barrier()


if __name__ == "__main__":
    logging.disable()  # the driver says which rank has ended, and why
    main(run=train_rank)
