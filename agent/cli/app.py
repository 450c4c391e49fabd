"""The agent's commands as one application. Each prints for people, or with ``--json`` one JSON object and nothing else.

Exit codes: 0 done, 1 failed at run time, 2 usage, 78 configuration. Heavy runtimes are imported inside the commands
that need them, so that ``--help`` and ``config check`` answer at once.
"""

from __future__ import annotations

import typer

from agent.cli.asking import generate, results, status
from agent.cli.backup import backup, restore
from agent.cli.config import check_config, config_schema, show_config
from agent.cli.experts import compare_expert, list_experts, promote_expert, verify_experts
from agent.cli.models import add_expert, import_expert
from agent.cli.running import demo, doctor, inspect, serve
from agent.cli.service import service, service_install

app = typer.Typer(
    name="coserve",
    help="Serves hundreds of inspection experts from one edge box whose memory holds a few dozen of them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for command in (serve, inspect, results, status, generate, doctor, backup, restore, demo):
    app.command()(command)

experts_app = typer.Typer(
    help="The experts of a line: list, add, import, verify, compare, promote.", no_args_is_help=True
)
experts_app.command("list")(list_experts)
experts_app.command("compare")(compare_expert)
experts_app.command("promote")(promote_expert)
experts_app.command("import")(import_expert)
experts_app.command("add")(add_expert)
experts_app.command("verify")(verify_experts)
app.add_typer(experts_app, name="experts")

config_app = typer.Typer(help="Line files: check one, print their schema.", no_args_is_help=True)
config_app.command("show")(show_config)
config_app.command("check")(check_config)
config_app.command("schema")(config_schema)
app.add_typer(config_app, name="config")

service_app = typer.Typer(help="The agent as a systemd service.", no_args_is_help=True)
service_app.callback()(service)
service_app.command("install")(service_install)
app.add_typer(service_app, name="service")
