"""A rank's process: ``python -m experts.llm.parallel.rank_process [--driver SOCKET] [--model DIRECTORY]``.

Rank and addresses are those of torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Rank 0 connects to
the driver's socket, and passes every message on to the others, which wait for it. ``--model``: the model's directory on
this box, if it is another than the driver's. ``--device cuda``: each rank of the model computes on the GPU that it
sees, and exchanges tensors by NCCL; messages stay on gloo. This has not yet run on hardware.

Guarantees: a rank ends with its driver, as its child or as torchrun's, and with any other rank: a process that is gone
closes its connections.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from experts.children.child import end_with_parent, parent, report
from experts.children.messages import Channel
from experts.errors import CoServeError
from experts.llm.arenas.extents import ModelKeyValues
from experts.llm.parallel.costs import LinkCosts, MeshCosts, cheapest
from experts.llm.parallel.groups import Mesh
from experts.llm.parallel.messages import BEGIN, RUN, RankMessage, RankRows, RanksSetup, count_of
from experts.llm.parallel.rank_model import load_rank
from experts.llm.token_batch import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from experts.llm.parallel.groups import RankGroup
    from experts.llm.parallel.rank_model import RankModel

SHORT_BYTES, LONG_BYTES = 64, 1 << 20  # to each rank
REPEATS = 8
FREE = LinkCosts(0.0, 0.0)
log = logging.getLogger(__name__)
IDLE = timedelta(days=365)  # a rank waits for texts as long as it has to
REASON_BYTES = 2048
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # by device
USUAL_ROWS = 8  # of a batch, for which the exchange is chosen


def measured_costs(mesh: Mesh, device: torch.device) -> MeshCosts:
    """Costs by the first rank's clock, equal on all ranks. Call on every rank at once."""
    inside, between = (_costs(group, device) for group in (mesh.inside, mesh.between))
    own = torch.tensor([inside.message_s, inside.byte_s, between.message_s, between.byte_s], dtype=torch.float64)
    first: list[float] = mesh.replica.gather(own, "costs")[0].tolist()
    return MeshCosts(LinkCosts(*first[:2]), LinkCosts(*first[2:]))


def _costs(group: RankGroup, device: torch.device) -> LinkCosts:
    others = group.size - 1
    if not others:
        return FREE
    short_s, long_s = (_seconds(group, size, device) for size in (SHORT_BYTES, LONG_BYTES))
    return LinkCosts(short_s / others, max(long_s - short_s, 0.0) / (others * (LONG_BYTES - SHORT_BYTES)))


def _seconds(group: RankGroup, size_bytes: int, device: torch.device) -> float:
    """The least time of an all-to-all with so many bytes for each rank."""
    rows = torch.zeros((group.size, size_bytes), dtype=torch.uint8, device=device)
    ones = [1] * group.size
    times = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        group.all_to_all(rows, ones, ones, "costs")[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - began_s)
    return min(times)


class Rank:
    """This process among its ranks. ``stream``: the driver's, of rank 0 alone."""

    def __init__(self, stream: Channel | None, directory: Path | None, device: torch.device) -> None:
        self._stream = stream
        self._directory = directory
        self._device = device
        self._rank = dist.get_rank()
        self._model: RankModel | None = None

    def follow(self) -> None:
        """Carry out messages until the driver is gone."""
        while (message := self._next()) is not None:
            kind = message.header["do"]
            if kind == BEGIN:
                self._begin(RanksSetup.of(message.header))
            elif kind == RUN:
                self._run(RankRows.of(message.header))
            else:
                self._head(message.tensor)

    def _next(self) -> RankMessage | None:
        """The driver's next message, by way of rank 0; None: the driver is gone."""
        content = (self._stream is not None and self._stream.receive()) or b""
        size = torch.tensor([len(content)])
        dist.broadcast(size, 0)
        if not int(size):
            return None
        packed = torch.empty(int(size), dtype=torch.uint8)
        if content:
            packed.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(packed, 0)
        return RankMessage.of(packed.numpy().tobytes())

    def _begin(self, setup: RanksSetup) -> None:
        self._mesh = mesh = Mesh(setup.shape)
        dtype = None if setup.dtype is None else getattr(torch, setup.dtype)
        directory = self._directory or Path(setup.directory)
        reason = ""
        costs = measured_costs(mesh, self._device)
        try:
            self._model = model = load_rank(directory, setup.expert, mesh, dtype, self._device)
            self._key_values = ModelKeyValues(model.spec, model.dtype, model.device)
        except Exception as error:
            is_expected = isinstance(error, CoServeError)
            reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
            log.warning("rank_not_ready reason=%s", reason, exc_info=not is_expected)
        if self._report(reason) and self._model is not None:
            form = cheapest(setup.shape, costs, self._model.pair_bytes * USUAL_ROWS)
            self._model.exchange_by(form)
            self._answer(RankMessage({"ready": form.value, "dtype": str(self._model.dtype).removeprefix("torch.")}))

    def _report(self, reason: str) -> bool:
        """True if no rank has a reason to refuse; else rank 0 tells the driver the first."""
        own = torch.zeros(REASON_BYTES, dtype=torch.uint8)
        text = reason.encode()[:REASON_BYTES]
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else own[:0]
        reasons = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(reasons, own)
        texts = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in reasons]
        refused = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if refused:
            self._answer(RankMessage({"refused": refused[0]}))
        return not refused

    def _run(self, rows: RankRows) -> None:
        """Run this group's rows, and bring the hidden states of all to rank 0."""
        assert self._model is not None, "a driver runs nothing before the ranks are ready"
        mesh, shape = self._mesh, self._mesh.shape
        for sequence in rows.gone:
            self._key_values.release(sequence)
        own = rows.of_group(mesh.group_number)
        first = mesh.group_number - mesh.group_number % shape.expert
        hidden = torch.empty(0, device=self._device)
        if any(first <= group < first + shape.expert for group in rows.groups):
            hidden = self._model.hidden(TokenBatch.of(own, self._device) if own else None, self._key_values)
        if self._rank:
            if own and not mesh.tensor_index:
                dist.send(hidden, 0)
            return
        gathered = hidden.new_empty((count_of(rows.rows), self._model.spec.hidden_size), dtype=self._model.dtype)
        for group in sorted(set(rows.groups)):
            places = rows.places(group)
            part = hidden
            if group:
                part = gathered.new_empty((len(places), gathered.shape[1]))
                dist.recv(part, group * shape.tensor)
            gathered[places] = part
        self._answer(RankMessage({}, gathered.cpu()))

    def _head(self, hidden: Tensor | None) -> None:
        """Logits, by the first tensor group."""
        assert self._model is not None, "a driver runs nothing before the ranks are ready"
        assert hidden is not None, "a head runs on hidden states"
        if not self._mesh.group_number:
            self._answer(RankMessage({}, self._model.logits(hidden.to(self._device)).cpu()))

    def _answer(self, message: RankMessage) -> None:
        if self._stream is not None:
            self._stream.send(message.packed())


def _stream(address: str) -> Channel:
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(address)
    return Channel(connected)


def follow(driver: Channel | None, directory: Path | None, device: torch.device) -> None:
    Rank(driver, directory, device).follow()


def main(
    arguments: Sequence[str] | None = None, run: Callable[[Channel | None, Path | None, torch.device], None] = follow
) -> None:
    """Meet the other ranks, and run. ``run``: given the driver's channel on rank 0, ``--model`` and ``--device``."""
    parser = argparse.ArgumentParser(prog="rank_process", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--driver", help="the driver's socket, on rank 0's box")
    parser.add_argument("--model", type=Path, help="the model's directory on this box")
    parser.add_argument("--meeting", default="env://", help="address to meet at; unless given, torchrun's environment")
    parser.add_argument("--rank", type=int, default=-1, help="with --meeting: number of this rank")
    parser.add_argument("--ranks", type=int, default=-1, help="with --meeting: their number")
    parser.add_argument("--device", choices=BACKENDS, default="cpu", help="that each rank computes on")
    given = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the driver ends its ranks
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if given.driver is not None and parent() is None:
        end_with_parent()  # its input is the driver's, by way of torchrun
    try:
        dist.init_process_group(BACKENDS[given.device], given.meeting, IDLE, given.ranks, given.rank)
        run(None if dist.get_rank() else _stream(given.driver), given.model, torch.device(given.device))
        code = 0
    except (RuntimeError, OSError) as error:
        log.error("rank_ended: another rank or the driver is gone: %s", str(error).partition("\n")[0])
        report(error)
        code = 1
    except Exception as error:
        log.exception("rank_broke")
        report(error)
        code = 1
    os._exit(code)  # a collective operation may hang in a thread


if __name__ == "__main__":
    main()
