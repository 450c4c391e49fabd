"""Agents that start within a moment: everything is imported once, and each agent is a fork that can be killed.

Reads lines from stdin: `start` forks an agent of the line in argv and prints its pid; `wait PID` prints its exit code.
Nothing runs before the fork: no thread, no gRPC.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Serve commands until stdin ends."""
    sys.path.insert(0, sys.argv[2])
    import torch

    torch.set_num_threads(1)
    import agent.runtime.loop
    import agent.service.serve
    import experts.backends.fake  # noqa: F401
    from agent.config import read_line

    line, log = Path(sys.argv[1]), Path(sys.argv[3])
    print("ready", flush=True)  # noqa: T201
    for command in sys.stdin:
        if command.startswith("wait"):
            _, status = os.waitpid(int(command.split()[1]), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)  # noqa: T201
            continue
        _serve(agent.service.serve.serve_line, read_line, line, log)


def _serve(serve_line, read_line, line: Path, log: Path) -> None:
    """In the fork: never returns."""
    import logging

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    code = 0
    try:
        serve_line(read_line(line, {}), lambda *_: None)
    except BaseException:
        logging.exception("agent_ended")
        code = 1
    logging.shutdown()
    os._exit(code)


main()
