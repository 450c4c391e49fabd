"""The one command: ``coserve``."""

from __future__ import annotations

from agent.cli.app import app
from agent.runtime.machine.heap import bound_heaps
from profiler.cli.app import offline_app

app.add_typer(offline_app)


def main() -> None:
    """Entry point of the console script."""
    bound_heaps()
    app()


if __name__ == "__main__":
    main()
