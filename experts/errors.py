"""Every exception of the project. Each carries the object it is about, and its text says what to do.

CoServeError
+- ConfigError              a line file, a key or a value: exit code 78, before anything starts
|  +- DeviceMissing         a configured device is not there, or not yet: exit code 1, and tried again
|  +- SecretMissing         a password or a token is not where the line file says
|  +- ProfileDamaged        a device profile's file holds something else
|  `- SampleUnfit           requests that are to be measured are not judged; it says which experts and images leave
+- ExpertError              one expert; the agent lives on
|  +- WeightsError          its weights: retrying is pointless, the expert is quarantined
|  |  +- WeightsMissing     the file is not there
|  |  +- WeightsCorrupt     truncated, or its sha256 is not the recorded one
|  |  +- WeightsMismatch    of another architecture, or with another number of labels
|  |  +- ModelUnsupported   a language model's config.json asks for what the runtime lacks, or cannot be used
|  |  +- TrainingUnsupported  a trainer's argument that an import needs is not known, or is one it cannot follow
|  |  +- WeightsRefused     a pickle at serve time, or a pickle that holds more than tensors
|  |  `- WeightsUnclear     a model's file does not tell all that a line file has to: which options do
|  +- TokenizerUnusable     a language model's tokenizer or chat template is missing or broken: no words go in or out
|  +- LoadError             reading or copying failed this time; may be retried
|  `- OutputInvalid         it ran, and answered with something that is no number, or with too much: UNKNOWN
+- MemoryExceeded           a pool has no room for the bytes asked for
+- ImageError               one image; its verdict is UNKNOWN, everything else goes on
|  +- ImageUnreadable       broken, truncated, not an image, not permitted
|  `- ImageTooLarge         more pixels than the limit
+- GenerationInvalid        what a text is asked to be cannot be: nothing was begun
|  +- SamplingInvalid       a number that says how tokens are drawn is none, or out of its range
|  `- PromptInvalid         a prompt that is empty, over the model's context, or of unknown tokens
+- FileChanged              a file is not the one any more that was seen complete: it is looked at anew
+- SidecarUnfinished        what tells whose an image is does not parse: its writer is not done, or it is no JSON
+- CameraFailed             a camera cannot be connected, or a connection ended: it is tried again
+- BackendUnavailable       a configured runtime or device is not there
+- Unrecordable             a module's calls are not the same for any number of images: oneDNN's forms do not take it
+- IllegalMove              a residency step that the table does not hold; nothing was changed
+- OrderRefused             an API's caller asks for what is not there, or for more than there is room for
+- AddressUnusable          an API cannot be served where the line file says
+- AgentUnreachable         no agent answers at an address, or it does not let this caller in
+- ReceiverUnavailable      a receiver of verdicts cannot be reached, or takes none now: they wait
+- MessageRefused           a receiver of verdicts will never take this one: it is dropped, and that is told
+- AlreadyRunning           another agent, or a profile run, holds this line's state directory
+- StateUnusable            the disk refuses the line's state directory
+- StateOfAnother           root would write into the state directory of another user
+- DeviceLost               the accelerator's context is gone: nothing runs on it in this process any more
+- WorkOverdue              a batch or a load that never answers: its thread hangs, and cannot be ended
`- AgentCrashed             the agent's loop ended, by one of the two above or an error of the program
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class CoServeError(Exception): ...


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Place in a file; line and column count from 1."""

    file: Path
    line: int
    column: int
    key: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.key}"


class ConfigError(CoServeError):
    """A configuration that must not start. ``place`` names file, line and key where one is known.

    One that reports several ``problems`` has the place of the first.
    """

    def __init__(self, message: str, place: FilePlace | None = None) -> None:
        super().__init__(f"{place}: {message}" if place else message)
        self.message = message
        self.place = place
        self._several: tuple[ConfigError, ...] = ()

    @property
    def problems(self) -> tuple[ConfigError, ...]:
        """The single errors that this one reports."""
        return self._several or (self,)

    @classmethod
    def of(cls, problems: Sequence[ConfigError]) -> ConfigError:
        """Join several errors, at least one, into one; each is a line of its text."""
        if len(problems) == 1:
            return problems[0]
        together = cls("\n".join(str(problem) for problem in problems))
        together.place = problems[0].place
        together._several = tuple(problems)
        return together


class DeviceMissing(ConfigError):
    """A configured device that is not there, or not yet: a driver may come after the agent when a box boots.

    So it ends a command as what fails at run time does, and a service is tried again.
    """


class SecretMissing(ConfigError):
    """A password or a token that cannot be read. ``where`` it was looked for."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason} - put the secret there, or correct where it lies")
        self.where = where


class ProfileDamaged(ConfigError):
    """A file that holds no device profile, or one that was damaged or edited. ``reason``: in words, after ``path``."""

    def __init__(self, path: Path, reason: str, advice: str) -> None:
        super().__init__(f"{path} {reason} - {advice}")
        self.path = path
        self.reason = reason


class SampleUnfit(ConfigError):
    """A sample of requests that measures nothing, as some are not judged; without these others may be.

    ``experts``: those that do not judge what they are given, and why; ``images``: files that cannot be read, and why.
    """

    def __init__(self, message: str, experts: Mapping[str, str], images: Mapping[Path, str]) -> None:
        super().__init__(message)
        self.experts = experts
        self.images = images


class ExpertError(CoServeError):
    def __init__(self, expert: str, message: str) -> None:
        super().__init__(f"expert {expert}: {message}")
        self.expert = expert
        self.message = message


class WeightsError(ExpertError): ...


class WeightsMissing(WeightsError): ...


class WeightsCorrupt(WeightsError): ...


class WeightsMismatch(WeightsError): ...


class ModelUnsupported(WeightsError):
    """A config.json that describes no model this runtime can run. ``field``: the key in it that says so."""

    def __init__(self, expert: str, field: str, message: str) -> None:
        super().__init__(expert, f"config.json: {field}: {message}")
        self.field = field


class TrainingUnsupported(WeightsError):
    """A checkpoint that cannot be imported as it was trained. ``argument``: of its trainer, unknown or not followed."""

    def __init__(self, source: str, argument: str, message: str) -> None:
        super().__init__(source, f"the trainer's argument {argument} {message}")
        self.argument = argument


class WeightsRefused(WeightsError): ...


class WeightsUnclear(WeightsError):
    """A model's file does not tell something. ``missing``: by key the reason, and the option that tells it."""

    def __init__(self, source: str, missing: Mapping[str, str]) -> None:
        lines = "".join(f"\n  {key}: {why}" for key, why in missing.items())
        super().__init__(source, f"does not tell all that a line has to know of it:{lines}")
        self.missing = missing


class TokenizerUnusable(ExpertError):
    """A file of a language model's tokenizer is missing or broken. ``file``: its name."""

    def __init__(self, expert: str, file: str, message: str) -> None:
        super().__init__(expert, f"{file}: {message}")
        self.file = file


class LoadError(ExpertError): ...


class OutputInvalid(ExpertError):
    """The expert ran, and answered with something that is not a number, or with more than can be judged.

    At least one image of the batch has no prediction: which one is told by asking about each alone.
    """


class MemoryExceeded(CoServeError):
    def __init__(self, pool: str, wanted_bytes: int, free_bytes: int) -> None:
        super().__init__(f"memory {pool}: {wanted_bytes} bytes wanted, {free_bytes} free")
        self.pool = pool
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes


class ImageError(CoServeError):
    def __init__(self, image: str, message: str) -> None:
        super().__init__(f"{image}: {message}")
        self.image = image
        self.message = message


class ImageUnreadable(ImageError): ...


class ImageTooLarge(ImageError): ...


class GenerationInvalid(CoServeError):
    """A request for a text contradicts itself or the model. ``field``: the field at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class SamplingInvalid(GenerationInvalid):
    """A field of how tokens are drawn. ``allowed``: what it may be, in words."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(field, f"is {value!r}: give {allowed}")


class PromptInvalid(GenerationInvalid): ...


class FileChanged(CoServeError):
    """Another file, or the same with other bytes, lies where a complete one was seen. ``path``: below its folder."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: not the file that was seen complete")
        self.path = path


class SidecarUnfinished(CoServeError):
    """A sidecar does not parse. Its writer is not done, or it is no JSON: only time can tell. ``name``: as told."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} is not JSON ({reason})")
        self.name = name


class CameraFailed(CoServeError):
    """No picture comes from this connection, and why in words. ``is_final``: trying again would not help."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_final = is_final


class BackendUnavailable(CoServeError):
    def __init__(self, what: str, message: str) -> None:
        super().__init__(f"{what}: {message}")
        self.what = what


class Unrecordable(CoServeError):
    """A module whose calls change with the number of images, or that reads values which meta tensors lack."""


class IllegalMove(CoServeError):
    def __init__(self, copy: str, state: str, move: str) -> None:
        super().__init__(f"{copy}: no move {move!r} from state {state!r}")
        self.copy = copy
        self.state = state
        self.move = move


class Refusing(StrEnum):
    """Why an order is refused: what a caller can tell apart."""

    QUEUE_FULL = "QUEUE_FULL"  # too many images are under way, or too many bytes of them: again in a while
    TOO_LARGE = "TOO_LARGE"  # this image never fits
    NOT_FOUND = "NOT_FOUND"  # no such model, camera, board type
    INVALID = "INVALID"  # the order contradicts itself, or the line file
    KEY_REUSED = "KEY_REUSED"  # its key was given for something else: never as it is
    CURSOR_UNKNOWN = "CURSOR_UNKNOWN"  # a place to read on from that this results file never had
    NOT_NOW = "NOT_NOW"  # it cannot be done in the state that things are in
    STOPPING = "STOPPING"  # the agent ends: the next one will answer
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"  # more bytes than a message may have: never as it is
    UNAUTHENTICATED = "UNAUTHENTICATED"  # the caller's token is missing, or not the one


class OrderRefused(CoServeError):
    """An order that was not taken, and left nothing behind. ``retry_s``: when to try again; None: never as it is.

    ``field``: which one of the order is to blame, where one is.
    """

    def __init__(
        self, reason: Refusing, message: str, retry_s: float | None = None, *, field: str | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_s = retry_s
        self.field = field


class AddressUnusable(CoServeError):
    """An address that another process serves, or that is not this machine's."""

    def __init__(
        self, address: str, reason: str, advice: str = "correct it in the line file, then start again"
    ) -> None:
        super().__init__(f"{address}: {reason} - {advice}")
        self.address = address


class AgentUnreachable(CoServeError):
    """No answer from the agent at an address. ``reason``: in words, with what to do."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address}: {reason}")
        self.address = address


class ReceiverUnavailable(CoServeError):
    """A receiver takes nothing at the moment. ``retry_s``: how long it asks to be left alone; None: it does not say."""

    def __init__(self, receiver: str, reason: str, retry_s: float | None = None) -> None:
        super().__init__(f"{receiver}: {reason}")
        self.receiver = receiver
        self.reason = reason
        self.retry_s = retry_s


class MessageRefused(CoServeError):
    """A receiver has looked at the message of this id and wants it neither now nor later."""

    def __init__(self, receiver: str, message: str, reason: str) -> None:
        super().__init__(f"{receiver}: {reason}")
        self.receiver = receiver
        self.message = message
        self.reason = reason


class AlreadyRunning(CoServeError):
    def __init__(self, lock: Path) -> None:
        super().__init__(
            f"{lock} is held by another agent or `coserve profile`: stop it first, or give this line its own state"
        )
        self.lock = lock


class StateUnusable(CoServeError):
    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason} - make room there or correct `state`, then start again")
        self.path = path


class StateOfAnother(CoServeError):
    """A state directory of another user, whose agent could not write files of root's in it."""

    def __init__(self, path: Path, user: str) -> None:
        super().__init__(
            f"{path} belongs to the user {user}, who could not change what root writes there - run this as that user, "
            f"as in: sudo -u {user} coserve ..."
        )


class DeviceLost(CoServeError):
    """Nothing runs on this accelerator any more until another process asks it; no fault of an expert or an image."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(
            f"the device {device} is lost: {reason} - if that happens again, look for Xid and ECC errors in dmesg"
        )
        self.device = device


class WorkOverdue(CoServeError):
    """A batch or a load, as ``work`` describes it, that has not answered for so long that it never will."""

    def __init__(self, work: str, age_s: float, advice: str, *, is_batch: bool) -> None:
        super().__init__(f"{work} has not answered for {age_s:.0f} s and hangs - {advice}")
        self.is_batch = is_batch
        self.work = work


class AgentCrashed(CoServeError):
    """The thread that decides has ended by ``error``; what it had taken has no outcome.

    ``leaves_threads``: a thread of the agent is still at work, or hangs, so that this process may not end by itself.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"the agent crashed: {type(error).__name__}: {error} - start it again: what was not judged waits in .work"
        )
        self.error = error
        self.leaves_threads = isinstance(error, WorkOverdue)
