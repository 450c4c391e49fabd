"""Driver of a model's ranks: starts their processes, and runs batches on them as one LanguageModel.

Guarantees: whoever uses a ``RanksModel`` runs it as any model. A rank that ends or is killed ends all of them, and
raises RanksLost wherever the model is used; ``on_lost`` is called once. Ranks end with this process, also by kill -9.
Ranks of this box meet at a file and talk over the loopback interface. With torchrun's MASTER_ADDR in the environment,
they meet there, and ranks of other boxes with them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING

import torch

from experts.errors import CoServeError, LoadError
from experts.llm.config import read_spec
from experts.llm.model import LanguageModel
from experts.llm.parallel.frames import HEAD, Frame, FrameStream, RankRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from experts.llm.attention import KeyValues
    from experts.llm.parallel.frames import RanksSetup
    from experts.llm.token_batch import TokenBatch

END_S = 5.0  # for the end of killed processes


class RanksLost(CoServeError):
    def __init__(self, expert: str, reason: str) -> None:
        super().__init__(f"the ranks of {expert} are lost: {reason}")


class Ranks:
    """Processes of one model's ranks. ``on_lost``: called from a thread, once, unless ``stop`` came first."""

    def __init__(self, setup: RanksSetup, on_lost: Callable[[str], None] = lambda reason: None) -> None:
        self.setup = setup
        self._on_lost = on_lost
        self._calling = Lock()
        self._ending = Lock()
        self._reason: str | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="coserve-ranks-")
        here, there = socket.socketpair()
        self._stream = FrameStream(here)
        with there:
            self.processes = [self._started(rank, there) for rank in range(self._here)]
        for rank, process in enumerate(self.processes):
            Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    def begin(self) -> RanksModel:
        """Wait until every rank has loaded its slices. Raises LoadError with a rank's reason, RanksLost."""
        answer = self.call(Frame(self.setup.header)).header
        if "refused" in answer:
            self.stop()
            raise LoadError(self.setup.expert, answer["refused"])
        return RanksModel(self, getattr(torch, answer["dtype"]), answer["ready"])

    def call(self, frame: Frame) -> Frame:
        with self._calling:
            try:
                self._stream.send(frame)
            except OSError:
                self._end("its first rank does not take messages")
            answer = self._stream.receive()
        if answer is None:
            self._end("its first rank is gone")
            raise RanksLost(self.setup.expert, self._reason or "its ranks were stopped")
        return Frame.of(answer)

    def kill(self, reason: str) -> None:
        self._end(reason)

    def stop(self) -> None:
        self._end(None)

    @property
    def _here(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.setup.shape.ranks)) if _meets_others() else self._ranks

    @property
    def _ranks(self) -> int:
        return self.setup.shape.ranks

    def _started(self, rank: int, there: socket.socket) -> subprocess.Popen[bytes]:
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(self._ranks), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "experts.llm.parallel.rank_process"]
        if not _meets_others():
            environment["GLOO_SOCKET_IFNAME"] = "lo"
            command += ["--meeting", f"file://{self._folder.name}/meeting"]
        if not rank:
            command += ["--driver", str(there.fileno())]
        passed = () if rank else (there.fileno(),)
        return subprocess.Popen(command, env=environment, pass_fds=passed, start_new_session=True)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        end = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._end(f"rank {rank} (process {process.pid}) {end}")

    def _end(self, reason: str | None) -> None:
        with self._ending:
            if self._reason is not None:
                return
            self._reason = reason or "its ranks were stopped"
            for process in self.processes:
                with suppress(OSError):
                    process.kill()
            with suppress(OSError):
                self._stream.shutdown()
        if reason is not None:
            self._on_lost(reason)

    def close(self) -> None:
        """Stop, and wait for the processes."""
        self.stop()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        self._stream.close()
        self._folder.cleanup()


class RanksModel(LanguageModel):
    """Model over ranks, for one thread at a time. Each sequence stays in one tensor group, which holds its keys."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype, form: str) -> None:
        self.spec = read_spec(Path(ranks.setup.directory), ranks.setup.expert)
        self.form = form  # of the exchange
        self._ranks = ranks
        self._dtype = dtype
        self._groups: dict[int, int] = {}  # by sequence
        self._held: dict[int, int] = {}  # tokens of each sequence

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def parts(self) -> tuple[object, ...]:
        return tuple((self._ranks, place) for place in range(2 * len(self.spec.layers) + 2))

    def hidden(self, batch: TokenBatch, key_values: KeyValues) -> Tensor:
        """Hidden states behind the last layer. ``key_values`` counts tokens; the ranks hold them. Raises RanksLost."""
        key_values.reserve(batch)
        gone = tuple(sequence for sequence in self._groups if not key_values.holds(sequence))
        for sequence in gone:
            del self._groups[sequence], self._held[sequence]
        for row in batch.rows:
            self._groups.setdefault(row.sequence, self._emptiest())
            self._held[row.sequence] = row.end
        groups = tuple(self._groups[row.sequence] for row in batch.rows)
        return self._run(RankRows(batch.rows, groups, gone))

    def logits(self, hidden: Tensor) -> Tensor:
        return _tensor(self._ranks.call(Frame({"do": HEAD}, hidden)))

    def _run(self, rows: RankRows) -> Tensor:
        return _tensor(self._ranks.call(Frame(rows.header)))

    def _emptiest(self) -> int:
        held = [0] * self._ranks.setup.shape.groups
        for sequence, group in self._groups.items():
            held[group] += self._held.get(sequence, 0)
        return held.index(min(held))


def _tensor(frame: Frame) -> Tensor:
    assert frame.tensor is not None, "a rank answers with a tensor"
    return frame.tensor


def _meets_others() -> bool:
    return "MASTER_ADDR" in os.environ
