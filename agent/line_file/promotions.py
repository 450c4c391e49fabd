"""Promotions of a served line: pairs of an expert and its shadow that have changed places, in the line's state.

Guarantees: the line file stays as it is: the agent need not be able to write it. A promotion takes its file once the
line serves it, whole or not at all. It holds for the two entries that were promoted. Where the line file has other
ones since, the line is refused: either version might be meant.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from experts.errors import ConfigError
from experts.filesystem import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from experts.document import Document

FILE_NAME = "promotions.json"  # in the state folder
ORIGIN = f"promotion in {FILE_NAME}"  # of the entries of promoted experts
STAYING = frozenset({"shadow", "pin"})  # keys of the place on the line, not of the version


class Promotion(BaseModel):
    """An expert that serves the entry of its shadow. ``entries_sha256``: digest of both entries in the line file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    expert: str
    shadow: str
    entries_sha256: str
    who: str
    at: str

    @property
    def text(self) -> str:
        return f"{self.expert} serves the entry of {self.shadow}, promoted by {self.who} at {self.at}"


_PROMOTIONS = TypeAdapter(tuple[Promotion, ...])


def kept_promotions(state: Path) -> tuple[Promotion, ...]:
    """Promotions of a line, by the folder of its state. Raises ConfigError for a file that cannot be read.

    None where this user may not enter the folder: nothing is served from it then.
    """
    try:
        return _PROMOTIONS.validate_json((state / FILE_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):  # a state that is no folder is refused by those that use it
        return ()
    except (OSError, ValidationError) as error:
        if isinstance(error, PermissionError) and not os.access(state, os.X_OK, effective_ids=True):
            return ()
        reason = getattr(error, "strerror", None) or "it is damaged"
        remedy = "remove it to serve the versions of the line file, or promote again after that"
        raise ConfigError(f"{state / FILE_NAME}: cannot be read ({reason}) - {remedy}") from error


@contextmanager
def keeping_promotions(state: Path, promotions: Sequence[Promotion]) -> Iterator[None]:
    """Context: the promotions are on the disk before it, and are kept once it ends; an error in it keeps none."""
    with whole_file(state / FILE_NAME, has_rivals=True) as file:
        file.write(_PROMOTIONS.dump_json(tuple(promotions), indent=1))
        file.flush()
        os.fsync(file.fileno())
        owner = state.stat()
        if os.geteuid() == 0:  # else the agent, another user, could not read it
            os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
        yield


def promotion_of(document: Document, expert: str, shadow: str, who: str, at: str) -> Promotion:
    """``document``: the line file with the promotions before this one."""
    digest = _entries_sha256(document.values["experts"], expert, shadow)
    return Promotion(expert=expert, shadow=shadow, entries_sha256=digest, who=who, at=at)


def promoted(document: Document, promotions: Sequence[Promotion]) -> tuple[Document, tuple[Promotion, ...]]:
    """The line file with the entries of promoted experts in their places, and the promotions that are in force.

    Raises ConfigError where the file has other entries since.
    """
    in_force = list[Promotion]()
    for each in promotions:
        entries, names = document.values.get("experts", {}), (each.expert, each.shadow)
        if not entries.keys() >= {*names}:
            raise document.error(f"{each.text}, and one of them is gone - {_remedy(document, each)}", "experts")
        if _entries_sha256(entries, *reversed(names)) == each.entries_sha256:
            continue  # they have changed places in the file, too
        if _entries_sha256(entries, *names) != each.entries_sha256:
            found = f"{each.text}, and these entries have changed since"
            raise document.error(f"{found} - {_remedy(document, each)}", "experts", each.expert)
        for one, other in (names, names[::-1]):
            document = document.having(("experts", one), in_place(entries[one], entries[other]), ORIGIN)
        in_force.append(each)
    return document, tuple(in_force)


def in_place(entry: Mapping[str, Any], version: Mapping[str, Any]) -> dict[str, Any]:
    """The version, with what belongs to the place of this entry."""
    return _version(version) | {key: value for key, value in entry.items() if key in STAYING}


def _version(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in STAYING}


def _entries_sha256(entries: Mapping[str, Any], *names: str) -> str:
    versions = [_version(entries[name]) for name in names]
    return hashlib.sha256(json.dumps(versions, sort_keys=True).encode()).hexdigest()


def _remedy(document: Document, promotion: Promotion) -> str:
    command = f"coserve experts promote {document.file} {promotion.expert} --discard"
    return f"write into this file which version shall serve, then `{command}`"
