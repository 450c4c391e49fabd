"""A Ray cluster of several nodes on this machine, for one benchmark: a process of ``ray start`` for each node.

Guarantees: a token is required, no usage statistics are sent, and all its processes are ended at the end.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from agent.cluster.extra import SETTINGS, why_absent
from agent.config import set_unless_given
from experts.errors import CoServeError

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVE_MODULES = ("ray", "mmh3", "fastapi", "starlette", "uvicorn")  # mmh3: of Ray Serve's router by consistent hashing
PATIENCE = "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"  # 0.1 s by default: short for several nodes on a few cores
HOST = "127.0.0.1"
BOX = "box"  # resource of each node, for one worker or replica
STARTED = "Ray runtime started"  # in the log of `ray start`
START_S, STOP_S, POLL_S = 120.0, 20.0, 0.25
SHOWN = 500  # characters of a log
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
    """Address of a new cluster, to which this process is connected. Raises CoServeError."""
    set_unless_given(SETTINGS, SETTINGS)
    set_unless_given({"RAY_AUTH_TOKEN": secrets.token_hex(32)}, ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    set_unless_given({PATIENCE: "2.0"}, {PATIENCE})
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    address = f"{HOST}:{port}"
    with ExitStack() as ending:
        scratch = tempfile.TemporaryDirectory(prefix="coserve-ray-", ignore_cleanup_errors=True)
        folder = Path(ending.enter_context(scratch))
        head = ("--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false")
        ending.enter_context(_node(folder / "head.log", *head))
        for number in range(1, count):  # one after the other: at once they take each other's socket names
            ending.enter_context(_node(folder / f"node-{number}.log", f"--address={address}"))
        _connect(address)
        ending.callback(_disconnect)
        yield address


@contextmanager
def _node(log: Path, *options: str) -> Iterator[None]:
    """A node that has started, and ends with this context."""
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options, f"--node-ip-address={HOST}",
        "--num-cpus=1", f'--resources={{"{BOX}": 1}}', f"--object-store-memory={OBJECT_STORE_BYTES}",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline_s = time.monotonic() + START_S
        while STARTED not in (text := log.read_text("utf-8", "replace")):
            if time.monotonic() > deadline_s or process.poll() is not None:
                raise CoServeError(f"a node of Ray did not start: {text[-SHOWN:]}")
            time.sleep(POLL_S)
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what is left of its session


def _connect(address: str) -> None:
    from agent.cluster.ray_cluster import RayCluster

    RayCluster(address, "coserve-bench")
    logging.getLogger("ray").setLevel(logging.ERROR)


def _disconnect() -> None:
    import ray

    ray.shutdown()
