"""What the drills share."""

import sys

import pytest

from tests.drill.scene import Agents, Scene


@pytest.fixture
def scene(tmp_path, tmp_path_factory):
    """A line of its own; its socket's path is short, as they have to be."""
    return Scene(tmp_path, tmp_path_factory.mktemp("s") / "a.sock")


@pytest.fixture
def agents(scene, forks):
    all_of_them = Agents(scene, forks)
    yield all_of_them
    if all_of_them.running is not None:
        all_of_them.running.kill()


@pytest.fixture
def report(capsys):
    """Prints a drill's counts, whatever pytest captures."""

    def write(what, counts):
        with capsys.disabled():
            account = ", ".join(f"{name} {count}" for name, count in counts.items())
            sys.stdout.write(f"\ndrill {what}: {account}\n")

    return write
