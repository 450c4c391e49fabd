"""The one command: ``coserve``."""

from __future__ import annotations

from agent.cli import app
from profiler.cli import offline_app

app.add_typer(offline_app)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
