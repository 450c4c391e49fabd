"""The agent's commands as one application. Each prints for people, or with ``--json`` one JSON object and nothing else.

Exit codes: 0 done, 1 failed at run time, 2 usage, 78 configuration. Heavy runtimes are imported inside the commands
that need them, so that ``--help`` and ``config check`` answer at once.
"""

from __future__ import annotations

import typer

from agent.cli.asking import explain, generate, status, trace
from agent.cli.config import config_app
from agent.cli.experts import experts_app
from agent.cli.records import backup, restore, results
from agent.cli.reviews import rejudge, review_app
from agent.cli.running import demo, doctor, inspect, serve, service_app

app = typer.Typer(
    name="coserve",
    help="Serves hundreds of inspection experts from one edge box whose memory holds a few dozen of them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (serve, inspect, results, rejudge, status, explain, trace, generate, doctor, backup, restore, demo):
    app.command()(command)
app.add_typer(experts_app, name="experts")
app.add_typer(review_app, name="review")
app.add_typer(config_app, name="config")
app.add_typer(service_app, name="service")
