"""A Ray cluster of several nodes on this machine, for one benchmark.

Guarantees: a token is required, no usage statistics are sent, and all its processes are ended at the end.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from agent.cluster.extra import SETTINGS, why_absent
from agent.environment import set_unless_given
from experts.errors import CoServeError

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVE_MODULES = ("ray", "mmh3", "fastapi", "starlette", "uvicorn")  # mmh3: of Ray Serve's router by consistent hashing
PATIENCE = "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"  # 0.1 s by default: short for several nodes on a few cores
HOST = "127.0.0.2"  # Ray replaces 127.0.0.1 with an address of a network
BOX = "box"  # resource of each node, for one worker or replica
OBJECT_STORE_BYTES = 100_000_000  # what crosses here is inline


def require_ray() -> None:
    """Raises CoServeError, with what to install."""
    missing = why_absent()
    if missing is None and any(find_spec(name) is None for name in SERVE_MODULES):
        missing = "Ray Serve is the peer of this benchmark alone: install it with `pip install 'ray[data,serve]' mmh3`"
    if missing is not None:
        raise CoServeError(missing)


@contextmanager
def ray_nodes(count: int) -> Iterator[str]:
    """Address of a new cluster, to which this process is connected. Raises ClusterUnreachable."""
    with ExitStack() as ending:
        folder = ending.enter_context(TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        ours = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": folder, PATIENCE: "2.0"}
        for name, value in (SETTINGS | ours).items():
            set_unless_given({name: value}, {name})
        import ray
        from ray.cluster_utils import Cluster

        from agent.cluster.ray_cluster import RayCluster

        cluster = Cluster()
        ending.callback(cluster.shutdown)
        for _ in range(count):
            cluster.add_node(
                node_ip_address=HOST,
                num_cpus=1,
                resources={BOX: 1},
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
            )
        ending.callback(ray.shutdown)
        RayCluster(cluster.address, "coserve-bench")
        logging.getLogger("ray").setLevel(logging.ERROR)
        yield cluster.address
