"""`coserve service`: the agent under systemd."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from agent.cli.arguments import AsJson
from agent.cli.endings import explained

service_app = typer.Typer(help="The agent as a systemd service.", no_args_is_help=True)


@service_app.callback()
def service() -> None:
    """The agent as a systemd service."""


@service_app.command("install")
def service_install(
    prints: Annotated[bool, typer.Option("--print", help="print the shell script, and run nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the units of this very agent, with their user and folders, and load them into systemd. Needs root."""
    from agent.commands.unit_files import install, unit_files

    with explained():
        units = unit_files()
        if not prints:
            install(units)
    if as_json:
        print(json.dumps({"files": units.files, "commands": units.commands, "is_installed": not prints}))
    elif prints:
        print(units.script(), end="")
    else:
        print("installed: now write /etc/coserve/line.yaml, then systemctl enable --now coserve")
