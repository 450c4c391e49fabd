"""Exceptions that experts raise, or any floor. Each text names its object, and says what to do.

The agent's own are in ``agent.faults.errors``.

CoServeError
+- ConfigError              a line file, a key or a value: exit code 78, before anything starts
+- ExpertError              one expert; the agent lives on
|  +- WeightsError          its weights: a retry is pointless, the expert is quarantined
|  |  +- WeightsMissing     the file is not there
|  |  +- WeightsCorrupt     truncated, or its sha256 is not the recorded one
|  |  +- WeightsMismatch    of another architecture, or with another number of labels
|  |  +- ModelUnsupported   a language model's config.json, GGUF file or adapter needs what the runtime lacks
|  |  +- TrainingUnsupported  a trainer's argument is unknown to the import, or cannot be followed
|  |  `- WeightsRefused     a pickle at serve time, or a pickle that holds more than tensors
|  +- TokenizerUnusable     a language model's tokenizer or chat template is missing or broken
|  +- LoadError             reading or copying failed this time; may be retried
|  `- OutputInvalid         NaN, infinity, or more boxes than can be judged in some image of a batch: UNKNOWN
+- MemoryExceeded           a pool has no room for the bytes asked for
|  `- AddressesExceeded     the process may map no address space for keys and values
+- ImageError               one image; its verdict is UNKNOWN, everything else goes on
|  +- ImageUnreadable       broken, truncated, not an image, not permitted
|  `- ImageTooLarge         more pixels than the limit
+- GenerationInvalid        a request for a text contradicts itself or the model: nothing has started
|  +- SamplingInvalid       a sampling parameter is not a number, or out of its range
|  +- GrammarInvalid        a form that it demands cannot be served: its schema, pattern or grammar
|  `- PromptInvalid         a prompt that is empty, or of unknown tokens
|     `- PromptTooLong      longer than a model's context, or than the memory for one text
+- BackendUnavailable       a configured runtime or device is not there
+- Unrecordable             a module's calls depend on the number of images, or on values that meta tensors lack
`- RanksLost                a rank of a language model ended, and its other ranks with it: they start again
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
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
    """``place``: file, line and key where known; of several ``problems`` that of the first."""

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


class ExpertError(CoServeError):
    key = "weights"  # of the expert's section, at fault

    def __init__(self, expert: str, message: str) -> None:
        super().__init__(f"expert {expert}: {message}")
        self.expert = expert
        self.message = message


class WeightsError(ExpertError): ...


class WeightsMissing(WeightsError): ...


class WeightsCorrupt(WeightsError): ...


class WeightsMismatch(WeightsError): ...


class ModelUnsupported(WeightsError):
    """``field``: the key in ``file``."""

    def __init__(self, expert: str, field: str, message: str, file: str = "config.json") -> None:
        super().__init__(expert, f"{file}: {field}: {message}")
        self.field = field


class TrainingUnsupported(WeightsError):
    def __init__(self, source: str, argument: str, message: str) -> None:
        super().__init__(source, f"the trainer's argument {argument} {message}")


class WeightsRefused(WeightsError): ...


class TokenizerUnusable(ExpertError):
    """``file``: its name."""

    def __init__(self, expert: str, file: str, message: str) -> None:
        super().__init__(expert, f"{file}: {message}")
        self.file = file


class LoadError(ExpertError): ...


class OutputInvalid(ExpertError): ...


class MemoryExceeded(CoServeError):
    def __init__(self, pool: str, wanted_bytes: int, free_bytes: int) -> None:
        super().__init__(f"memory {pool}: {wanted_bytes} bytes wanted, {free_bytes} free")
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes


class AddressesExceeded(MemoryExceeded):
    def __init__(self, wanted_bytes: int) -> None:
        super().__init__("address space for keys and values", wanted_bytes, 0)
        advice = "raise its limit (ulimit -v, systemd's LimitAS), or give texts.kv less memory"
        self.args = (f"the process may not map {wanted_bytes} bytes of address space for keys and values: {advice}",)


SHORTAGES = (  # texts of torch, CUDA, ONNX Runtime, OpenCV and libstdc++
    "can't allocate memory", "not enough memory", "failed to allocate", "out of memory", "insufficient memory",
    "bad_alloc", "bad allocation",
)  # fmt: skip


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if an error, or its cause, says that memory was short; runtimes have classes of their own for it."""
    if error is None:
        return False
    if isinstance(error, MemoryError | MemoryExceeded) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    is_short = not isinstance(error, CoServeError) and any(text in str(error).lower() for text in SHORTAGES)
    return is_short or is_out_of_memory(error.__cause__)


class ImageError(CoServeError):
    def __init__(self, image: str, message: str) -> None:
        super().__init__(f"{image}: {message}")
        self.image = image
        self.message = message


class ImageUnreadable(ImageError): ...


class ImageTooLarge(ImageError): ...


class GenerationInvalid(CoServeError):
    """``field``: the field at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class SamplingInvalid(GenerationInvalid):
    """``allowed``: in words."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(field, f"is {value!r}: give {allowed}")


class PromptInvalid(GenerationInvalid): ...


class PromptTooLong(PromptInvalid): ...


class GrammarInvalid(GenerationInvalid):
    """Grammar, schema or pattern of a text that cannot be served."""


class BackendUnavailable(CoServeError):
    def __init__(self, what: str, message: str) -> None:
        super().__init__(f"{what}: {message}")


class Unrecordable(CoServeError): ...


class RanksLost(CoServeError):
    def __init__(self, expert: str, reason: str) -> None:
        super().__init__(f"the ranks of {expert} are lost: {reason}")
        self.reason = reason
