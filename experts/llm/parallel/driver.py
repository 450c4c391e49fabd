"""Driver of a model's ranks: starts their processes, and runs batches on them as one LanguageModel.

Guarantees: a ``RanksModel`` runs as any model. A rank that ends or is killed ends all of them, and raises RanksLost
wherever the model is used; ``on_lost`` is called once. Ranks are children of this process; those of this box meet at a
file and talk over the loopback interface. Given a ``Meeting``, torchrun starts this box's, and they meet those that
torchrun starts elsewhere.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Lock, Timer
from typing import TYPE_CHECKING

import torch

from experts.children.child import Child
from experts.children.messages import Channel
from experts.errors import LoadError, RanksLost
from experts.llm.files.config import read_spec
from experts.llm.model import LanguageModel
from experts.llm.parallel.messages import HEAD, RankMessage, RankRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from experts.llm.attention import KeyValues
    from experts.llm.parallel.messages import RanksSetup
    from experts.llm.parallel.shape import Meeting
    from experts.llm.token_batch import TokenBatch

RANK_PROCESS = "experts.llm.parallel.rank_process"
TORCHRUN = "torch.distributed.run"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
END_S = 5.0  # for the end of killed processes
MEET_S = 300.0  # for ranks of this box to start and meet; arbitrary


class Ranks:
    """Processes of one model's ranks, started by ``begin`` or ``meet``. Raises OSError without room for a socket.

    ``on_lost``: called from a thread, once, unless ``stop`` came first. ``process``: module of a rank.
    ``gpus``: one for each rank; none: ranks compute on CPUs.
    """

    def __init__(
        self, setup: RanksSetup, on_lost: Callable[[str], None] = lambda reason: None,
        meeting: Meeting | None = None, process: str = RANK_PROCESS, gpus: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.setup = setup
        self._process = process
        self._on_lost = on_lost
        self._meeting = meeting
        self._gpus = gpus
        self._calling = Lock()
        self._ending = Lock()
        self._reason: str | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="coserve-ranks-")
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(self._address)
        self._door.listen()
        self._first: Channel | None = None  # to the first rank
        self._ended = Event()
        self.processes: list[Child] = []

    def meet(self) -> None:
        """Start the ranks, and wait until they have met, on this box for MEET_S. Raises LoadError, RanksLost."""
        with self._ending:
            try:
                for rank, (module, *arguments) in enumerate(self._modules() if self._reason is None else ()):
                    variables = {"OMP_NUM_THREADS": str(self.setup.threads), **self._network()}
                    if self._gpus:
                        variables[VISIBLE_GPUS] = self._gpus[rank]
                    on_end = partial(self._ended_one, rank)
                    self.processes.append(Child(module, *arguments, environment=variables, on_end=on_end))
            except OSError as error:
                raise LoadError(self.setup.expert, f"its ranks cannot be started: {error}") from error
        limit = Timer(MEET_S, self.kill, (f"its ranks have not met within {MEET_S:g} s",))
        limit.daemon = True
        if self._meeting is None:
            limit.start()
        try:
            self._first = Channel(self._door.accept()[0])
        except OSError:  # the ranks have ended, and nobody comes
            raise self._lost() from None
        finally:
            limit.cancel()

    def begin(self) -> RanksModel:
        """Start the ranks, and wait until each has loaded its slices. Raises LoadError with a reason, RanksLost."""
        self.meet()
        answer = self.call(RankMessage(self.setup.header)).header
        if "refused" in answer:
            self.stop()
            raise LoadError(self.setup.expert, answer["refused"])
        return RanksModel(self, getattr(torch, answer["dtype"]), answer["ready"])

    def call(self, message: RankMessage) -> RankMessage:
        assert self._first is not None, "they have begun"
        with self._calling, suppress(OSError):
            self._first.send(message.packed())
            if (answer := self._first.receive()) is not None:
                return RankMessage.of(answer)
        raise self._lost()

    def kill(self, reason: str) -> None:
        self._end(reason)

    def stop(self) -> None:
        self._end(None)

    @property
    def _address(self) -> str:
        return f"{self._folder.name}/driver"

    def _modules(self) -> list[list[str]]:
        """Starter of this box's ranks: one for each, or torchrun's, as the first node of several."""
        own, ranks, meeting = [self._process, "--driver", self._address], self.setup.shape.ranks, self._meeting
        if self._gpus:
            own += ["--device", "cuda"]
        if meeting is None:
            place = ["--meeting", f"file://{self._folder.name}/meeting", "--ranks", str(ranks)]
            return [[*own, *place, "--rank", str(rank)] for rank in range(ranks)]
        nodes = ["--nnodes", str(ranks // meeting.ranks_here), "--node-rank", "0"]
        nodes += ["--nproc-per-node", str(meeting.ranks_here)]
        return [[TORCHRUN, *nodes, "--master-addr", meeting.address, "--master-port", str(meeting.port), "-m", *own]]

    def _network(self) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": LOOPBACK} if self._meeting is None else {}

    def _ended_one(self, rank: int, child: Child) -> None:
        code, words = child.code, child.last_words()
        assert code is not None, "it has ended"
        end = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._end(f"rank {rank} (process {child.pid}) {end}" + (f": {words}" if words else ""))

    def _lost(self) -> RanksLost:
        self._ended.wait(END_S)  # for the rank that ended first
        self._end("its first rank is gone")
        assert self._reason is not None, "they have ended"
        return RanksLost(self.setup.expert, self._reason)

    def _end(self, reason: str | None) -> None:
        with self._ending:
            if self._reason is not None:
                return
            self._reason = reason or "its ranks were stopped"
            for process in self.processes:
                process.kill()
            with suppress(OSError):
                self._door.shutdown(socket.SHUT_RDWR)
            if self._first is not None:
                self._first.kill()
            self._ended.set()
        if reason is not None:
            self._on_lost(reason)

    def close(self) -> None:
        """Stop, and wait for the processes."""
        self.stop()
        for process in self.processes:
            process.wait(END_S)
            process.close()
        self._door.close()
        if self._first is not None:
            with self._calling:
                self._first.close()
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
            if row.sequence not in self._groups:
                self._groups[row.sequence] = self._emptiest()
            self._held[row.sequence] = row.end
        groups = tuple(self._groups[row.sequence] for row in batch.rows)
        return _tensor(self._ranks.call(RankMessage(RankRows(batch.rows, groups, gone).header)))

    def logits(self, hidden: Tensor) -> Tensor:
        return _tensor(self._ranks.call(RankMessage({"do": HEAD}, hidden)))

    def _emptiest(self) -> int:
        held = [0] * self._ranks.setup.shape.groups
        for sequence, group in self._groups.items():
            held[group] += self._held.get(sequence, 0)
        return held.index(min(held))


def _tensor(message: RankMessage) -> Tensor:
    assert message.tensor is not None, "a rank answers with a tensor"
    return message.tensor
