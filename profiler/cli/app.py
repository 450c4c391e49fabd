"""The offline commands as one typer application: ``coserve profile | plan | bench``; and, among those of experts,
``coserve experts threshold``."""

from __future__ import annotations

import typer

from agent.cli.experts import experts_app
from profiler.cli.bench import bench_app
from profiler.cli.plan import plan
from profiler.cli.profile import profile
from profiler.cli.threshold import threshold

offline_app = typer.Typer()
offline_app.command()(profile)
offline_app.command()(plan)
offline_app.add_typer(bench_app, name="bench")
experts_app.command()(threshold)
