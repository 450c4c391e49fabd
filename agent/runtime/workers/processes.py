"""Workers as processes of this box, children of the agent: their arguments are a folder and the level of the log."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from agent.runtime.machine.garbage import loading_modules
from experts.children.child import Child, parent

if TYPE_CHECKING:
    from collections.abc import Mapping


def start_process(folder: Path, environment: Mapping[str, str] | None = None) -> Child:
    """Start a worker's process, which keeps its files in ``folder``. ``environment``: variables in addition."""
    return Child(__spec__.name, str(folder), str(logging.root.level), environment=environment or {})


def main() -> None:
    with loading_modules():
        from agent.runtime.workers.host import WorkerHost  # here, as the agent's end imports this module, too

    folder, level, channel = Path(sys.argv[1]), int(sys.argv[2]), parent()
    assert channel is not None, "a child"
    form = f"%(asctime)s %(levelname)s %(name)s worker={folder.parent.name} %(message)s"
    logging.basicConfig(level=level, stream=sys.stderr, format=form)
    with suppress(BrokenPipeError, ConnectionResetError):  # the agent is gone
        WorkerHost(channel, folder).serve()


if __name__ == "__main__":
    main()
