"""Claims, refuses or postpones each file that waits.

Guarantees: a file is claimed by one rename, with its sidecar, before it is offered, and is the file that was seen
complete. A file that can never be judged is refused with its reason. A claim that the filesystem refuses is retried
with backoff.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.faults.backoff import Backoff
from agent.faults.errors import SidecarUnfinished
from agent.sources.folder.files.identity import printable
from agent.sources.folder.files.readiness import Lease
from agent.sources.folder.files.sidecar import sidecar_of
from agent.subject import Subject
from experts.filesystem import file_sha256

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from datetime import datetime

    from agent.line_file.intake import FolderSection
    from agent.sources.folder.custody import Custody
    from agent.sources.folder.files.identity import Claimed
    from agent.sources.folder.files.inbox import Inbox
    from agent.sources.folder.files.naming import NameFields, Naming
    from agent.sources.folder.files.readiness import Sighting, WaitingFile
    from agent.sources.folder.waiting import WaitingFiles

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5  # between two checks of a settled but incomplete file
EMPTY = "the file is empty"
TRUNCATED = "truncated: the end of the image is missing"
LONGEST_CLAIM_PAUSE_S = 60.0  # between two tries to claim a file


@dataclass(frozen=True, slots=True)
class ClaimedImage:
    """Complete image claimed by this agent, its file, and the reads that failed since a time."""

    subject: Subject
    file: Claimed
    failures: int = 0
    failing_since: float | None = None


@dataclass(frozen=True, slots=True)
class ClaimCallbacks:
    """Called on the folder's thread; none of them blocks or raises. ``has_room`` is read before each claim."""

    claimed: Callable[[ClaimedImage], None]
    refused: Callable[[Subject, str], None]  # with the reason; without board if neither name nor sidecar states one
    has_room: Callable[[], bool]
    wall: Callable[[], datetime]


class Claimer:
    """For the folder's thread. ``naming`` may be replaced at any time. ``received``: files claimed or refused."""

    def __init__(
        self,
        section: FolderSection,
        naming: Naming,
        inbox: Inbox,
        waiting: WaitingFiles,
        custody: Custody,
        callbacks: ClaimCallbacks,
    ) -> None:
        self.naming = naming
        self.claim_alarm: str | None = None
        self.received = 0
        self._section = section
        self._inbox = inbox
        self._waiting = waiting
        self._rule = waiting.rule
        self._custody = custody
        self._callbacks = callbacks
        self._recovered: deque[Claimed] = deque()
        self._refusals: dict[str, tuple[str, int]] = {}  # unclaimable files: the reason, and failures in a row
        # of kept files: the image, its sidecar, and the image's digest
        self._read_with: dict[str, tuple[Sighting, Sighting | None, str]] = {}

    @property
    def unoffered(self) -> int:
        """Files claimed by an earlier run that wait for room."""
        return len(self._recovered)

    def places(self) -> set[str]:
        return {str(file.path) for file in self._recovered}

    def recover(self, found: Iterable[Claimed]) -> None:
        self._recovered.extend(found)

    def forget_all_but(self, here: Collection[str]) -> None:
        self._refusals = {name: refused for name, refused in self._refusals.items() if name in self._waiting}
        self._read_with = {name: seen for name, seen in self._read_with.items() if name in here}

    def claim_due(self, now: float) -> None:
        """Claim due files, while there is room."""
        self._offer_recovered()
        while (candidate := self._waiting.first_due(now)) is not None:
            if not self._callbacks.has_room():
                return
            try:
                self._look_into(candidate.relpath, now)
            except FileNotFoundError:  # its owner, or another agent, was faster
                self._waiting.forget(candidate.relpath)
            except OSError as error:
                self._postpone_claim(candidate, now, error)
            finally:
                self._waiting.end_turn(candidate, now + LOOK_AGAIN_S)

    def _offer_recovered(self) -> None:
        while self._recovered and self._callbacks.has_room():
            claimed = self._recovered.popleft()
            try:
                if self._inbox.has_sidecars:
                    claimed = self._inbox.claim_sidecar(claimed)
                name = self._name_of(claimed)
            except FileNotFoundError:
                self._refuse(claimed, _missing(claimed.relpath))
            except OSError as error:  # the file stays claimed: the next rescan finds it
                reason = error.strerror or str(error)
                log.error("intake_sidecar_not_read file=%s reason=%s: tried again", printable(claimed.relpath), reason)
            except (ValueError, SidecarUnfinished) as error:
                self._refuse(claimed, str(error))
            else:
                self._offer(claimed, name)

    def _look_into(self, relpath: str, now: float) -> None:
        found = self._inbox.look(relpath)
        if found is None:
            self._waiting.forget(relpath)
            return
        self._waiting.see(found, now)
        candidate = self._waiting[relpath]
        if not self._rule.is_due(candidate, now):
            return
        if found.objection is not None:
            self._refuse_unclaimed(candidate, found.objection)
            return
        try:
            probe = self._inbox.probe(relpath)
        except PermissionError:  # a copying program may set permissions last
            if self._rule.is_abandoned(candidate, now):
                self._refuse_unclaimed(candidate, "not permitted to read it")
            else:
                self._waiting.postpone(relpath, now + LOOK_AGAIN_S)
            return
        if self._rule.lacks_sidecar(candidate) and probe.lease is not Lease.HELD:
            self._refuse_unclaimed(candidate, _missing(relpath))
        elif self._rule.is_ready(candidate, now, probe):
            self._claim_complete(candidate, now)
        elif found.sighting.size_bytes == 0 and self._rule.is_abandoned(candidate, now):
            self._refuse_unclaimed(candidate, EMPTY)
        elif self._rule.is_truncated(candidate, now, probe):
            self._refuse_unclaimed(candidate, TRUNCATED if found.sighting.size_bytes else EMPTY)
        else:
            self._waiting.postpone(relpath, now + LOOK_AGAIN_S)

    def _claim_complete(self, candidate: WaitingFile, now: float) -> None:
        """Offer a complete file, if its sidecar is complete too."""
        unclaimed = self._unclaimed(candidate)
        try:
            name = self._name_of(unclaimed)
        except SidecarUnfinished as error:
            self._wait_for_sidecar(candidate, now, str(error))
        except PermissionError as error:
            reason = f"its sidecar {_sidecar_name(candidate.relpath)} cannot be read ({error.strerror})"
            self._wait_for_sidecar(candidate, now, reason)
        except ValueError as error:
            self._refuse_unclaimed(candidate, str(error))
        else:
            self._claim_as(candidate, name, now)

    def _claim_as(self, candidate: WaitingFile, name: NameFields, now: float) -> None:
        if self._section.after != "keep":
            claimed = self._claim(candidate)
        elif self._sidecar_is_stale(candidate):
            reason = f"its sidecar {_sidecar_name(candidate.relpath)} is the earlier image's: write it again"
            self._wait_for_sidecar(candidate, now, reason)
            return
        else:
            claimed = self._unclaimed(candidate)
            self._waiting.pass_over(candidate.relpath, candidate.sighting)
        if claimed is not None:
            self.claim_alarm = None
            self._offer(claimed, name)

    def _claim(self, candidate: WaitingFile) -> Claimed | None:
        """Claim the file and its sidecar. None if either had changed; then both are put back."""
        relpath = candidate.relpath
        claimed = self._inbox.claim(relpath, candidate.sighting)
        is_as_seen = self._inbox.sighting(claimed).is_like(candidate.sighting)  # else its writer was not done
        if is_as_seen and self._inbox.has_sidecars:
            with suppress(FileNotFoundError):
                claimed = self._inbox.claim_sidecar(claimed)
            seen = candidate.sidecar
            is_as_seen = claimed.sidecar is seen or (seen is not None and seen.is_like(claimed.sidecar))
        self._waiting.forget(relpath)
        if not is_as_seen:
            self._inbox.unclaim(claimed)
            return None
        self._inbox.drop_marker(relpath)
        return claimed

    def _sidecar_is_stale(self, candidate: WaitingFile) -> bool:
        """True if a kept image was replaced and its sidecar was not."""
        if not self._inbox.has_sidecars:
            return False
        file, seen = self._inbox.root / candidate.relpath, (candidate.sighting, candidate.sidecar)
        image, sidecar, sha256 = self._read_with.get(candidate.relpath, (*seen, ""))
        is_same = image == candidate.sighting or (image.is_like(candidate.sighting) and file_sha256(file) == sha256)
        if sidecar == candidate.sidecar and not is_same:
            return True
        self._read_with[candidate.relpath] = (*seen, file_sha256(file))
        return False

    def _wait_for_sidecar(self, candidate: WaitingFile, now: float, reason: str) -> None:
        """Postpone the file until its sidecar changes; refuse it after ``stale_after_s``."""
        if now - candidate.sidecar_since >= self._section.stale_after_s:
            self._refuse_unclaimed(candidate, reason)
        else:
            self._waiting.postpone(candidate.relpath, now + LOOK_AGAIN_S)

    def _offer(self, claimed: Claimed, name: NameFields) -> None:
        key = self._inbox.key(claimed)
        self._custody.add(key, claimed)
        self.received += 1
        self._callbacks.claimed(ClaimedImage(self._subject(key, claimed.relpath, name), claimed))

    def _subject(self, key: str, image: str, name: NameFields) -> Subject:
        return Subject(key, str(self._section.path), image, self._callbacks.wall(), **name)

    def _unclaimed(self, candidate: WaitingFile) -> Claimed:
        return self._inbox.unclaimed(candidate.relpath, candidate.sighting, candidate.sidecar)

    def _refuse_unclaimed(self, candidate: WaitingFile, reason: str) -> None:
        """Refuse a file in its place, and ignore it until it has moved; if files are kept, until it changes."""
        self._waiting.pass_over(candidate.relpath, candidate.sighting)
        self._refuse(self._unclaimed(candidate), reason)

    def _refuse(self, file: Claimed, reason: str) -> None:
        key = printable(self._inbox.key(file))
        self._custody.add(key, file)
        self.received += 1
        log.warning("intake_refused file=%s reason=%s", printable(file.relpath), reason)
        self._callbacks.refused(self._subject(key, printable(file.relpath), self._known_name(file)), reason)

    def _name_of(self, file: Claimed) -> NameFields:
        """Fields of the name or the sidecar. Raises ValueError with the reason, and as ``read_sidecar``."""
        if not self.naming.has_sidecars:
            return self.naming.read(file.relpath)
        return self.naming.read_beside(self._inbox.sidecar(file), f"its sidecar {_sidecar_name(file.relpath)}")

    def _known_name(self, file: Claimed) -> NameFields:
        """Fields of a refused file's name or sidecar; none if they are invalid."""
        try:
            file.relpath.encode()
            return self._name_of(file)
        except (ValueError, OSError, SidecarUnfinished):
            return {}

    def _postpone_claim(self, candidate: WaitingFile, now: float, error: OSError) -> None:
        """Retry a claim later: the filesystem refuses it (full, read-only, an I/O error)."""
        if error.errno == errno.ENAMETOOLONG:
            self._refuse_unclaimed(candidate, "the name is too long")
            return
        reason, relpath = error.strerror or str(error), candidate.relpath
        last_reason, failures = self._refusals.get(relpath, ("", 0))
        if last_reason != reason:
            log.error("intake_not_claimed file=%s reason=%s: left and retried", printable(relpath), reason)
        self.claim_alarm = reason
        self._refusals[relpath] = (reason, failures + 1)
        backoff = Backoff(self._section.poll_s, max(LONGEST_CLAIM_PAUSE_S, self._section.poll_s))
        self._waiting.postpone(relpath, now + backoff.pause_s(failures + 1))


def _sidecar_name(relpath: str) -> str:
    return printable(sidecar_of(relpath).rpartition("/")[2])


def _missing(relpath: str) -> str:
    return f"its sidecar {_sidecar_name(relpath)} is missing"
