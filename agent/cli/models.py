"""`coserve experts import` and `coserve experts add`: models from their trainers."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from agent.cli.arguments import AsJson, LineFile
from agent.cli.endings import explained, log_to_stderr, say

NEXT = "Name it as `weights:` of an expert in the line file."


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
        _import_folder(source, destination, dict(map(_argument, argument or ())), tokenizer, as_json)
        return
    if argument or tokenizer is not None:
        raise typer.BadParameter(f"{source} is no folder of DeepSpeed's - leave --arg and --tokenizer")
    from experts.checkpoints.importing import bring

    with explained():
        imported = bring(source, destination)
    size_bytes, said = destination.stat().st_size, imported.said
    row = {"weights": str(destination), "sha256": imported.sha256, "size_bytes": size_bytes, "said": said}
    told = [f"{sentence[:1].upper()}{sentence[1:]}." for sentence in said]
    say(as_json, row, [f"{destination}  sha256 {imported.sha256}", *told, NEXT])


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
        lines.append("It has no tokenizer.json yet, without which it reads no text: copy it there.")
    say(as_json, row, [*lines, NEXT])


def _argument(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise typer.BadParameter(f"{text!r} is no NAME=VALUE", param_hint="--arg")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def add_expert(
    line: LineFile,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="a model: .pt, .ckpt, .safetensors or .onnx", show_default=False)
    ],
    expert: Annotated[str | None, typer.Option("--id", help="its id, kind/name; default by its kind and file")] = None,
    component: Annotated[
        list[str] | None, typer.Option(help="component type whose route asks it last; repeatable")
    ] = None,
    task: Annotated[
        Literal["multiclass", "multilabel"] | None,
        typer.Option(help="multiclass: one label is the answer; multilabel: any of them"),
    ] = None,
    labels: Annotated[str | None, typer.Option(help="what its outputs mean, in their order: ok,missing")] = None,
    otherwise: Annotated[
        str | None, typer.Option(metavar="LABEL", help="multilabel: answer where no label holds")
    ] = None,
    size: Annotated[str | None, typer.Option(metavar="HEIGHTxWIDTH", help="pixels of its images")] = None,
    normalize: Annotated[
        str | None,
        typer.Option(help="how its pixels were scaled: imagenet, unit or '{mean: [0.5, 0.5, 0.5], std: [...]}'"),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(help="how images come to its size: stretched, or '{resize: 256, crop: 224, interpolation: ...}'"),
    ] = None,
    kind: Annotated[
        Literal["classifier", "detector", "anomaly"] | None, typer.Option(help="default as the file shows")
    ] = None,
    architecture: Annotated[str | None, typer.Option(help="what it has to be, such as resnet18")] = None,
    passing: Annotated[
        str | None, typer.Option("--pass", help="labels that let a route go on; default the one that is ok")
    ] = None,
    min_score: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="a lower score is NG")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="anomaly: the score from which a part is NG; multilabel: of all labels")
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
        "kind": kind,
        "architecture": architecture,
        "task": task,
        "labels": _words(labels),
        "otherwise": otherwise,
        "size": _size(size),
        "passing": _words(passing),
        "min_score": min_score,
        "threshold": threshold,
        "image": image,
        "prints": prints,
    }
    given |= {key: _of_input(key, text) for key, text in (("normalize", normalize), ("fit", fit)) if text}
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


def _of_input(key: str, text: str) -> object:
    from experts.catalog import PreparationSection
    from experts.document import parse_document
    from experts.errors import ConfigError

    try:
        document = parse_document(Path(f"--{key}"), f"{key}: {text}".encode())
        document.validate(PreparationSection)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint=f"--{key}") from error
    return document.values[key]


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdigit() for side in sides):
        raise typer.BadParameter(f"{text!r} is no size - write 224x224, height first", param_hint="--size")
    return int(sides[0]), int(sides[-1])
