"""Run by file name in a process of its own: FOLDER FILE.pt...; see experts.llm.importing.deepspeed.

Each file becomes FOLDER/<its name>.safetensors: the tensors below ``module``, or of the file itself, by their keys
joined with dots. What else tells about the model, ``args`` and ``checkpoint_version``, lies as JSON in its metadata.

A pickle of DeepSpeed's also names classes of the trainer that wrote it. Nothing of theirs is imported or run: each is
read as an inert stand-in, and the rest under ``weights_only=True``.
Exit code 0: done; 3: a file holds what cannot be read so; 4: it cannot be read at all. The last line of stderr says
why.
It imports nothing of this project, so that it runs isolated from the environment.
"""

from __future__ import annotations

import json
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DONE, MORE_THAN_TENSORS, UNREADABLE = 0, 3, 4
TOLD = ("checkpoint_version", "num_experts")  # beside args


class Inert:
    """What stands for an object of a foreign class: it takes everything and does nothing."""

    state: object = None

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state


def main(folder: Path, files: list[Path]) -> int:
    for file in files:
        try:
            document = _read(file)
        except pickle.UnpicklingError as error:
            return _answer(MORE_THAN_TENSORS, file, error)
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
            return _answer(UNREADABLE, file, error)
        if not isinstance(document, dict):
            return _answer(MORE_THAN_TENSORS, file, f"it is a {type(document).__name__} instead of a dictionary")
        module = document.get("module", document)
        tensors = dict(_tensors(module, ())) if isinstance(module, dict) else {}
        save_file(tensors, folder / f"{file.name}.safetensors", {"told": json.dumps(_told(document))})
    return DONE


def _read(file: Path) -> object:
    foreign = torch.serialization.get_unsafe_globals_in_checkpoint(file) if zipfile.is_zipfile(file) else []
    stand_ins = [(type("Inert", (Inert,), {}), name) for name in foreign]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(file, map_location="cpu", weights_only=True)


def _tensors(held: dict[Any, Any], above: tuple[str, ...]) -> Any:  # noqa: ANN401  pairs, of an untyped document
    for key, value in held.items():
        path = (*above, str(key))
        if isinstance(value, dict):
            yield from _tensors(value, path)
        elif isinstance(value, torch.Tensor) and value.layout == torch.strided:
            # a tensor that shares its storage with another is written as one of its own
            yield ".".join(path), value.detach().clone().contiguous()


def _told(document: dict[Any, Any]) -> dict[str, Any]:
    args = document.get("args")
    values = args.state if isinstance(args, Inert) else args
    told = {name: document[name] for name in TOLD if _is_plain(document.get(name))}
    if isinstance(values, dict):
        told |= {str(name): value for name, value in values.items() if _is_plain(value)}
    return told


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return isinstance(value, str | int | float | bool)


def _answer(code: int, file: Path, reason: object) -> int:
    text = " ".join(str(reason).split())
    sys.stderr.write(f"\n{file.name}: {text[:400]}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
