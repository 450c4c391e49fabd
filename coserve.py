"""The one command: ``coserve``, with the command lines of the floors that are installed."""

from __future__ import annotations

from importlib.util import find_spec

from agent.cli.app import app
from agent.cli.endings import plain_output
from agent.runtime.machine.heap import bound_heaps
from profiler.cli.app import offline_app
from profiler.cli.bench import bench_app

if find_spec("proof") is not None:  # left out of the bundle
    from proof.cli import mount

    mount(bench_app)
app.add_typer(offline_app)


def main() -> None:
    """Entry point of the console script."""
    bound_heaps()
    with plain_output():
        app()


if __name__ == "__main__":
    main()
