"""Benchmarks of the proof as commands, mounted beside ``coserve bench LINE.yaml`` where this floor is installed.

Heavy runtimes are imported inside the commands that need them, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agent.cli.arguments import AsJson, LineFile
from agent.cli.endings import FAILED, USAGE, explained, log_to_stderr
from profiler.cli.arguments import LinePrecision, NewPrecision, disk_explained, refuse_unused, scratch_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent.config import LineConfig
    from profiler.bench.measured import Measured

Directory = Annotated[
    Path | None, typer.Option("--dir", help="a folder on the SSD to measure; default: the current folder")
]


def mount(bench_app: typer.Typer) -> None:
    models = (distil, llm, texts)
    for command in (cluster, compute, decisions, generate, gpu, load, mesh, *models, pages, report, start, tasks):
        bench_app.command()(command)


@contextmanager
def _measuring(line: Path | None = None) -> Iterator[tuple[Callable[[str, int, int], None], LineConfig | None]]:
    """Progress on stderr, refusals in one line, threads that wait as an agent's do: to be entered before torch loads.

    ``line``: its configuration is read, too.
    """
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line
    from agent.environment import set_spinning

    log_to_stderr(logging.WARNING)
    with explained(), disk_explained():
        config = None if line is None else read_line(line)
        set_spinning()
        with progress_on_stderr() as progress:
            yield progress, config


def _show(measured: Measured, *, as_json: bool) -> None:
    print(json.dumps(measured.as_json()) if as_json else measured.text())


def cluster(
    directory: Directory = None,
    turns: Annotated[int, typer.Option(min=1, help="of each contestant; medians are compared")] = 2,
    as_json: AsJson = False,
) -> None:
    """Workers on three nodes of Ray on this machine, beside Ray Serve's model multiplexing; compute is emulated."""
    with _measuring() as (progress, _):
        from proof.cluster.report import measure_cluster

        measured = measure_cluster(scratch_folder(directory), progress, turns=turns)
    _show(measured, as_json=as_json)


def compute(
    architecture: Annotated[
        list[str] | None, typer.Option(help="torchvision classifiers or ultralytics YAMLs; default: resnet101")
    ] = None,
    size: Annotated[str, typer.Option(help="of an image: HEIGHTxWIDTH")] = "224x224",
    batches: Annotated[str, typer.Option(help="batch sizes, such as 1,8")] = "1,8",
    precision: Annotated[
        list[str] | None, typer.Option(help="forms of ours; auto: all that can be run here; default: auto")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="peers beside them, such as openvino-bf16; default: all that are installed")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="rounds of all contestants; medians are shown")] = 15,
    limit: Annotated[
        float | None, typer.Option(min=0, help="seconds; no round begins later for an architecture and batch size")
    ] = None,
    directory: Directory = None,
    as_json: AsJson = False,
) -> None:
    """Measure a batch in each form, beside torch itself, ONNX Runtime, OpenVINO and the arithmetic's own limit."""
    with _measuring() as (progress, _):
        from profiler.cli.arguments import batch_sizes, given_peers, given_precisions, image_size
        from proof.compute.contestants import PEERS
        from proof.compute.measure import LIMIT_S, ComputeOptions, measure_compute_forms

        options = ComputeOptions(
            architectures=tuple(architecture or ("resnet101",)),
            size=image_size(size),
            batches=batch_sizes(batches),
            forms=given_precisions(precision or ()),
            peers=given_peers(against or (), tuple(PEERS)),
            rounds=repeat,
            limit_s=LIMIT_S if limit is None else limit,
        )
        measured = measure_compute_forms(scratch_folder(directory), options, progress)
    _show(measured, as_json=as_json)


def distil(as_json: AsJson = False) -> None:
    """Students of a mixture-of-experts: soft labels until a step, beside soft labels to the end, and beside none."""
    with _measuring() as (progress, _):
        from proof.distillation import measure_distillation

        measured = measure_distillation(progress)
    _show(measured, as_json=as_json)


def generate(
    folder: Annotated[Path, typer.Argument(help="a new folder: line.yaml, weights, images, trace.jsonl")],
    experts: Annotated[int, typer.Option(min=1, help="classifiers, one component each")] = 40,
    architecture: Annotated[str, typer.Option(help="a torchvision classifier")] = "resnet101",
    detectors: Annotated[int, typer.Option(min=0, help="shared YOLOv5m and YOLOv5l behind every third component")] = 0,
    requests: Annotated[int, typer.Option(min=1)] = 240,
    memory_for: Annotated[int, typer.Option(min=1, help="experts that fit into memory")] = 12,
    seed: Annotated[int, typer.Option(help="of everything random")] = 0,
    precision: NewPrecision = "fp32",
    as_json: AsJson = False,
) -> None:
    """Write a line of random experts and a trace with heavy-tailed popularity, for `coserve bench LINE.yaml`."""
    from profiler.cli.arguments import given_precision
    from profiler.workload.generated_line import LineRecipe, generate_line

    with explained(), disk_explained():
        form = given_precision(precision) or "auto"
        recipe = LineRecipe(experts, architecture, detectors, requests, seed, memory_for, form)
        made = generate_line(folder, recipe)
    if as_json:
        print(json.dumps(asdict(made), default=str))
    else:
        print(f"{made.written_bytes / 1e9:.1f} GB written, memory for {memory_for} experts; measure it with")
        print(f"coserve bench {made.line} --trace {made.trace} --policy coserve --policy samba")


def gpu(
    device: Annotated[str, typer.Option(help="cuda or mps; emulated or integrated: a short trial; auto")] = "auto",
    folder: Annotated[Path, typer.Option("--out", help="where report.md and kernels.json go")] = Path("gpu-report"),
) -> None:
    """All that a device has to show, step by step, as one Markdown report. Exit code 2 without a device."""
    with _measuring():
        from profiler.workload.generated_line import removed_afterwards
        from proof.gpu import device_here, run_steps, steps_on
        from proof.report import prepare_folder

        if (found := device_here(device)) is None:
            where = "any GPU" if device == "auto" else device
            print(f"no device: torch does not run on {where} here - DEVICE=emulated tries the steps", file=sys.stderr)
            raise typer.Exit(USAGE)
        prepare_folder(folder)
        code = 0
        with removed_afterwards(folder.absolute(), "lines-") as scratch:
            for ran in run_steps(found, folder, steps_on(found, scratch)):
                print(f"{ran.status}: {ran.title}, {ran.seconds:.0f} s", flush=True)
                code = code if ran.status == "ok" else FAILED
    raise typer.Exit(code)


def llm(
    directory: Directory = None,
    quick: Annotated[bool, typer.Option("--quick", help="tiny models, one round: only whether it runs")] = False,
    as_json: AsJson = False,
) -> None:
    """Language models: scheduling, swapping, sharing and offloading, with transformers as the peer."""
    with _measuring() as (progress, _):
        from proof.llm.report import measure_llm

        measured = measure_llm(scratch_folder(directory), progress, quick=quick)
    _show(measured, as_json=as_json)


def mesh(
    batch: Annotated[int, typer.Option(min=1, help="sequences for each GPU; the paper states none")] = 8,
    folder: Annotated[Path | None, typer.Option("--out", help="also write mesh.md and its charts there")] = None,
    as_json: AsJson = False,
) -> None:
    """Figures 10 to 13 of DeepSpeed-MoE on a simulated mesh of 8 to 256 GPUs, and the messages of its exchanges."""
    with _measuring():
        from proof.mesh.figures import simulate_figures, write_figures
        from proof.report import prepare_folder

        if folder is not None:
            prepare_folder(folder)
        measured = simulate_figures(batch)
        if folder is not None:
            write_figures(folder, measured)
    _show(measured, as_json=as_json)


def pages(
    line: LineFile,
    trace: Annotated[Path, typer.Option(help="JSON lines, one arrival each: what each turn judges, without its times")],
    pairs: Annotated[int, typer.Option(min=8, help="turns with pages and without")] = 8,
    browser: Annotated[
        str | None, typer.Option(metavar="CHROMIUM", help="open pages in this browser instead of asking as they do")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what three open pages of the station cost a line: its throughput with them and without, by turns."""
    with _measuring(line) as (progress, config):
        from profiler.workload.traces import read_trace
        from proof.parts.pages import measure_pages

        assert config is not None
        arrivals = read_trace(trace, config.catalog)
        measured = measure_pages(config, arrivals, pairs, browser, partial(progress, "pages"))
    _show(measured, as_json=as_json)


def report(
    folder: Annotated[Path, typer.Option("--out", help="where report.md and its charts go")] = Path("bench-report"),
    directory: Directory = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="the traces and tasks that the targets are stated for, searches on whole samples; half an hour",
        ),
    ] = False,
    repeat: Annotated[int | None, typer.Option(min=1, help="rounds; default: 1, with --full 3")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the proof in one run, as a Markdown report with charts; the short form takes under five minutes."""
    with _measuring() as (progress, _):
        from profiler.bench.measured import targets_text
        from proof.report import REPORT, measure_report, prepare_folder, write_report

        scratch = scratch_folder(directory)
        prepare_folder(folder)
        found = measure_report(scratch, progress, full=full, repeats=repeat)
        if as_json:
            targets = [asdict(target) for target in found.targets]
            print(json.dumps({"path": str(folder / REPORT), "targets": targets, "seconds": found.seconds}))
        else:
            print(targets_text(found.targets))
        path = write_report(folder, found)
    if not as_json:
        print(f"{path} in {found.seconds:.0f} s")


def start(
    directory: Directory = None, starts: Annotated[int, typer.Option(min=1)] = 3, as_json: AsJson = False
) -> None:
    """Measure the start of an agent with one tiny expert, and its memory."""
    with _measuring():
        from proof.parts.starting import measure_start

        measured = measure_start(scratch_folder(directory), starts)
    _show(measured, as_json=as_json)


def decisions(as_json: AsJson = False) -> None:
    """Measure a decision against the number of queued requests."""
    from proof.parts.decisions import measure_growth

    _show(measure_growth(), as_json=as_json)


def load(
    ctx: typer.Context,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="a folder on the SSD to measure; default: the current one, or the line file's"),
    ] = None,
    architecture: Annotated[str, typer.Option(help="a torchvision classifier or an ultralytics YAML")] = "resnet101",
    onnx: Annotated[
        Literal["detector", "anomaly"] | None, typer.Option(help="instead: ONNX graphs, a YOLO11m's or a PatchCore's")
    ] = None,
    line: Annotated[Path | None, typer.Option(help="instead: experts of a line, as it would serve them")] = None,
    expert: Annotated[list[str] | None, typer.Option(help="of the line, one or several; default: all")] = None,
    files: Annotated[int, typer.Option(min=1, help="experts written for it, removed afterwards")] = 8,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    precision: LinePrecision = None,
    as_json: AsJson = False,
) -> None:
    """SSD to runnable, beside a raw direct read of the same packed bytes."""
    if line is not None:
        refuse_unused(ctx, ("architecture", "onnx", "files"), "the experts are the line's - leave it, or leave --line")
    else:
        refuse_unused(ctx, ("expert",), "names experts of a line - give --line LINE.yaml, too")
    if onnx is not None:
        unused = ("architecture", "precision")
        refuse_unused(ctx, unused, "an ONNX graph has its own architecture, and is fp32 - leave it, or leave --onnx")
    with _measuring(line) as (_, config):
        from profiler.cli.arguments import given_precision, precision_without_profile
        from proof.parts.loading import measure_graph_loading, measure_line_loading, measure_loading

        folder = scratch_folder(directory or (line.parent if line is not None else None))
        given = given_precision(precision)
        if config is not None:
            measured = measure_line_loading(folder, config.having(precision=given), expert or (), repeats)
        elif onnx is not None:
            measured = measure_graph_loading(folder, onnx, files, repeats)
        else:
            measured = measure_loading(folder, architecture, files, repeats, precision_without_profile(given))
    _show(measured, as_json=as_json)


def tasks(
    short: Annotated[
        bool, typer.Option("--short", help="A1 and B1 only, searched on half the sample: other figures")
    ] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="also write figures 13 to 18 there")] = None,
    as_json: AsJson = False,
) -> None:
    """The paper's tasks A1 A2 B1 B2, simulated on its two boxes."""
    with _measuring() as (progress, _):
        from proof.paper.devices import paper_devices
        from proof.paper.evaluation import FULL_FORM, SHORT_FORM, evaluate, evaluation_json, evaluation_table
        from proof.paper.figures import write_figures
        from proof.report import prepare_folder

        if folder is not None:
            prepare_folder(folder)
        evaluation = evaluate(paper_devices(), progress, *(SHORT_FORM if short else FULL_FORM))
        print(json.dumps(evaluation_json(evaluation)) if as_json else evaluation_table(evaluation))
        if folder is not None:
            (folder / "tasks.md").write_text(write_figures(evaluation, folder), encoding="utf-8")


def texts(
    directory: Directory = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="decode, slots, first_token, prefill, speculation, moe, beside_images, tokenising, parity; or all"
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="a trained model's GGUF file, also measured: of SmolLM2-135M, for example")
    ] = None,
    llama_cpp: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="where the wheel xllamacpp is; default: where Python finds it")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="shapes that the targets are stated for, and int8")] = False,
    as_json: AsJson = False,
) -> None:
    """What the text runtime has to reach, row by row: beside llama.cpp, transformers, or itself."""
    with _measuring() as (progress, _):
        from proof.llm.texts import FULL, SHORT, TextBench, measure_texts

        scratch = scratch_folder(directory)
        bench = TextBench(scratch, FULL if full else SHORT, llama_cpp, weights)
        measured = measure_texts(scratch, progress, bench, only or ())
    _show(measured, as_json=as_json)
