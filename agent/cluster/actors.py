"""WorkerActor: a Ray actor that hosts one worker. Each call carries messages of ``agent.runtime.workers`` as bytes.

Guarantees: messages to the worker keep their order, and so do its answers; the actor ends with the agent that created
it, or when it is killed. Once its host has ended, the agent's end of the channel kills it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue, SimpleQueue
from tempfile import gettempdir
from threading import Thread

import ray

from agent.runtime.workers.host import WorkerHost

RECEIVE_S = 5.0  # longest wait of one call for messages of the worker
WAITING = 4  # messages to the worker: an image waits here for so many pieces of a file at most


class ActorChannel:
    """The worker's end: queues that the actor's methods fill and empty."""

    def __init__(self) -> None:
        self.inbox: Queue[bytes | None] = Queue(WAITING)
        self.outbox: SimpleQueue[bytes | None] = SimpleQueue()

    def send(self, *messages: bytes) -> None:
        for message in messages:
            self.outbox.put(message)

    def receive(self) -> bytes | None:
        return self.inbox.get()

    def kill(self) -> None:
        with suppress(Full):  # the host takes what waits, and sees that it has ended
            self.inbox.put_nowait(None)

    def close(self) -> None:
        self.outbox.put(None)


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"in": 1, "out": 1})
class WorkerActor:
    """``folder``: for packed files; one in the node's temporary files if it cannot be made."""

    def __init__(self, name: str, folder: str, level: int) -> None:
        logging.basicConfig(level=level, format=f"%(asctime)s %(levelname)s %(name)s worker={name} %(message)s")
        self._channel = ActorChannel()
        Thread(target=self._serve, args=(_made(Path(folder), name),), name="worker", daemon=True).start()

    @ray.method(concurrency_group="in")
    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group="in")
    def send(self, messages: list[bytes]) -> None:
        for message in messages:
            self._channel.inbox.put(message)

    @ray.method(concurrency_group="out")
    def receive(self) -> list[bytes] | None:
        """Messages of the worker, at least one; [] after RECEIVE_S without any; None once it has ended."""
        found: list[bytes] = []
        with suppress(Empty):
            while (message := self._channel.outbox.get(timeout=0.0 if found else RECEIVE_S)) is not None:
                found.append(message)
            self._channel.close()  # the next call returns None
            return found or None
        return found

    def _serve(self, folder: Path) -> None:
        try:
            WorkerHost(self._channel, folder).serve()
        except Exception:
            logging.getLogger(__name__).exception("worker_broken")
        self._channel.close()


def _made(folder: Path, name: str) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        own = Path(gettempdir()) / f"coserve-{os.getuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        if own.stat().st_uid != os.getuid():
            raise PermissionError(f"{own} is of another user: remove it") from None
        folder = own / digest / name / folder.name
        folder.mkdir(parents=True, exist_ok=True)
    return folder
