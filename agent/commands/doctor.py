"""`coserve doctor`: checks that this box can serve this line.

Guarantees: each check reports a finding, and what to do if it is bad; no check stops another; a running agent is not
disturbed.
"""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agent.commands.proving import text_of_unproven, unproven_line
from agent.core.performance import HOST
from agent.deployment.build import detect_box, doubts
from agent.deployment.memory_split import pool_budgets, prepared_bytes
from agent.deployment.packed_copies import packed_manifests
from agent.deployment.profile_in_use import advice_without_profile, find_profile
from agent.environment import read_secret
from agent.line_file.api import UNIX
from agent.line_file.values import shown_url
from agent.lines.line_check import weights_problems
from agent.places.mounts import filesystem_type, is_shared, tells_changes
from agent.records.database import damage_of, is_state_held
from agent.runtime.machine.detection import check_runtimes
from agent.sources.cameras.process import probe
from experts.backends.capabilities import capabilities_of
from experts.backends.forms import FORMS, forms_here
from experts.errors import ConfigError, CoServeError
from experts.expert import OTHER_THRESHOLD
from experts.llm.files.checkpoint import unused_adapter
from experts.packed.direct_reads import DirectReader
from experts.packed.sources import is_there, sha256_of
from experts.sizes import MEBIBYTE, size_text
from experts.thresholds.binding import is_bound_elsewhere

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from agent.config import LineConfig
    from agent.runtime.machine.box import Box

READ_BYTES = 256 * MEBIBYTE
SLOW_DISK_BYTES_PER_S = 200_000_000  # a ResNet101 then loads in about a second
LEAST_FREE_BYTES = 2**30
WATCHES_FILE = Path("/proc/sys/fs/inotify/max_user_watches")
LEAST_WATCHES = 8192  # of inotify, one per folder and subfolder
CAMERA_S = 10.0
CONNECT_S = 3.0
RESULTS_S = 60.0  # longest check of the results; the agent finds damage in the rest
BUILT = time.struct_time((2026, 1, 1, 0, 0, 0, 0, 0, 0))  # a correct clock shows a later time


@dataclass(frozen=True, slots=True)
class Check:
    """Finding. ``fix``: what to do; None if all is well."""

    name: str
    found: str
    fix: str | None = None

    @property
    def is_well(self) -> bool:
        return self.fix is None


def examine(config: LineConfig, *, cameras: bool = True) -> list[Check]:
    """Make every check. ``cameras``: also probe cameras, some seconds each."""
    is_running = is_state_held(config.state)
    parts: list[Iterable[Check]] = [
        [Check("agent", "running on this line" if is_running else "not running on this line")],
        *(part(config) for part in (_device, _forms, _memory, _profile, _weights, _state, _results, _folders)),
        _clock(),
        _secrets(config),
        _addresses(config, is_running),
        _receivers(config),
        *([_cameras(config, is_running)] if cameras else []),
    ]
    return [check for part in parts for check in _safely(part)]


def _safely(part: Iterable[Check]) -> list[Check]:
    try:
        return list(part)
    except CoServeError as error:
        return [Check("check", str(error).splitlines()[0], "do as the message says")]
    except OSError as error:
        return [Check("check", f"{error.filename or ''} {error.strerror}".strip(), "check the file and the disk")]


def _device(config: LineConfig) -> Iterator[Check]:
    try:
        box = detect_box(config)
    except ConfigError as error:
        yield Check("device", error.message, "install the driver, or set device: auto")
        return
    yield Check("device", f"{box.name} ({box.model}), processors {', '.join(box.processors)}, {box.cores} cores")
    yield from capability_checks(box)
    yield Check("libraries", ", ".join(f"{name} {version}" for name, version in box.versions))
    for name, fault in check_runtimes(box).items():
        fix = "install matching versions of torch and torchvision, and the driver"
        yield Check(name, "works") if fault is None else Check(name, fault, fix)


def capability_checks(box: Box) -> Iterator[Check]:
    for processor in box.processors:
        yield Check(f"capabilities {processor}", capabilities_of(processor).text)


def _forms(config: LineConfig) -> Iterator[Check]:
    here = forms_here()
    yield Check("forms", f"{', '.join(FORMS[name].name_here for name in here)} run on this CPU")
    for name, form in FORMS.items():
        if name in here:
            continue
        is_given = config.precision is name
        fix = f"write `precision: auto`, or fp32: until then the agent runs {form.plain}" if is_given else None
        yield Check(f"form {name}", f"does not run on this CPU: {form.why_absent()}", fix)


def _memory(config: LineConfig) -> Iterator[Check]:
    box = detect_box(config)
    for pool in box.pools:
        size, wanted, fix = box.size_of(pool), getattr(config.memory, pool) or 0, None
        found = f"{size_text(size.available_bytes)} of {size_text(size.total_bytes)} available"
        if wanted > size.available_bytes:
            found += f", the line file asks for {size_text(wanted)}"
            fix = f"lower memory.{pool}, or write auto"
        yield Check(f"memory {pool}", found, fix)
    images_bytes = prepared_bytes(config, pool_budgets(config, box)[HOST])
    yield Check("memory images", f"{size_text(images_bytes)} of host memory for images ahead of their batches")


def _profile(config: LineConfig) -> Iterator[Check]:
    advice = f"coserve profile {config.document.file}"
    try:
        profile = find_profile(config)
    except ConfigError as error:
        yield Check("device profile", error.message, advice)
        return
    if profile is None:
        lines = "none: the agent probes at each start", *advice_without_profile(config, detect_box(config))
        yield Check("device profile", "; ".join(lines))
        return
    wrong = doubts(config, profile)
    yield Check("device profile", "; ".join(wrong) or f"of {profile.written_at}, holds", advice if wrong else None)


def _weights(config: LineConfig) -> Iterator[Check]:
    experts = config.catalog.experts
    missing = [name for name, expert in experts.items() if not is_there(expert)]
    packed = sum(bool(manifests) for manifests in packed_manifests(config).values())
    if missing:
        yield Check("weights", f"missing of {', '.join(missing[:5])} ({len(missing)} in all)", "copy the files there")
    for name, expert in experts.items():
        if expert.threshold_of is not None and is_there(expert) and is_bound_elsewhere(expert, sha256_of(expert)):
            learn = f"coserve experts threshold {config.document.file} {name} --samples DATA"
            yield Check(f"threshold {name}", f"{OTHER_THRESHOLD}: every image is UNKNOWN", learn)
    for name, expert in experts.items():
        if expert.takes_texts and (unused := unused_adapter(expert.weights, expert.adapter)) is not None:
            yield Check(f"adapter {name}", unused, "coserve serves the model without it")
    for problem in weights_problems(config):
        yield Check("weights", str(problem), "correct the file, or its entry in the line file")
    if lacks := unproven_line(config):
        verify = f"coserve experts verify {config.document.file}"
        verify += "" if any(experts[name].check for name in lacks) else " EXPERT --check DATA"
        is_needed = config.require_proof or any(lack.differs or experts[name].check for name, lack in lacks.items())
        yield Check("proof", str(text_of_unproven(config, lacks)), verify if is_needed else None)
    else:
        yield Check("proof", "every expert of images is proven by known answers")
    yield Check("experts", f"{len(experts)} on the line, {packed} packed; `coserve experts verify` hashes them all")


def _state(config: LineConfig) -> Iterator[Check]:
    above = _existing(config.state)
    kind = filesystem_type(config.state)
    yield Check("state", f"{config.state} on {kind}", "set state: to a local disk" if is_shared(kind) else None)
    if not os.access(above, os.W_OK):
        yield Check("state", f"{above} may not be written", f"give it to the agent's user: chown -R coserve {above}")
        return
    free_bytes = shutil.disk_usage(above).free
    wanted = max(LEAST_FREE_BYTES, config.records.keep.free or 0)
    fix = None if free_bytes >= wanted else "free some space, or set records.keep so that old images are deleted"
    yield Check("free space", f"{size_text(free_bytes)} in {above}", fix)
    per_s = _read_bytes_per_s(above)
    slow = "experts load slowly: put the state on an SSD" if per_s < SLOW_DISK_BYTES_PER_S else None
    yield Check("disk", f"{per_s / 1e6:.0f} MB/s read past the cache", slow)


def _results(config: LineConfig) -> Iterator[Check]:
    if not config.results_file.exists():
        return
    since_s = time.monotonic()
    try:
        damage = damage_of(config.results_file, RESULTS_S)
    except sqlite3.Error as error:
        yield Check("results", f"{config.results_file}: {error}", "run this as the agent's user")
        return
    is_whole = time.monotonic() - since_s < RESULTS_S
    found = damage or ("sound" if is_whole else f"sound as far as {RESULTS_S:.0f} s of reading go")
    fix = f"the agent renames it at its start: then coserve restore {config.document.file} BACKUP, and check the disk"
    size = size_text(config.results_file.stat().st_size)
    yield Check("results", f"{config.results_file}, {size}: {found}", damage and fix)


def _read_bytes_per_s(folder: Path) -> float:
    with TemporaryDirectory(prefix=".coserve-doctor-", dir=folder) as made, closing(DirectReader()) as reader:
        file = Path(made) / "read"
        size_bytes = min(READ_BYTES, shutil.disk_usage(folder).free // 4)
        with file.open("wb") as out:
            chunk = os.urandom(MEBIBYTE)
            for _ in range(size_bytes // MEBIBYTE):
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        started = time.monotonic()
        reader.digest(file, file.stat().st_size, "doctor")
        return file.stat().st_size / (time.monotonic() - started)


def _folders(config: LineConfig) -> Iterator[Check]:
    for folder in config.intake.folders:
        name, there = f"folder {folder.path}", _existing(folder.path)
        kind = filesystem_type(there)
        seen = "changes are reported at once" if tells_changes(kind) else f"scanned every {folder.poll_s:g} s"
        if not os.access(there, os.R_OK | os.W_OK | os.X_OK) and folder.after != "keep":
            fix = f"let the agent's user write there, in a unit also ReadWritePaths={folder.path}"
            yield Check(name, f"{there} may not be written", fix)
        else:
            yield Check(name, f"on {kind or 'an unknown filesystem'}: {seen}")
    if config.intake.folders and WATCHES_FILE.exists():
        watches = int(WATCHES_FILE.read_text())
        few = f"sysctl fs.inotify.max_user_watches={LEAST_WATCHES}" if watches < LEAST_WATCHES else None
        yield Check("inotify", f"{watches} folders may be watched", few)


def _clock() -> Iterator[Check]:
    now = time.gmtime()
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", now)
    is_known = Path("/run/systemd/timesync/synchronized").exists()
    word = "synchronized" if is_known else "synchronization unknown"
    yield Check("clock", f"{text}, {word}", "set the clock: results are dated by it" if now < BUILT else None)


def _secrets(config: LineConfig) -> Iterator[Check]:
    mqtt, webhook = config.outbox.mqtt, config.outbox.webhook
    secrets = {
        **{f"of camera {camera.name}": camera.password for camera in config.intake.cameras},
        "api.token": config.api.token,
        **{f"api.tokens.{name}": token for name, token in config.api.tokens.items()},
        "outbox.mqtt.password": None if mqtt is None else mqtt.password,
        "outbox.webhook.token": None if webhook is None else webhook.token,
    }
    for name, secret in secrets.items():
        if secret is not None:
            try:
                read_secret(secret)
                yield Check(f"secret {name}", "can be read")
            except ConfigError as error:
                yield Check(f"secret {name}", error.message, "write the secret there; in a unit use LoadCredential=")


def _addresses(config: LineConfig, is_running: bool) -> Iterator[Check]:
    for address in (*config.api.grpc, *config.api.http):
        if is_running:
            yield Check(f"address {address}", "in use by the running agent: not tried")
        elif address.startswith(UNIX):
            folder = _existing(Path(address.removeprefix(UNIX)).parent)
            fix = None if os.access(folder, os.W_OK) else f"let the agent's user write into {folder}"
            yield Check(f"address {address}", f"in {folder}", fix)
        else:
            fault, fix = _cannot_bind(address), "stop the program that listens there, or use another port"
            yield Check(f"address {address}", fault or "free", fault and fix)


def _cannot_bind(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, int(port)))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _receivers(config: LineConfig) -> Iterator[Check]:
    ports = {"mqtt": 1883, "mqtts": 8883, "http": 80, "https": 443}
    for name, section in (("outbox.mqtt", config.outbox.mqtt), ("outbox.webhook", config.outbox.webhook)):
        if section is None:
            continue
        parts = urlsplit(section.url)
        where = (parts.hostname or "", parts.port or ports[parts.scheme])
        try:
            socket.create_connection(where, CONNECT_S).close()
        except OSError as error:
            fix = "start the receiver, or correct the url: until then messages wait in the outbox"
            yield Check(name, f"{where[0]}:{where[1]}: {error.strerror or error}", fix)
        else:
            yield Check(name, f"{where[0]}:{where[1]} answers")


def _cameras(config: LineConfig, is_running: bool) -> Iterator[Check]:
    for camera in config.intake.cameras:
        name = f"camera {camera.name}"
        if is_running:
            yield Check(name, "in use by the running agent: see coserve status")
            continue
        fault = None
        with suppress(ConfigError):  # reported by _secrets
            password = None if camera.password is None else read_secret(camera.password)
            fault = probe(camera, password, CAMERA_S)
        yield Check(name, fault or "a frame came", fault and f"check {shown_url(camera.url)}")


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())
