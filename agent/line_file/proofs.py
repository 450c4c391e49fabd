"""Proofs of a line's experts: comparisons with their trainers' own answers, in the line's state.

Guarantees: a proof counts for one entry, these weights, this form and these versions of libraries; with others the
expert is unproven. It does not count for a name: promoted versions keep theirs. A damaged file proves nothing, and
keeps no agent from serving.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple

from pydantic import AwareDatetime, BaseModel, ConfigDict, TypeAdapter, ValidationError

from experts.backends.forms import form_of
from experts.calibrations import CalibrationFolder, digest_of
from experts.filesystem import make_folder, open_folder, whole_file
from experts.thresholds.binding import entry_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from experts.expert import Expert, Precision

log = logging.getLogger(__name__)

FILE_NAME = "proofs.json"  # in the state folder
LIBRARIES = (  # of networks, and of the pixels that they get; OpenCV comes under either of its names
    "coserve", "torch", "torchvision", "ultralytics", "onnxruntime", "Pillow", "numpy", "simplejpeg", "opencv-python",
    "opencv-python-headless",
)  # fmt: skip
UNKNOWN_ANSWERS = "its trainer's answers are not known"
NAMED = 3  # experts of one reason
KEPT = 16  # of each expert: forms, and versions that may serve again


class Proof(BaseModel):
    """One comparison of an expert with known answers. ``identity``: ``proof_identity`` then; ``images``: compared,
    of which ``passing`` have a label of a good part and ``others`` another one. ``difference``: largest one of a score.
    ``why``: reason of a person to trust the expert all the same; ``blind``: why it seems not to see its images."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    expert: str
    form: str
    identity: str
    images: int
    passing: int
    others: int
    agreed: int
    difference: float | None
    at: AwareDatetime
    by: str
    why: str = ""
    blind: str = ""

    @property
    def holds(self) -> bool:
        return (0 < self.images == self.agreed and not self.blind) or bool(self.why)

    @property
    def text(self) -> str:
        found = f"{self.agreed} of {self.images} known answers are the same in {self.form}"
        found += f", but {self.blind}" if self.blind else ""
        return f"{found}, trusted by {self.by}: {self.why}" if self.why else found


class Lack(NamedTuple):
    """Why an expert is unproven. ``differs``: it was compared as it is now, and answered otherwise."""

    why: str
    differs: bool = False


_PROOFS = TypeAdapter(tuple[Proof, ...])


def proof_identity(expert: Expert, weights_sha256: str, form: str, packed: Path) -> str:
    """Digest of all that an expert's answers come from. ``packed``: folder of packed weights, with calibrations."""
    entry = entry_text(replace(expert, id="", threshold_of=None))
    calibrated = form_of(form).needs_calibration
    calibration = digest_of(CalibrationFolder.beside(packed).path(expert.id)) if calibrated else ""
    parts = [entry, weights_sha256, str(form), _recipe(form), calibration, _versions()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


_recipe = cache(lambda form: form_of(form).recipe())


@cache
def _versions() -> tuple[str, ...]:
    """A library that is not installed computes nothing."""

    def found(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return ""

    return tuple(map(found, LIBRARIES))


def kept_proofs(state: Path) -> tuple[Proof, ...]:
    """Proofs of a line, by the folder of its state; none where the file cannot be read, which is logged."""
    try:
        return _PROOFS.validate_json((state / FILE_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValidationError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged: remove it"
        log.warning("proofs_not_read file=%s reason=%s, then run `coserve experts verify`", state / FILE_NAME, reason)
        return ()


def save_proof(state: Path, new: Proof) -> None:
    """Keep a proof in the place of an earlier one of its identity, and of the oldest of KEPT. Raises OSError."""
    if not state.is_dir():
        make_folder(state)
        if os.geteuid() == 0:
            shutil.chown(state, *_owner(state.parent))
    with _locked(state):
        proofs = [each for each in kept_proofs(state) if each.identity != new.identity]
        own = [each for each in proofs if each.expert == new.expert]
        if len(own) == KEPT:
            proofs.remove(own[0])
        proofs.append(new)  # the latest stand last
        with whole_file(state / FILE_NAME, has_rivals=True) as file:
            file.write(_PROOFS.dump_json(tuple(proofs), indent=1))
            if os.geteuid() == 0:  # else the agent, another user, could not write it
                os.fchown(file.fileno(), *_owner(state))


def _owner(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_uid, found.st_gid


@contextmanager
def _locked(state: Path) -> Iterator[None]:
    """Context for a change: the agent and a command may write at once."""
    with open_folder(state) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield


class Proven(NamedTuple):
    """Experts of images: why some are unproven, and when the others were last compared, by name."""

    lacks: dict[str, Lack]
    compared_at: dict[str, datetime]


def proven(
    experts: Iterable[Expert],
    forms: Mapping[str, Iterable[tuple[Precision | str, str]]],
    proofs: Iterable[Proof],
    packed: Path,
) -> Proven:
    """``forms``: by expert, each with its weights' sha256."""
    known = {each.identity: each for each in proofs}
    proven_once = {each.expert for each in known.values()}
    found = Proven({}, {})
    for expert in experts:
        if expert.takes_texts:
            continue
        own = [known.get(proof_identity(expert, sha256, form, packed)) for form, sha256 in forms.get(expert.id, ())]
        there = [each for each in own if each is not None]
        if failed := [each for each in there if not each.holds]:
            found.lacks[expert.id] = Lack(failed[0].text, differs=True)
        elif expert.nothing_found and not all(each.passing and each.others for each in there):
            found.lacks[expert.id] = Lack("it passes what has no box, and was not compared on images with and without")
        elif not own or len(there) < len(own):
            found.lacks[expert.id] = Lack(_lack(expert, expert.id in proven_once))
        else:
            found.compared_at[expert.id] = min(each.at for each in there)
    return found


def text_of_lacks(lacks: Mapping[str, Lack]) -> str:
    """Each reason with the experts that it is of, some of them by name."""
    named: defaultdict[str, list[str]] = defaultdict(list)
    for expert, lack in lacks.items():
        named[lack.why].append(expert)
    more = {why: f" and {len(names) - NAMED} more" if len(names) > NAMED else "" for why, names in named.items()}
    return "; ".join(f"{', '.join(names[:NAMED])}{more[why]}: {why}" for why, names in named.items())


def _lack(expert: Expert, was_proven: bool) -> str:
    if was_proven:
        return "proven with another entry, other weights, another form or other libraries than it has now"
    return "not compared with its known answers yet" if expert.check else UNKNOWN_ANSWERS
