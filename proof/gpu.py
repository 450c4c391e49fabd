"""What a device has to show, on the day that one is there: steps in order, as one Markdown report (`make gpu`).

Guarantees: each step is a process of its own. A step that fails, hangs or takes the device away does not stop the next
one; the report is written anew after each, so that a lost machine leaves all before it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._C._profiler import _ExperimentalConfig

from agent.config import read_line
from agent.runtime.machine.detection import detect
from experts.backends.capabilities import capabilities_of
from experts.errors import BackendUnavailable
from profiler.bench.policy_runs import run_line
from profiler.workload.traces import read_trace
from proof.llm.random_models import LARGE, TINY, write_random_model
from proof.llm.swapping import Asking, text_agent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DEVICES = ("cuda", "mps")  # others are a trial, on the CPU
ROOT = Path(__file__).parents[1]
COSERVE, PYTEST = (sys.executable, str(ROOT / "coserve.py")), (sys.executable, "-m", "pytest", "-q", "-rfEs")
LINE_RECIPE = "--experts 36 --detectors 2 --memory-for 12 --requests 3000"
TRIAL_RECIPE = "--architecture resnet18 --experts 5 --detectors 1 --memory-for 3 --requests 8"
PROFILED = 40  # arrivals
LIMIT_S, TRIAL_LIMIT_S = 3600.0, 150.0  # of a step
MOST_EXECUTORS = 6
TAIL_LINES, LINE_LETTERS = 25, 400
OUTPUTS = re.compile(r'"outputs_sha256": "(\w+)"')
REPORT = "report.md"


@dataclass(frozen=True, slots=True)
class ReportStep:
    """A command, and what came of it. ``repeats_last``: its outputs have to be those of the step before."""

    title: str
    command: tuple[str, ...]
    repeats_last: bool = False
    status: str = ""
    seconds: float = 0.0
    text: str = ""


def device_here(wanted: str) -> str | None:
    """The device to run on; None without one. ``wanted``: auto, or a line file's `device`."""
    for name in DEVICES if wanted == "auto" else (wanted,):
        try:
            detect(name)
        except BackendUnavailable:
            continue
        return name
    return None


def steps_on(device: str, folder: Path) -> Iterator[ReportStep]:
    is_trial = device not in DEVICES
    line, trace = str(folder / "line" / "line.yaml"), str(folder / "line" / "trace.jsonl")
    on, on_cpu = (("env", f"COSERVE__DEVICE={name}", *COSERVE) for name in (device, "cpu"))
    played = ("bench", line, "--trace", trace, "--policy", "coserve")
    tests, options = ("tests/agent/runtime", ["--casual"]) if is_trial else ("tests", [])
    yield ReportStep("Tests that need a device", (*PYTEST, "-m", "gpu or mps", tests))
    yield ReportStep("Kernels, compiled by Triton where it is", (*PYTEST, "tests/experts/llm/kernels"))
    recipe = (TRIAL_RECIPE if is_trial else LINE_RECIPE).split()
    yield ReportStep(
        "A line of classifiers and detectors", (*COSERVE, "bench", "generate", str(folder / "line"), *recipe)
    )
    yield ReportStep("Box and line", (*on, "doctor", line))
    yield ReportStep("Verdicts of the device", (*on, *played, "--json", "--executors", f"{device}=1"))
    yield ReportStep("Verdicts of the CPU", (*on_cpu, *played, "--json", "--executors", "cpu=1"), repeats_last=True)
    yield ReportStep("Loads from the SSD", (*on, "bench", "load", "--line", line))
    yield ReportStep("Profile: K, B, plateaus, workspaces, links", (*on, "profile", line, *options))
    yield ReportStep("Policies", (*on, *played, "--policy", "samba", "--policy", "naive"))
    for count in range(1, 2 if is_trial or device == "mps" else MOST_EXECUTORS + 1):
        yield ReportStep(f"Executors of the device: {count}", (*on, *played, "--executors", f"{device}={count}"))
    here = (sys.executable, "-m", "proof.gpu")
    shape = TINY.name if is_trial else LARGE.name
    yield ReportStep("Texts of the device", (*here, "texts", device, shape, str(folder)))
    yield ReportStep("Texts of the CPU", (*here, "texts", "cpu", shape, str(folder)), repeats_last=True)
    yield ReportStep("Kernels and copies", ("env", on[1], *here, "kernels", line, trace, str(folder.parent)))


def run_steps(device: str, folder: Path, steps: Iterable[ReportStep]) -> Iterator[ReportStep]:
    """Run one after the other, and write ``folder``/report.md after each."""
    heading = heading_of(device)  # before a step can lose the device
    found: list[ReportStep] = []
    limit_s = LIMIT_S if device in DEVICES else TRIAL_LIMIT_S
    for step in steps:
        began_s = time.monotonic()
        try:
            done = subprocess.run(
                step.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s
            )
            status, output = "ok" if done.returncode == 0 else f"exit code {done.returncode}", done.stdout
        except subprocess.TimeoutExpired as error:
            status, output = f"no end within {limit_s:.0f} s", error.stdout or b""
        text = output.decode(errors="replace")
        if step.repeats_last and status == "ok":
            outputs, expected = OUTPUTS.findall(text), OUTPUTS.findall(found[-1].text)
            if not outputs or outputs != expected:
                status = "other outputs than in the step before"
        found.append(replace(step, status=status, seconds=time.monotonic() - began_s, text=text))
        (folder / REPORT).write_text(report_of(heading, found), encoding="utf-8")
        yield found[-1]


def heading_of(device: str) -> list[str]:
    box = detect(device)
    versions = ", ".join(f"{name} {version}" for name, version in box.versions)
    return [
        f"# On {device}: {box.model}", "", f"{box.cpu or box.model}, {box.cores} cores; {versions}", "",
        *(f"- {processor}: {capabilities_of(processor).text}" for processor in box.processors), "",
    ]  # fmt: skip


def report_of(heading: list[str], ran: list[ReportStep]) -> str:
    lines = [
        *heading, "| step | status | s |", "| --- | --- | --- |",
        *(f"| {each.title} | {each.status} | {each.seconds:.0f} |" for each in ran),
    ]  # fmt: skip
    for each in ran:
        tail = each.text.strip().replace("```", "'''").splitlines()[-TAIL_LINES:]
        shown = [line if len(line) <= LINE_LETTERS else f"{line[:LINE_LETTERS]}..." for line in tail]
        lines += ["", f"## {each.title}", "", "```", f"$ {shlex.join(each.command)}", *shown, "```"]
    return "\n".join(lines) + "\n"


def profile_kernels(line: str, trace: str, folder: str) -> None:
    """Play a trace's start under torch's profiler: ``folder``/kernels.json for Perfetto, and a table to stdout."""
    config = read_line(Path(line))
    with torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as seen:
        run_line(config, read_trace(Path(trace), config.catalog)[:PROFILED])
    seen.export_chrome_trace(str(Path(folder) / "kernels.json"))
    sys.stdout.write(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=40))
    if torch.cuda.is_available():  # beside the budgets of the line
        sys.stdout.write(f"most bytes reserved by torch: {torch.cuda.max_memory_reserved()}\n")


def write_texts(device: str, shape: str, folder: str) -> None:
    """Ask random models on executors of a device alone; print a digest of their tokens, and their speed, as JSON."""
    asking = Asking({each.name: each for each in (TINY, LARGE)}[shape], rounds=2)
    models = {
        name: write_random_model(Path(folder) / f"{device}-{number}", asking.shape, seed=number)
        for number, name in enumerate(asking.models)
    }
    expert_bytes = 2 * sum(file.stat().st_size for each in models.values() for file in each.iterdir())
    with text_agent(Path(folder) / f"texts-{device}", models, expert_bytes, device) as agent:
        agent.write(asking.round(0))
        began_s = time.perf_counter()
        tokens = agent.write(asking.round(1))
        seconds = time.perf_counter() - began_s
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    found = {"outputs_sha256": digest, "tokens_per_s": sum(map(len, tokens)) / seconds}
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    {"kernels": profile_kernels, "texts": write_texts}[sys.argv[1]](*sys.argv[2:])
