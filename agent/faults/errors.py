"""Exceptions of the agent, beside those of ``experts.errors``. Each text names its object, and says what to do.

CoServeError
+- ConfigError
|  +- DeviceMissing         a configured device is not there yet, as while a box boots: exit code 1, a service retries
|  +- SecretMissing         a password or a token is not where the line file says
|  +- ProfileDamaged        a file holds no device profile, or a damaged or edited one
|  `- SampleUnfit           some requests of a sample are not judged: it names experts and images to leave out
+- ExpertError
|  +- WeightsError
|  |  `- WeightsUnclear     a model's file lacks facts that a line file needs: it names the options that give them
|  `- CopyDamaged           a copy's bytes were lost while they moved within its memory: it is loaded again
+- OrderRefused             an API order that was not taken, and left no state
+- FileChanged              the path of a complete file has another file, or other bytes
+- SidecarUnfinished        a sidecar does not parse: its writer is not done, or it is not JSON
+- CameraFailed             a camera cannot be connected, or its connection ended
+- IllegalMove              a residency step that is not in the table; nothing was changed
+- AddressUnusable          an address of an API is in use, or is not this machine's
+- AgentUnreachable         no agent answers at an address, or it refuses this caller
+- ReceiverUnavailable      a receiver of verdicts cannot be reached, or takes none now: they wait
+- MessageRefused           a receiver of verdicts will never take this message: it is dropped, and that is reported
+- AlreadyRunning           another agent, or a profile run, holds this line's state directory
+- StateUnusable            the disk refuses the line's state directory
+- StateOfAnother           root would write into the state directory of another user
+- WorkerBroken             a worker ended, or failed before it was ready
+- ClusterUnreachable       a Ray cluster does not answer, refuses the agent, or has no room for its workers
+- DeviceLost               the accelerator's context is gone until another process opens it
+- WorkOverdue              a batch or a load does not end: its thread hangs, and cannot be stopped
`- AgentCrashed             the agent's loop ended, by DeviceLost, WorkOverdue or a fault of the program
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from experts.errors import ConfigError, CoServeError, ExpertError, WeightsError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class DeviceMissing(ConfigError): ...


class SecretMissing(ConfigError):
    """``where``: place that was searched."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason} - put the secret there, or correct its path")


class ProfileDamaged(ConfigError):
    """``reason``: in words, after ``path``."""

    def __init__(self, path: Path, reason: str, advice: str) -> None:
        super().__init__(f"{path} {reason} - {advice}")
        self.reason = reason


class SampleUnfit(ConfigError):
    """``experts``: by id, why they do not judge; ``images``: why they cannot be read."""

    def __init__(self, message: str, experts: Mapping[str, str], images: Mapping[Path, str]) -> None:
        super().__init__(message)
        self.experts = experts
        self.images = images


class WeightsUnclear(WeightsError):
    """``missing``: by key the reason, and the option that gives it."""

    def __init__(self, source: str, missing: Mapping[str, str]) -> None:
        lines = "".join(f"\n  {key}: {why}" for key, why in missing.items())
        super().__init__(source, f"does not contain all that a line has to know of it:{lines}")
        self.missing = missing


class CopyDamaged(ExpertError): ...


class Reason(StrEnum):
    """Reason why an order is refused, by which callers react."""

    QUEUE_FULL = "QUEUE_FULL"  # too many images, or bytes of images, are under way: retry later
    TOO_LARGE = "TOO_LARGE"  # this image never fits
    NOT_FOUND = "NOT_FOUND"  # no such model, camera, board type
    INVALID = "INVALID"  # the order contradicts itself, or the line file
    TOO_LONG = "TOO_LONG"  # a text longer than its model's context: do not retry
    KEY_REUSED = "KEY_REUSED"  # its key belongs to another order: do not retry
    CURSOR_UNKNOWN = "CURSOR_UNKNOWN"  # a cursor that this results file never gave
    NOT_NOW = "NOT_NOW"  # not possible in the present state
    STOPPING = "STOPPING"  # the agent stops: retry after its restart
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"  # more bytes than a message may have: do not retry
    UNAUTHENTICATED = "UNAUTHENTICATED"  # the caller's token is missing or wrong
    FORBIDDEN = "FORBIDDEN"  # the caller's role does not allow it


class OrderRefused(CoServeError):
    """``retry_s``: time until a retry; None: do not retry. ``field``: the order's field at fault, if one is."""

    def __init__(self, reason: Reason, message: str, retry_s: float | None = None, *, field: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_s = retry_s
        self.field = field


class FileChanged(CoServeError):
    """``path``: below its folder."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: not the file that was seen complete")


class SidecarUnfinished(CoServeError):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} is not JSON ({reason})")


class CameraFailed(CoServeError):
    """``is_final``: a retry would not help."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_final = is_final


class IllegalMove(CoServeError):
    def __init__(self, copy: str, state: str, move: str) -> None:
        super().__init__(f"{copy}: no move {move!r} from state {state!r}")
        self.copy = copy
        self.state = state
        self.move = move


class AddressUnusable(CoServeError):
    def __init__(
        self, address: str, reason: str, advice: str = "correct it in the line file, then start again"
    ) -> None:
        super().__init__(f"{address}: {reason} - {advice}")
        self.address = address


class AgentUnreachable(CoServeError):
    """``reason``: in words, with what to do."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address}: {reason}")


class ReceiverUnavailable(CoServeError):
    """``retry_s``: its requested pause, if any; ``shown_s``: least time to show it; ``by_message``: an accepted
    connection ended on this message, which may be the cause."""

    def __init__(
        self,
        receiver: str,
        reason: str,
        retry_s: float | None = None,
        *,
        shown_s: float = 0.0,
        by_message: bool = False,
    ) -> None:
        super().__init__(f"{receiver}: {reason}")
        self.reason = reason
        self.retry_s = retry_s
        self.shown_s = shown_s
        self.by_message = by_message


class MessageRefused(CoServeError):
    """``message``: its id."""

    def __init__(self, receiver: str, message: str, reason: str) -> None:
        super().__init__(f"{receiver}: {reason}")
        self.reason = reason


class AlreadyRunning(CoServeError):
    def __init__(self, lock: Path) -> None:
        super().__init__(
            f"{lock} is held by another agent or `coserve profile`: stop it first, or give this line its own state"
        )


class StateUnusable(CoServeError):
    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason} - make room there or correct `state`, then start again")


class StateOfAnother(CoServeError):
    def __init__(self, path: Path, user: str) -> None:
        super().__init__(
            f"{path} belongs to the user {user}, who could not change what root writes there - run this as that user, "
            f"as in: sudo -u {user} coserve ..."
        )


class WorkerBroken(CoServeError):
    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"worker {worker}: {reason}")


class ClusterUnreachable(CoServeError):
    def __init__(self, address: str, reason: str, advice: str) -> None:
        super().__init__(f"the cluster at {address}: {reason} - {advice}")


class DeviceLost(CoServeError):
    def __init__(self, device: str, reason: str) -> None:
        super().__init__(
            f"the device {device} is lost: {reason} - if that happens again, look for Xid and ECC errors in dmesg"
        )


class WorkOverdue(CoServeError):
    """``work``: in words. ``pool``: memory that a load goes to, or that a batch runs from."""

    def __init__(self, work: str, age_s: float, advice: str, pool: str, *, is_batch: bool) -> None:
        super().__init__(f"{work} has not answered for {age_s:.0f} s and hangs - {advice}")
        self.pool = pool
        self.is_batch = is_batch


class AgentCrashed(CoServeError):
    """``leaves_threads``: a thread still works or hangs, so this process may not end by itself."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"the agent crashed: {type(error).__name__}: {error} - start it again: what was not judged waits in .work"
        )
        self.error = error
        self.leaves_threads = isinstance(error, WorkOverdue)
