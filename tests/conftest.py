"""Settings and fixtures of every test."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings

from tests.authority import Authority
from tests.forks import Forks

# A property has 50 examples at each push, 400 in `make test-all`; none has a deadline: a busy box is no failure.
settings.register_profile("push", max_examples=50, deadline=None)
settings.register_profile("all", max_examples=400, deadline=None)
settings.load_profile("push")

FROZEN_FROM_S = 0.01  # that a full collection takes
WITHOUT_SYNC = Path(__file__).with_name("without_sync.c")


def pytest_configure(config):
    """With several test processes, no test process and none of its children waits for the disk: see without_sync.c."""
    is_first_of_many = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    compiler = shutil.which("gcc")
    if is_first_of_many and compiler and os.uname().sysname == "Linux":
        folder = Path(tempfile.mkdtemp(prefix="coserve-tests-"))
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        library = folder / "without_sync.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, WITHOUT_SYNC], check=True)
        os.environ["LD_PRELOAD"] = " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Add the output of a failed test's processes to its report."""
    report = (yield).get_result()
    forks = getattr(item, "funcargs", {}).get("forks")
    if forks is None:
        return
    if report.failed:
        report.sections += [("process of this test", fork.report) for fork in forks.begun]
    if call.when == "teardown":
        forks.begun.clear()


class Heap:
    """Keeps full garbage collections, of which measuring makes many, from visiting objects older than the test.

    Torch alone is a million objects, and its exporters import as many again.
    """

    def __init__(self) -> None:
        self._is_slow = True
        self._began_s = 0.0

    def collected(self, phase: str, told: dict[str, int]) -> None:
        """A callback of the interpreter: a collection begins or ends."""
        if phase == "start":
            self._began_s = time.thread_time()
        elif told["generation"] == 2 and time.thread_time() - self._began_s > FROZEN_FROM_S:
            self._is_slow = True

    def freeze(self) -> None:
        """Exclude the present objects from collections, if they make collections slow."""
        if self._is_slow:
            gc.collect()
            gc.freeze()
            self._is_slow = False


@pytest.fixture(scope="session")
def _heap():
    heap = Heap()
    gc.callbacks.append(heap.collected)
    yield heap
    gc.callbacks.remove(heap.collected)
    gc.unfreeze()  # finalizers still run


@pytest.fixture(autouse=True)
def _frozen_heap(_heap):
    _heap.freeze()


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Makes a folder once for all test processes; ``make`` fills the empty folder."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "made-once"
    shared.mkdir(exist_ok=True)

    def folder_of(name, make):
        folder, complete = shared / name, shared / f"{name}.complete"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)  # left by a failed one
                folder.mkdir()
                make(folder)
                complete.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Processes with the agent already imported."""
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()


@pytest.fixture
def closed_socket(tmp_path):
    """Address of a unix socket that listens, and that this user may not open."""
    me, path = os.geteuid(), tmp_path / "closed.sock"
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen()
        path.chmod(0)
        if me == 0:
            os.seteuid(65534)  # whom nothing lets in
        yield f"unix:{path}"
        os.seteuid(me)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate authority of our own, and a certificate of it for localhost: ca.pem, server.pem, server.key."""
    folder = tmp_path_factory.mktemp("authority")
    Authority(folder, "ca").sign("server")
    return folder
