"""The Ray cluster that a line names: an actor hosts a worker, and the agent holds the other end of its channel.

Each call carries messages of ``agent.runtime.workers`` as bytes. Guarantees: messages to the worker keep their order,
and so do its answers; the actor ends with the agent that created it, or when it is killed. Once its host has ended, the
agent's end of the channel kills it. Ray's own protocol is cloudpickle, between nodes that the token admits; what
crosses for us is bytes. ``extra.SETTINGS`` must be in the environment before this module is imported.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full, Queue, SimpleQueue
from tempfile import gettempdir
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

import ray
import ray._private.worker as ray_driver
from ray.exceptions import AuthenticationError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agent.faults.errors import ClusterUnreachable
from agent.runtime.workers.host import WorkerHost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.line_file.cluster import WorkerSection

RECEIVE_S = 5.0  # longest wait of one call for messages of the worker
WAITING = 4  # messages to the worker: an image waits here for so many pieces of a file at most
START_S = 120.0  # for Ray to start an actor
logger = logging.getLogger(__name__)


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


def _log(data: Mapping[str, Any], **_: object) -> None:
    for line in data["lines"]:
        logger.warning("cluster_error told_by=%s text=%s", data["pid"], line.strip())


class RayChannel:
    """The agent's end of a worker's channel."""

    def __init__(self, actor: Any) -> None:  # noqa: ANN401 - Ray's handle
        self._actor = actor
        self._received: deque[bytes] = deque()

    def send(self, *messages: bytes) -> None:
        try:
            ray.get(self._actor.send.remote(messages))
        except Exception as error:  # any error of Ray: the actor is gone, or the cluster
            raise OSError("the actor is gone") from error

    def receive(self) -> bytes | None:
        while not self._received:
            try:
                found = ray.get(self._actor.receive.remote())
            except Exception:  # noqa: BLE001 - any error of Ray, as above
                return None
            if found is None:
                return None
            self._received.extend(found)
        return self._received.popleft()

    def kill(self) -> None:
        with suppress(Exception):  # the actor, or the cluster, is gone
            ray.kill(self._actor)

    def close(self) -> None:
        """Nothing is held here."""


@dataclass(slots=True)
class ActorSpec:
    """A worker's node, with its address, and its first actor until ``start`` takes it."""

    cluster: RayCluster
    name: str
    kind: WorkerSection
    folder: Path
    actor: Any
    node: str = ""
    address: str = ""

    def start(self) -> RayChannel:
        """The worker's channel; after the first call, of a new actor, on the same node if it is there."""
        actor, self.actor = self.actor, None
        if actor is None:
            node = self.cluster.present(self.node, self.address)
            actor = self.cluster.create(self.name, self.kind, self.folder, node)
        return RayChannel(actor)


@dataclass(slots=True)
class RayCluster:
    """Connection to a cluster. Raises ClusterUnreachable."""

    address: str
    namespace: str

    def __post_init__(self) -> None:
        ray_driver.print_to_stdstream = _log  # on stdout, what nodes report would be amid a command's JSON
        try:
            ray.init(
                address=self.address,
                namespace=self.namespace,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.WARNING,
                ignore_reinit_error=True,
            )
        except (ConnectionError, RayError, RuntimeError, ValueError) as error:
            hint = "start it with `ray start --head`, with the same version of Ray and of Python"
            if isinstance(error, AuthenticationError) or "token" in str(error):
                hint = "make a token with `ray get-auth-token --generate`, and copy ~/.ray/auth_token to every node"
            raise ClusterUnreachable(self.address, str(error), hint) from error

    @property
    def nodes(self) -> int:
        """Number of nodes that are alive."""
        return sum(node["Alive"] for node in ray.nodes())

    def specs(self, kinds: Mapping[str, WorkerSection], folder: Path) -> list[ActorSpec]:
        """Workers to start, spread over the nodes as Ray and their resources decide. Raises ClusterUnreachable."""
        found = [
            ActorSpec(self, name, kind, folder / name, self.create(name, kind, folder / name))
            for name, kind in kinds.items()
        ]
        try:
            nodes = ray.get([spec.actor.node.remote() for spec in found], timeout=START_S)
        except RayError as error:
            wanted = "; ".join(f"{spec.name}: {dict(spec.kind.resources) or 'no resources'}" for spec in found)
            advice = f"give its nodes the resources of these workers ({wanted})"
            raise ClusterUnreachable(
                self.address, f"workers did not start in {START_S:.0f} s: {error}", advice
            ) from error
        addresses = {each["NodeID"]: each["NodeManagerAddress"] for each in ray.nodes()}
        for spec, node in zip(found, nodes, strict=True):
            spec.node, spec.address = node, addresses.get(node, "")
        return found

    def present(self, node: str, address: str) -> str | None:
        """The node, or the one that has come back at its address; None if neither is there."""
        alive = {each["NodeID"]: each["NodeManagerAddress"] for each in ray.nodes() if each["Alive"]}
        return node if node in alive else next((each for each, here in alive.items() if here == address), None)

    def create(self, name: str, kind: WorkerSection, folder: Path, node: str | None = None) -> Any:  # noqa: ANN401
        """An actor for a worker, on any node with its resources or on ``node``."""
        resources = dict(kind.resources)
        where: Any = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, soft=False)
        options = cast("Any", WorkerActor).options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            scheduling_strategy=where,
        )
        return options.remote(name, str(folder / "packed"), logging.root.level)
