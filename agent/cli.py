"""The agent's commands. Each prints for people, or with ``--json`` one JSON object and nothing else on stdout.

Exit codes: 0 done, 1 failed at run time, 2 usage, 78 configuration. Heavy runtimes are imported inside the commands
that need them, so that ``--help`` and ``config check`` answer at once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experts.errors import AgentCrashed, AlreadyRunning, BackendUnavailable, ConfigError, CoServeError, DeviceMissing
from experts.expert import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.config import LineConfig
    from agent.records.rows import Format

FAILED, USAGE, CONFIGURATION = 1, 2, 78
VERIFIED = {True: "ok ", False: "BAD", None: "-- "}

app = typer.Typer(
    name="coserve",
    help="Serves hundreds of inspection experts from one edge box whose memory holds a few dozen of them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
experts_app = typer.Typer(
    help="The experts of a line: list, add, import, verify, compare, promote.", no_args_is_help=True
)
config_app = typer.Typer(help="Line files: check one, print their schema.", no_args_is_help=True)
app.add_typer(experts_app, name="experts")
app.add_typer(config_app, name="config")
service_app = typer.Typer(help="The agent as a systemd service.", no_args_is_help=True)
app.add_typer(service_app, name="service")

LineFile = Annotated[Path, typer.Argument(metavar="LINE.yaml", help="the line file", show_default=False)]
Target = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="ask the agent that runs there: unix:PATH or HOST:PORT")
]
Authority = Annotated[
    Path | None, typer.Option("--ca", help="PEM file of the authority to trust at HOST:PORT; default the line's own")
]
TokenFile = Annotated[Path | None, typer.Option(help="file of the token to show at HOST:PORT; default the line's own")]
Certificate = Annotated[Path | None, typer.Option(help="PEM file: the certificate to show, where callers must (mTLS)")]
Key = Annotated[Path | None, typer.Option(help="PEM file: its private key")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on stdout, nothing else there")]


@contextmanager
def explained() -> Iterator[None]:
    """Errors of ours as one plain text on stderr, with the exit code of their kind."""
    try:
        yield
    except (ConfigError, AlreadyRunning) as error:
        sys.stderr.write(f"{error}\n")
        is_mistake = isinstance(error, ConfigError) and not isinstance(error, DeviceMissing)
        raise typer.Exit(CONFIGURATION if is_mistake else FAILED) from error
    except (BackendUnavailable, CoServeError) as error:
        sys.stderr.write(f"{error}\n")
        if isinstance(error, AgentCrashed) and error.leaves_threads:
            _leave_at_once(FAILED)
        raise typer.Exit(FAILED) from error


@app.command()
def serve(
    line: LineFile,
    as_json: AsJson = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="log every decision")] = False,
) -> None:
    """Run the agent: watch the line's folders, judge what comes, until SIGTERM or Ctrl-C."""
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line, service_manager
    from agent.deployment.profile_in_use import set_spinning
    from agent.service.service_manager import Notifier, failures_told

    log_to_stderr(logging.DEBUG if verbose else logging.INFO)
    with explained(), failures_told(Notifier(service_manager())):
        config = read_line(line)
        set_spinning(config)
        from agent.service.serve import serve_line  # loads torch

        with progress_on_stderr() as progress:
            closing = serve_line(config, progress)
    if as_json:
        print(json.dumps(closing))
    if closing["threads_left_behind"]:
        _leave_at_once(0)


@app.command()
def inspect(
    line: LineFile,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="image files", show_default=False)],
    component: Annotated[str, typer.Option(help="component type of all of them")],
    picture: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="draw each image there, with the anomalies and boxes in it")
    ] = None,
    target: Target = None,
    ca: Authority = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Judge images now, without the agent, or with --target by a running one: nothing is moved, nothing is stored."""
    from agent.commands.outputs import outputs_sha256
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line

    log_to_stderr(logging.WARNING)
    with explained():
        config = read_line(line)
        with progress_on_stderr() as progress:
            if target is not None:
                from agent.commands.asking import AccessFiles, ask_to_inspect

                access = AccessFiles(ca, token_file, certificate, key)
                results = ask_to_inspect(config, target, access, images, component, progress, picture)
            else:
                from agent.deployment.profile_in_use import set_spinning

                set_spinning(config)
                from agent.commands.inspection import inspect_images  # loads torch

                results = inspect_images(config, images, component, progress, picture)
    if as_json:
        print(json.dumps({"results": results, "outputs_sha256": outputs_sha256(row["label"] for row in results)}))
        return
    for result in results:
        score = "" if result["score"] is None else f" {result['score']:.3f}"
        print(f"{result['verdict']:<8} {result['label'] or result['reason']}{score}  {result['image']}")


@app.command()
def results(
    line: LineFile,
    since: Annotated[str | None, typer.Option(help="ISO 8601 time; without an offset, local time")] = None,
    verdict: Annotated[Verdict | None, typer.Option(help="only these")] = None,
    output: Annotated[str, typer.Option("--format", help="jsonl or csv")] = "jsonl",
    limit: Annotated[int | None, typer.Option(min=1, help="at most so many")] = None,
    boards: Annotated[bool, typer.Option("--boards", help="one row per board instead of per request")] = False,
    out: Annotated[Path | None, typer.Option(help="to this file, which appears whole or not at all")] = None,
    maps: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="write there where NG images are anomalous, small PNGs")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print stored verdicts, one row per request, oldest first; also while the agent runs."""
    if maps is not None and boards:
        raise typer.BadParameter("boards have no maps, their images have - leave --boards or --maps")
    from agent.commands.results import board_rows, result_rows, with_maps, write_file
    from agent.config import read_line
    from agent.records.rows import write_rows

    with explained():
        config = read_line(line)
        start = _time(since)
        form = _format(output)
        rows = board_rows(config, start, verdict, limit) if boards else result_rows(config, start, verdict, limit)
        rows = rows if maps is None else with_maps(config, rows, maps)
        if out is not None:
            count = write_file(rows, form, out)
            print(json.dumps({"file": str(out), "rows": count}) if as_json else f"{out}: {count} rows")
        elif as_json:
            print(json.dumps({"results": list(rows)}))
        else:
            write_rows(rows, form, sys.stdout)


@app.command()
def status(
    line: Annotated[Path | None, typer.Argument(metavar="[LINE.yaml]", help="the line file of the agent")] = None,
    target: Target = None,
    ca: Authority = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """How a running agent is: its queues, memories, experts and sources. Asked at the line's first gRPC address."""
    from agent.commands.asking import AccessFiles, ask_status
    from agent.commands.status import print_status, status_row
    from agent.config import read_line

    if line is None and target is None:
        raise typer.BadParameter("whose status? - name the agent's LINE.yaml, or --target ADDRESS")
    with explained():
        config = None if line is None else read_line(line)
        answered = ask_status(config, target, AccessFiles(ca, token_file, certificate, key))
    if as_json:
        print(json.dumps(status_row(answered)))
    else:
        print_status(answered)


@app.command()
def generate(
    line: LineFile,
    model: Annotated[str, typer.Argument(help="an expert, a route of texts, or auto", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="what to answer; - reads it from stdin", show_default=False)],
    is_prompt: Annotated[bool, typer.Option("--continue", help="write what follows the prompt, not an answer")] = False,
    system: Annotated[str | None, typer.Option(help="what the model is told before the prompt")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="at most so many; default what the context has")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: the likeliest token, always; default 1")] = None,
    top_p: Annotated[float | None, typer.Option(help="draw from the likeliest tokens of this probability")] = None,
    top_k: Annotated[int | None, typer.Option(help="draw from so many of the likeliest tokens")] = None,
    min_p: Annotated[float | None, typer.Option(help="no token less likely than this share of the likeliest")] = None,
    seed: Annotated[int | None, typer.Option(help="the same text each time")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this; may be given several times")] = None,
    deadline: Annotated[float | None, typer.Option(help="end after so many seconds")] = None,
    streams: Annotated[bool, typer.Option("--stream/--no-stream", help="print the text while it is written")] = True,
    target: Target = None,
    ca: Authority = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Have a running agent write a text. Asked at the line's first gRPC address."""
    from agent.commands.asking import AccessFiles
    from agent.commands.generating import closing_line, for_terminal, generated, order_for
    from agent.config import read_line

    is_shown = streams and not as_json
    clean = for_terminal if sys.stdout.isatty() else str

    def show(piece: str) -> None:
        if is_shown:
            sys.stdout.write(clean(piece))
            sys.stdout.flush()

    with explained():
        config = read_line(line)
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
        order = order_for(
            model, sys.stdin.read() if prompt == "-" else prompt, is_prompt=is_prompt, system=system,
            most_tokens=max_tokens, deadline_s=deadline, stop=tuple(stop or ()), sampling=sampling,
        )  # fmt: skip
        row = generated(config, target, AccessFiles(ca, token_file, certificate, key), order, show)
    if as_json:
        print(json.dumps(row))
        return
    print("" if is_shown else clean(row["text"]))
    sys.stderr.write(f"{closing_line(row)}\n")


@experts_app.command("list")
def list_experts(line: LineFile, as_json: AsJson = False) -> None:
    """The experts of a line: architecture, labels, packed bytes, usage probability, routes."""
    from agent.commands.experts import expert_rows, print_experts
    from agent.config import read_line

    with explained():
        rows = expert_rows(read_line(line))
    if as_json:
        print(json.dumps({"experts": rows}))
    else:
        print_experts(rows)


ExpertName = Annotated[str, typer.Argument(metavar="ID", help="the expert that serves, kind/name", show_default=False)]


@experts_app.command("compare")
def compare_expert(line: LineFile, expert: ExpertName, as_json: AsJson = False) -> None:
    """An expert and the version in its shadow: agreement, flips each way, scores, times, images that differ."""
    from agent.commands.comparing import comparison_of, comparison_row, print_comparison
    from agent.config import read_line

    with explained():
        config = read_line(line)
        comparison = comparison_of(config, expert)
    if as_json:
        print(json.dumps(comparison_row(comparison)))
    else:
        print_comparison(comparison, config.state / "images")


@experts_app.command("promote")
def promote_expert(line: LineFile, expert: ExpertName, as_json: AsJson = False) -> None:
    """Swap an expert with the version in its shadow, in the line file; the next reload serves it."""
    from agent.commands.comparing import promote

    with explained():
        done = promote(line, expert)
    if as_json:
        print(json.dumps({"expert": done.expert, "shadow": done.shadow, "swapped": list(done.keys)}))
        return
    swapped = ", ".join(done.keys) or "nothing: both entries say the same"
    print(f"{line}: {done.expert} and {done.shadow} have changed places ({swapped}).")
    print("A reload serves it; the earlier version goes on in its shadow, and `promote` again takes it back.")


@experts_app.command("import")
def import_expert(
    source: Annotated[
        Path,
        typer.Argument(
            help=".safetensors, .onnx, a checkpoint .pt/.pth/.ckpt, or a DeepSpeed folder", show_default=False
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(help="the .safetensors or .onnx to write; of a folder, a new folder", show_default=False)
    ],
    argument: Annotated[
        list[str] | None,
        typer.Option(
            "--arg", metavar="NAME=VALUE", help="of a DeepSpeed folder: a trainer's argument it does not tell"
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="of a DeepSpeed folder: where its tokenizer.json is, to be copied")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Bring weights into a format that is safe to serve; a checkpoint is read as data, in a process of its own."""
    if source.is_dir():
        _import_folder(source, destination, argument or [], tokenizer, as_json=as_json)
        return
    if argument or tokenizer is not None:
        raise typer.BadParameter(f"{source} is no folder of DeepSpeed's - leave --arg and --tokenizer")
    from experts.importing import bring

    with explained():
        imported = bring(source, destination)
    size_bytes, said = destination.stat().st_size, imported.told.said if imported.told else ()
    if as_json:
        row = {"weights": str(destination), "sha256": imported.sha256, "size_bytes": size_bytes, "said": said}
        print(json.dumps(row))
        return
    print(f"{destination}  sha256 {imported.sha256}")
    for sentence in said:
        print(f"{sentence[:1].upper()}{sentence[1:]}.")
    print("Name it as `weights:` of an expert in the line file.")


def _import_folder(
    source: Path, destination: Path, arguments: list[str], tokenizer: Path | None, *, as_json: bool
) -> None:
    given = dict(_argument(text) for text in arguments)
    from experts.llm.importing.deepspeed import import_deepspeed  # loads torch

    with explained():
        imported = import_deepspeed(source, destination, given, tokenizer)
    if as_json:
        row = {"weights": str(imported.directory), "moe_experts": imported.moe_experts}
        print(json.dumps({**row, "size_bytes": imported.size_bytes, "has_tokenizer": imported.has_tokenizer}))
        return
    print(
        f"{imported.directory}  {imported.size_bytes / 1e6:.1f} MB, experts of its layers {list(imported.moe_experts)}"
    )
    if not imported.has_tokenizer:
        print("It has no tokenizer.json yet, without which it reads no text: copy it there.")
    print("Name it as `weights:` of an expert in the line file.")


def _argument(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON where it is some."""
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise typer.BadParameter(f"{text!r} is no NAME=VALUE", param_hint="--arg")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@experts_app.command("add")
def add_expert(
    line: LineFile,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="a model: .pt, .ckpt, .safetensors or .onnx", show_default=False)
    ],
    expert: Annotated[str | None, typer.Option("--id", help="its id, kind/name; default by its kind and file")] = None,
    component: Annotated[
        list[str] | None, typer.Option(help="component type whose route asks it last; may be given several times")
    ] = None,
    labels: Annotated[str | None, typer.Option(help="what its outputs mean, in their order: ok,missing")] = None,
    size: Annotated[str | None, typer.Option(metavar="HEIGHTxWIDTH", help="pixels of its images")] = None,
    normalize: Annotated[str | None, typer.Option(help="how its pixels were scaled: imagenet or unit")] = None,
    kind: Annotated[str | None, typer.Option(help="classifier, detector or anomaly; default as the file shows")] = None,
    architecture: Annotated[str | None, typer.Option(help="what it has to be, such as resnet18")] = None,
    passing: Annotated[
        str | None, typer.Option("--pass", help="labels that let a route go on; default the one that is ok")
    ] = None,
    min_score: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="a lower score is NG")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="of an anomaly model: from which score on a part is NG")
    ] = None,
    image: Annotated[Path | None, typer.Option(help="file to try it on; default a made-up image")] = None,
    prints: Annotated[bool, typer.Option("--print", help="the lines that would be added, and write nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Add a model to a line: told what it is, tried on an image, its weights and its entry written.

    What the file does not tell is asked for by option.
    """
    given: dict[str, Any] = {
        "id": expert,
        "components": tuple(component or ()),
        "kind": _one_of(kind, ("classifier", "detector", "anomaly"), "--kind"),
        "architecture": architecture,
        "labels": _words(labels),
        "size": _size(size),
        "normalize": _one_of(normalize, ("imagenet", "unit"), "--normalize"),
        "passing": _words(passing),
        "min_score": min_score,
        "threshold": threshold,
        "image": image,
        "prints": prints,
    }
    log_to_stderr(logging.WARNING)
    with explained():
        from agent.commands.adding import Wishes, add_model, told_lines  # loads torch

        added = add_model(line, file, Wishes(**given))
    if as_json:
        print(json.dumps(added.as_json()))
        return
    told = "\n".join(told_lines(line, file, added))
    if prints:
        sys.stderr.write(f"{told}\n")
        print(added.lines, end="")
    else:
        print(told)


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(","))


def _one_of(text: str | None, known: tuple[str, ...], option: str) -> str | None:
    if text is not None and text not in known:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(known)}", param_hint=option)
    return text


def _size(text: str | None) -> tuple[int, int] | None:
    """HEIGHTxWIDTH, or one number for both."""
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdigit() for side in sides):
        raise typer.BadParameter(f"{text!r} is no size - write 224x224, height first", param_hint="--size")
    return int(sides[0]), int(sides[-1])


@experts_app.command("verify")
def verify_experts(line: LineFile, as_json: AsJson = False) -> None:
    """Hash every packed byte of a line against what was recorded; exit code 1 if anything is not as it was packed.

    Changes nothing, also beside a running agent; what is not packed yet is told, and is no failure.
    """
    from agent.commands.inspection import verify_line
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line

    with explained():
        config = read_line(line)
        with progress_on_stderr() as progress:
            rows = verify_line(config, progress)
    if as_json:
        print(json.dumps({"experts": rows}))
    else:
        for row in rows:
            print(f"{VERIFIED[row['ok']]} {row['expert']}{'' if row['ok'] else ': ' + str(row['reason'])}")
    if any(row["ok"] is False for row in rows):
        raise typer.Exit(FAILED)


@app.command()
def doctor(
    line: LineFile,
    cameras: Annotated[bool, typer.Option(help="ask each camera for a frame")] = True,
    as_json: AsJson = False,
) -> None:
    """Look at all that this line needs of this box; exit code 1 if anything is not well, with what to do."""
    from agent.config import read_line

    log_to_stderr(logging.ERROR)
    with explained():
        config = read_line(line)
        from agent.commands.doctor import examine  # loads torch

        diagnosis = examine(config, cameras=cameras)
    if as_json:
        print(json.dumps(diagnosis.as_json()))
    else:
        for check in diagnosis.checks:
            print(f"{'ok ' if check.is_well else 'BAD'} {check.name}: {check.found}")
            if check.fix is not None:
                print(f"    -> {check.fix}")
        print(f"{diagnosis.problems} problems")
    if diagnosis.problems:
        raise typer.Exit(FAILED)


@config_app.command("show")
def show_config(
    line: LineFile,
    resolved: Annotated[bool, typer.Option("--resolved", help="every key, defaults included")] = False,
    as_json: AsJson = False,
) -> None:
    """What takes effect, key by key, and where it comes from: the file's line, a variable, or the default."""
    from agent.commands.configuration import shown_lines, shown_rows
    from agent.config import resolved_keys

    with explained():
        keys = [key for key in resolved_keys(line) if resolved or key.origin != "default"]
    if as_json:
        print(json.dumps({"keys": shown_rows(keys)}))
    else:
        for text in shown_lines(keys):
            print(text)


@config_app.command("check")
def check_config(
    line: LineFile,
    probe: Annotated[bool, typer.Option("--probe", help="also ask each camera for a frame")] = False,
    as_json: AsJson = False,
) -> None:
    """Read a line file as ``serve`` would; every mistake with file, line and key."""
    from agent.commands.configuration import weights_problems
    from agent.config import read_line

    try:
        config = read_line(line)
        if problems := list(weights_problems(config)):
            raise ConfigError.of(problems)
    except ConfigError as error:
        if not as_json:
            sys.stderr.write(f"{error}\n")
        else:
            print(json.dumps({"ok": False, "problems": [_problem(each) for each in error.problems]}))
        raise typer.Exit(CONFIGURATION) from error
    silent = _silent_cameras(config) if probe else []
    if silent:
        if as_json:
            print(json.dumps({"ok": False, "problems": [{"message": text} for text in silent]}))
        else:
            sys.stderr.write("".join(f"{text}\n" for text in silent))
        raise typer.Exit(FAILED)
    experts, routes = len(config.catalog.experts), len(config.catalog.components) + len(config.catalog.texts)
    if as_json:
        print(json.dumps({"ok": True, "line": config.line, "experts": experts, "routes": routes, "problems": []}))
    else:
        print(f"{line}: line {config.line!r}, {experts} experts, {routes} routes: no mistake found")


@config_app.command("schema")
def config_schema(as_json: AsJson = False) -> None:
    """The JSON Schema of a line file, for editors; usable offline. (``--json`` changes nothing: it is JSON anyway.)"""
    from agent.config import json_schema

    print(json.dumps(json_schema(), indent=None if as_json else 2))


@service_app.callback()
def service() -> None:
    """The agent as a systemd service."""


@service_app.command("install")
def service_install(
    prints: Annotated[
        bool, typer.Option("--print", help="the shell script that would be run, and run nothing")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the units of this very agent, with their user and folders, and tell systemd. Needs root."""
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


@app.command()
def demo(
    directory: Annotated[Path, typer.Option("--dir", help="where the demo line is made")] = Path("demo"),
    data: Annotated[Path | None, typer.Option(help="real crops instead: DATA/<component>/<label>/*.png")] = None,
    llm: Annotated[bool, typer.Option("--llm", help="language models instead: two experts on one backbone")] = False,
    seed: Annotated[int, typer.Option(help="of everything random")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make a board line, train its small experts, and inspect it under a third of the memory they need."""
    if llm and data is not None:
        raise typer.BadParameter("crops are for image experts - leave --data, or --llm")
    from agent.deployment.profile_in_use import set_default_spinning

    log_to_stderr(logging.WARNING)
    set_default_spinning()
    if llm:
        _demo_texts(directory, seed, as_json=as_json)
        return
    from agent.commands.progress import progress_on_stderr
    from agent.demo.demo import run_demo, show_report

    with explained():
        with progress_on_stderr() as progress:
            report = run_demo(directory, data, seed, progress)
        if as_json:
            print(json.dumps(report.as_json()))
        else:
            show_report(report)


def _demo_texts(directory: Path, seed: int, *, as_json: bool) -> None:
    from agent.commands.progress import progress_on_stderr
    from agent.demo.text_demo import run_text_demo, show_text_report

    def show(text: str) -> None:
        if not as_json:
            print(text, end="", flush=True)

    with explained():
        with progress_on_stderr() as progress:
            report = run_text_demo(directory, seed, progress, show)
        if as_json:
            print(json.dumps(report.as_json()))
        else:
            show_text_report(report)


def _silent_cameras(config: LineConfig) -> list[str]:
    """The cameras of which no frame is to be had, and why."""
    from agent.commands.configuration import probed_cameras

    with explained():
        return [f"camera {each.name}: {each.fault}" for each in probed_cameras(config) if each.fault is not None]


def _leave_at_once(code: int) -> None:
    """End the process as it is: its runtimes, while they take themselves down, would wait for a driver that hangs, or
    abort under a thread that is still at work."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _problem(error: ConfigError) -> dict[str, Any]:
    place = error.place
    return {
        "file": str(place.file) if place else None,
        "line": place.line if place else None,
        "column": place.column if place else None,
        "key": place.key if place else None,
        "message": error.message,
    }


def _format(text: str) -> Format:
    if text == "csv":
        return "csv"
    if text == "jsonl":
        return "jsonl"
    raise typer.BadParameter(f"{text!r} is neither jsonl nor csv", param_hint="--format")


def _time(text: str | None) -> datetime | None:
    """An aware time, or None. Raises typer.BadParameter for what is not ISO 8601."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a time - write 2026-01-31T06:00", param_hint="--since") from error


def log_to_stderr(level: int) -> None:
    """Logging as every command has it, with levels where the journal reads; libraries that are loud are not heard."""
    from agent.config import service_manager
    from agent.service.service_manager import JournalFormatter

    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if service_manager().takes_levels:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JournalFormatter())
    for name in ("PIL", "watchdog", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
