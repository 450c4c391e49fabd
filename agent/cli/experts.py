"""`coserve experts`: list, compare, promote, import, distil, add and verify. The profiler adds `threshold`."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agent.cli.arguments import AsJson, LineFile
from agent.cli.distilling import distil
from agent.cli.endings import FAILED, explained, log_to_stderr, say
from agent.cli.reviews import escape_warnings, judging, lines_of, truth_lines

if TYPE_CHECKING:
    from agent.commands.adding.adding import Added
    from agent.commands.adding.language_models import AddedLanguageModel
    from agent.config import LineConfig

NEXT = "Name it as `weights:` of an expert in the line file."
ExpertName = Annotated[str, typer.Argument(metavar="ID", help="the serving expert, kind/name", show_default=False)]
VERIFIED = {True: "ok ", False: "BAD", None: "-- "}

experts_app = typer.Typer(
    help="The experts of a line: list, add, import, distil, verify, compare, promote.", no_args_is_help=True
)


@experts_app.command("list")
def list_experts(line: LineFile, as_json: AsJson = False) -> None:
    """List the experts of a line: architecture, labels, packed bytes, usage probability, routes."""
    from agent.commands.experts import expert_rows, print_experts
    from agent.config import read_line

    with explained():
        config = read_line(line)
        from agent.commands.proving import unproven_line

        lacks = unproven_line(config)
        rows = [
            row | {"unproven": lacks[name].why if (name := row["expert"]) in lacks else None}
            for row in expert_rows(config)
        ]
    if as_json:
        print(json.dumps({"experts": rows}))
    else:
        print_experts(rows)


@experts_app.command("compare")
def compare_expert(
    line: LineFile,
    expert: ExpertName,
    over: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="judge kept, results, reviewed, or a folder")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(exists=True, help="with --over: the candidate's; default: the expert's shadow")
    ] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE.html", help="with --over: flips with thumbnails")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare an expert and the version in its shadow: agreement, flips, people's reviews, times, images that differ.

    With --over, judge an archive with the expert and with its candidate, which the line need not serve.
    """
    if over is None and (weights is not None or page is not None):
        raise typer.BadParameter("--weights and --page need images to judge - add --over")
    if over is not None:
        with judging(line) as (config, progress):
            from agent.commands.rejudging.archive import ArchiveQuery
            from agent.commands.rejudging.rejudge import rejudge_candidate  # loads torch

            row = rejudge_candidate(config, ArchiveQuery(over, expert=expert), weights, page, progress)
        say(as_json, row, lines_of(row))
        return
    from agent.commands.experts import comparison_of, comparison_row, print_comparison, reviewed_figures
    from agent.config import read_line

    with explained():
        config = read_line(line)
        comparison = comparison_of(config, expert)
        reviewed = reviewed_figures(config, comparison.pair)
    if as_json:
        print(json.dumps({**comparison_row(comparison), "reviewed": reviewed}))
    else:
        print_comparison(comparison, config.state / "images", truth_lines(reviewed))


@experts_app.command("promote")
def promote_expert(
    line: LineFile,
    expert: ExpertName,
    forget: Annotated[
        bool, typer.Option("--discard", help="drop a promotion made over /api: the line file's versions serve")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Swap an expert with the version in its shadow, in the line file; the next reload serves it.

    Says how both did on images that people reviewed, and warns of more escapes. What was promoted over /api moves into
    the line file.
    """
    from agent.commands.experts import figures_of_promotion
    from agent.config import read_line
    from agent.lines.promotion import discard, promote

    with explained():
        if forget:
            was = discard(line, expert)
            text = (
                f"{expert}: " + ("discarded; reload to serve" if was else "not promoted over /api:") + " the line file"
            )
            say(as_json, {"expert": expert, "discarded": was}, [text])
            return
        reviewed = figures_of_promotion(read_line(line), expert)
        was_served = any(each.expert == expert for each in read_line(line).promotions)
        shadow, keys = promote(line, expert)
    for warning in escape_warnings(reviewed):
        sys.stderr.write(f"{warning}\n")
    swapped = ", ".join(keys) or "nothing: both entries are equal"
    lines = [
        *truth_lines(reviewed),
        f"{line}: {expert} and {shadow} are swapped ({swapped}).",
        "The line file has what was promoted over /api: the same versions serve."
        if was_served
        else "Reload to serve it. The earlier version becomes the shadow; `promote` again swaps them back.",
    ]
    say(as_json, {"expert": expert, "shadow": shadow, "swapped": keys, "reviewed": reviewed}, lines)


@experts_app.command("import")
def import_expert(
    source: Annotated[
        Path,
        typer.Argument(
            help=".safetensors, .onnx, a checkpoint .pt/.pth/.ckpt, or a DeepSpeed folder", show_default=False
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(help="the .safetensors or .onnx to write; for a folder, a new folder", show_default=False)
    ],
    argument: Annotated[
        list[str] | None,
        typer.Option(
            "--arg", metavar="NAME=VALUE", help="DeepSpeed folder: an argument of its trainer that the folder lacks"
        ),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="DeepSpeed folder: its tokenizer.json, to be copied")] = None,
    as_json: AsJson = False,
) -> None:
    """Convert weights to a format that is safe to serve. A checkpoint is read as data, in a separate process."""
    if source.is_dir():
        _import_folder(source, destination, dict(map(_argument, argument or ())), tokenizer, as_json)
        return
    if argument or tokenizer is not None:
        raise typer.BadParameter(f"{source} is not a DeepSpeed folder - leave out --arg and --tokenizer")
    from experts.checkpoints.importing import bring

    with explained():
        imported = bring(source, destination)
    facts = {"sha256": imported.sha256, "size_bytes": destination.stat().st_size, "said": imported.remarks}
    row = {"weights": str(destination), **facts}
    remarks = [f"{sentence[:1].upper()}{sentence[1:]}." for sentence in imported.remarks]
    say(as_json, row, [f"{destination}  sha256 {imported.sha256}", *remarks, NEXT])


experts_app.command("distil")(distil)


@experts_app.command("add")
def add_expert(
    context: typer.Context,
    line: LineFile,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="a model: .pt, .ckpt, .safetensors, .onnx or .gguf", show_default=False),
    ],
    expert: Annotated[
        str | None, typer.Option("--id", help="the expert's id, kind/name; default: from its kind and file")
    ] = None,
    component: Annotated[
        list[str] | None, typer.Option(help="component type whose route gets the expert as its last step; repeatable")
    ] = None,
    task: Annotated[
        Literal["multiclass", "multilabel"] | None,
        typer.Option(help="multiclass: one label is the answer; multilabel: any of them"),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help="labels of its outputs, in order: ok,missing; or the file's own with the line's: good=ok,bad=ng"
        ),
    ] = None,
    otherwise: Annotated[
        str | None, typer.Option(metavar="LABEL", help="multilabel: the answer if no label holds")
    ] = None,
    size: Annotated[str | None, typer.Option(metavar="HEIGHTxWIDTH", help="image size in pixels")] = None,
    normalize: Annotated[
        str | None,
        typer.Option(help="how pixels are scaled: imagenet, unit or '{mean: [0.5, 0.5, 0.5], std: [...]}'"),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(
            help="how images are resized: stretched, '{resize: 256, crop: 224}' or '{pad: center, color: 114}'"
        ),
    ] = None,
    resample: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="function that scaled images, by library: bilinear, opencv-linear, ..."),
    ] = None,
    orientation: Annotated[
        Literal["stored", "exif"] | None, typer.Option(help="pixels as stored, or turned as their EXIF entry says")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="library whose defaults hold where nothing else is said: torchvision, ..."),
    ] = None,
    bits: Annotated[
        int | None, typer.Option(min=9, max=16, help="bits of the values of images of more than 8 bits")
    ] = None,
    window: Annotated[
        str | None, typer.Option(metavar="LOW,HIGH", help="instead of --bits: the values that become 0 and 255")
    ] = None,
    detector: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="how a graph's boxes are meant, where it shows no exporter: yolov8, ..."),
    ] = None,
    suppression: Annotated[
        Literal["all"] | None, typer.Option(help="detectors: all = overlapping boxes count once, whatever their labels")
    ] = None,
    kind: Annotated[
        Literal["classifier", "detector", "anomaly"] | None, typer.Option(help="default: as the file shows")
    ] = None,
    architecture: Annotated[str | None, typer.Option(help="the required architecture, such as resnet18")] = None,
    variant: Annotated[
        Literal["plain", "no-maxpool", "transform-input"] | None,
        typer.Option(help="layers without weights: plain = as its library builds it by default"),
    ] = None,
    passing: Annotated[
        str | None, typer.Option("--pass", help="labels with which a route goes on; default: the one that means ok")
    ] = None,
    min_score: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="a lower score is NG")] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="anomaly: the score from which a part is NG; multilabel: the threshold of all labels"),
    ] = None,
    image: Annotated[Path | None, typer.Option(help="image file to try it on; default: a synthetic image")] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA",
            help="images with its trainer's own answers: a .csv or .json, folders of labels, or YOLO data; it is added "
            "only if it answers the same",
        ),
    ] = None,
    anyway: Annotated[
        str | None, typer.Option(metavar="REASON", help="with --check: add it even if answers differ, and say why")
    ] = None,
    prints: Annotated[
        bool, typer.Option("--print", help="print the lines that would be added, and write nothing")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add a model to a line: describe it, try it on an image, write its weights and its entry.

    Give by option what the model's file does not contain.
    """
    given: dict[str, Any] = {"id": expert, "components": tuple(component or ()), "image": image, "check": check}
    given |= {"size": _size(size), "window": _window(window), "passing": _words(passing)}
    given |= {"resample": _one_of("resample", resample), "trainer": _one_of("trainer", trainer)}
    given |= _labels(labels)
    given |= {key: _of_input(key, text) for key, text in (("normalize", normalize), ("fit", fit)) if text}
    if anyway is not None and check is None:
        raise typer.BadParameter("--anyway is about known answers that differ - add --check DATA")
    log_to_stderr(logging.WARNING)
    with explained():
        from agent.commands.adding.adding import add_model, page_lines  # loads torch
        from agent.commands.adding.facts import Wishes
        from agent.commands.adding.language_models import add_language_model
        from agent.commands.progress import progress_on_stderr
        from experts.llm.gguf.header import is_gguf

        as_given = {each.name: context.params[each.name] for each in fields(Wishes) if each.name in context.params}
        wishes = Wishes(**as_given | given)
        added: Added | AddedLanguageModel
        if is_gguf(file):
            added = add_language_model(line, file, wishes)
            page = "\n".join(added.page_lines(line, file))
        else:
            with progress_on_stderr() as progress:
                added = add_model(line, file, wishes, progress)
            page = "\n".join(page_lines(line, file, added))
    if as_json:
        print(json.dumps(added.as_json()))
        return
    if prints:
        sys.stderr.write(f"{page}\n")
        print(added.lines, end="")
    else:
        print(page)


@experts_app.command("verify")
def verify(
    line: LineFile,
    names: Annotated[list[str] | None, typer.Argument(metavar="ID", help="default: all", show_default=False)] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA", help="give one expert its trainer's answers: a .csv or .json, or labelled folders"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Hash the packed bytes of experts, and prove the experts that have known answers; exit code 1 if any differs.

    Each expert answers the images of its `check` in each form that the agent would run. Proofs are kept in the state,
    also beside a running agent. An expert that is not packed yet, or has no known answers, is reported and no failure.
    """
    from agent.commands.inspection import verify_line
    from agent.commands.progress import progress_on_stderr
    from agent.config import read_line

    with explained():
        config = read_line(line)
        wanted = _known(config, names)
        with progress_on_stderr() as progress:
            rows = verify_line(config, progress, wanted)
            from agent.commands.proving import give_answers, unproven_line, verify_experts  # loads torch

            if check is not None:
                if len(wanted) != 1:
                    raise typer.BadParameter("--check is for one expert - name its ID")
                give_answers(line, config, wanted[0], check)
                config = read_line(line)
            found = dict(verify_experts(config, wanted, progress))
            lacks = unproven_line(config)
    lines = []
    for row in rows:
        name = row["expert"]
        compared = found.get(name, [])
        trouble, verified = (compared, []) if isinstance(compared, str) else (None, compared)
        row |= {"proofs": [each.as_json() for each in verified], "not_compared": trouble}
        row |= {"unproven": lacks[name].why if name in lacks else None}
        is_bad = row["ok"] is False or trouble is not None or not all(each.proof.holds for each in verified)
        reason = "" if row["ok"] else f": {row['reason']}"
        lines.append(f"{'BAD' if is_bad else VERIFIED[row['ok']]} {name}{reason}")
        lines += [f"    {text}" for each in verified for text in each.lines]
        lines += [f"    not compared with its known answers: {trouble}"] if trouble is not None else []
        lines += [f"    unproven: {row['unproven']}"] if row["unproven"] and not verified else []
    say(as_json, {"experts": rows}, lines)
    if any(each.startswith("BAD") for each in lines):
        raise typer.Exit(FAILED)


def _known(config: LineConfig, names: list[str] | None) -> list[str]:
    """Experts by their ids; all of them without any. Raises ConfigError for an unknown one."""
    from experts.document import suggestion
    from experts.errors import ConfigError

    experts = config.catalog.experts
    for name in names or ():
        if name not in experts:
            raise ConfigError(f"no expert {name!r} - {suggestion(name, experts)}")
    return list(dict.fromkeys(names or experts))


def _import_folder(
    source: Path, destination: Path, given: dict[str, Any], tokenizer: Path | None, as_json: bool
) -> None:
    from experts.llm.importing.deepspeed import import_deepspeed  # loads torch

    with explained():
        imported = import_deepspeed(source, destination, given, tokenizer)
    row: dict[str, Any] = {"weights": str(imported.directory), "moe_experts": imported.moe_experts}
    row |= {"size_bytes": imported.size_bytes, "has_tokenizer": imported.has_tokenizer}
    size = f"{imported.size_bytes / 1e6:.1f} MB"
    lines = [f"{imported.directory}  {size}, experts of its layers {list(imported.moe_experts)}"]
    if not imported.has_tokenizer:
        lines.append("The folder has no tokenizer.json yet, and the model needs one to read text: copy it there.")
    say(as_json, row, [*lines, NEXT])


def _argument(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--arg")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(","))


def _labels(text: str | None) -> dict[str, Any]:
    """Labels of the line, and the file's words for them where any is given as FILE=LINE."""
    pairs = [word.rpartition("=") for word in _words(text) or ()]
    if not any(sign for _, sign, _ in pairs):
        return {"labels": _words(text)}
    words = {(name if sign else word).strip(): word.strip() for name, sign, word in pairs}
    return {"labels": tuple(words.values()), "names": tuple(words)}


def _one_of(option: str, name: str | None) -> str | None:
    from experts.expert import RESAMPLERS
    from experts.model_files.trainers import TRAINERS

    known = {"resample": RESAMPLERS, "trainer": tuple(TRAINERS)}[option]
    if name is not None and name not in known:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=f"--{option}")
    return name


def _of_input(key: str, text: str) -> object:
    from experts.document import parse_document
    from experts.errors import ConfigError
    from experts.sections.inputs import PreparationSection

    try:
        document = parse_document(Path(f"--{key}"), f"{key}: {text}".encode())
        document.validate(PreparationSection)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint=f"--{key}") from error
    return document.values[key]


def _size(text: str | None) -> tuple[int, int] | None:
    sides = [] if text is None else text.lower().split("x")
    return _pair(sides * 2 if len(sides) == 1 else sides, text, "size - write 224x224, height first", "--size")


def _window(text: str | None) -> tuple[int, int] | None:
    ends = [] if text is None else text.split(",")
    return _pair(ends, text, "window - write LOW,HIGH, such as 0,4095", "--window")


def _pair(numbers: list[str], text: str | None, what: str, option: str) -> tuple[int, int] | None:
    if text is None:
        return None
    if len(numbers) != 2 or not all(each.strip().isdigit() for each in numbers):
        raise typer.BadParameter(f"{text!r} is not a {what}", param_hint=option)
    return int(numbers[0]), int(numbers[1])
