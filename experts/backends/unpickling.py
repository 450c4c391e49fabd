"""Run by file name in a process of its own: SOURCE.pt DESTINATION.safetensors; see experts.importing.

Exit code 0: done; 3: the file holds more than tensors; 4: it cannot be read. The last line of stderr says why.
It imports nothing of this project, so that it runs isolated from the environment.
"""

from __future__ import annotations

import pickle
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

DONE, MORE_THAN_TENSORS, UNREADABLE = 0, 3, 4


def main(source: Path, destination: Path) -> int:
    try:
        document = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        return _answer(MORE_THAN_TENSORS if _is_pickle(source) else UNREADABLE, error)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        return _answer(UNREADABLE, error)
    if isinstance(document, dict) and isinstance(document.get("state_dict"), dict):
        document = document["state_dict"]
    if not isinstance(document, dict) or not document:
        return _answer(MORE_THAN_TENSORS, f"a {type(document).__name__} instead of a state dict")
    for name, value in document.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return _answer(MORE_THAN_TENSORS, f"entry {name!r} is a {type(value).__name__}")
    # a tensor that shares its storage with another is written as one of its own
    save_file({name: value.detach().clone().contiguous() for name, value in document.items()}, destination)
    return DONE


def _is_pickle(source: Path) -> bool:
    with source.open("rb") as file:
        return zipfile.is_zipfile(source) or file.read(1) == pickle.PROTO


def _answer(code: int, reason: object) -> int:
    text = " ".join(str(reason).split())
    sys.stderr.write(f"\n{text[:400]}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
