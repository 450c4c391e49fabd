"""The Ray cluster that a line names: actors for its workers, and the agent's ends of their channels.

Ray's own protocol is cloudpickle, between nodes that the token admits; what crosses for us is bytes. Import it once
``extra.SETTINGS`` are in the environment.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import ray
import ray._private.worker as ray_driver
from ray.exceptions import AuthenticationError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agent.cluster.actors import WorkerActor
from agent.faults.errors import ClusterUnreachable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agent.line_file.cluster import WorkerSection

START_S = 120.0  # for Ray to start an actor

logger = logging.getLogger(__name__)


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
