"""The environment of the process: secrets, systemd's and torchrun's variables, and keys of a line file.

Guarantees: no other module reads it. Only ``set_unless_given`` changes it, and never what the user has set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from agent.faults.errors import SecretMissing
from experts.errors import ConfigError
from experts.llm.parallel.shape import Meeting

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from agent.line_file.values import SecretSection
    from experts.document import Document

ENVIRONMENT_PREFIX = "COSERVE__"
SPINNING = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}  # of libgomp, of the others in ms: 1 is the least
SPINNING_VARIABLES = frozenset({"OMP_WAIT_POLICY", *SPINNING})  # the first is OpenMP's own: spin, or do not
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
CREDENTIALS = "CREDENTIALS_DIRECTORY"  # systemd's folder of LoadCredential=


def overlay(document: Document, environment: Mapping[str, str] | None = None) -> Document:
    """The document, with each `COSERVE__A__B=value` of the environment replacing its `a: {b: ...}`."""
    given = os.environ if environment is None else environment
    for variable in sorted(given):
        if variable.startswith(ENVIRONMENT_PREFIX):
            keys = tuple(variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            if not all(keys):
                raise ConfigError(f"environment variable {variable}: names no key - write COSERVE__SECTION__KEY")
            document = document.override(keys, given[variable], variable)
    return document


def read_secret(secret: SecretSection, environment: Mapping[str, str] | None = None) -> str:
    """A password or a token, without its line end. Raises SecretMissing with the place that was searched."""
    if secret.file is not None:
        file = secret.file
    else:
        folder = (os.environ if environment is None else environment).get(CREDENTIALS)
        if folder is None:
            raise SecretMissing(f"credential {secret.credential}", "no credentials here: systemd gives them to a unit")
        file = Path(folder) / str(secret.credential)
    try:
        text = file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SecretMissing(str(file), getattr(error, "strerror", None) or "not text in UTF-8") from error
    if not text:
        raise SecretMissing(str(file), "it is empty")
    return text


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """Settings from systemd. ``watchdog_s``: longest silence; ``takes_levels``: stderr lines begin with a level."""

    notify_socket: str | None = None
    watchdog_s: float | None = None
    takes_levels: bool = False


def service_manager(environment: Mapping[str, str] | None = None) -> ServiceManager:
    given = os.environ if environment is None else environment
    watchdog_us, process = given.get("WATCHDOG_USEC", ""), given.get("WATCHDOG_PID", str(os.getpid()))
    watches_us = watchdog_us.isdigit() and int(watchdog_us) > 0 and process == str(os.getpid())
    return ServiceManager(
        given.get("NOTIFY_SOCKET") or None,
        int(watchdog_us) / 1_000_000 if watches_us else None,
        takes_levels=_is_journal(given.get("JOURNAL_STREAM", "")),
    )


def _is_journal(stream: str) -> bool:
    """True if stderr is systemd's stream DEVICE:INODE."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return stream == f"{status.st_dev}:{status.st_ino}"


def torchrun_meeting(environment: Mapping[str, str] | None = None) -> Meeting | None:
    """Meeting point of ranks on several boxes, by torchrun's variables; None: all ranks are on this box."""
    given = os.environ if environment is None else environment
    if not {"MASTER_ADDR", "LOCAL_WORLD_SIZE"} <= given.keys():
        return None
    return Meeting(given["MASTER_ADDR"], int(given.get("MASTER_PORT", "29500")), int(given["LOCAL_WORLD_SIZE"]))


def visible_gpus(environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """GPUs for one process each: those that the operator has chosen, in that order, else all by number."""
    chosen = (os.environ if environment is None else environment).get(VISIBLE_GPUS)
    return map(str, count()) if chosen is None else iter([each for each in chosen.split(",") if each])


def set_unless_given(variables: Mapping[str, str], unless: Collection[str]) -> None:
    """Set variables that libraries read when they load, unless the user has set any of ``unless``."""
    if not any(name in os.environ for name in unless):
        os.environ.update(variables)


def set_spinning() -> None:
    """Let OpenMP's threads spin for 10,000 pauses, 30 us to 250 us, before they sleep, unless the environment says.

    Call before torch is loaded. The libraries' default of milliseconds is up to a tenth faster alone (ResNet18, 2
    cores). Beside other work, every tenth run of 9 ms took 640 ms with the default, and 54 ms with this setting.
    """
    set_unless_given(SPINNING, SPINNING_VARIABLES)
