"""Values of several sections: sizes, seconds, names, secrets by reference.

Guarantees: a line file never contains a secret; each message says what to write instead.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from experts.sections.values import FilePath, Section
from experts.sizes import SIZE, size_bytes

AUTO = "auto"


def _optional_size(value: object) -> int | None:
    if value == AUTO:
        return None
    bytes_ = size_bytes(str(value))
    if bytes_ < 1:
        raise ValueError(f"{value!r} is no memory - write auto, or a size such as 4GiB")
    return bytes_


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"invalid regular expression ({error}) - correct it, in single quotes") from error
    return text


def _no_path(name: str) -> str:
    if "/" in name or name in {".", ".."}:
        raise ValueError(f"{name!r} is a path - write its name in the unit's LoadCredential=")
    return name


def shown_url(url: str) -> str:
    """An address to show: without a login's password, and without the values after its `?`."""
    place, mark, query = url.partition("?")
    return re.sub(r"(//[^/@]*?):.*@", r"\1:***@", place) + mark + re.sub(r"=[^&]*", "=***", query)


SIZE_SCHEMA = WithJsonSchema({"type": "string", "pattern": f"^(auto|{SIZE.pattern})$", "default": AUTO})
OptionalSize = Annotated[int | None, BeforeValidator(_optional_size), SIZE_SCHEMA]
Seconds = Annotated[float, Field(strict=True, gt=0, le=86_400)]
RegularExpression = Annotated[str, AfterValidator(_regular_expression)]
Name = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]


class SecretSection(Section):
    """Place of a password or a token: a credential or a file."""

    credential: Annotated[str, BeforeValidator(_no_path)] | None = Field(
        None, description="name of a systemd credential: LoadCredential=NAME:FILE"
    )
    file: FilePath | None = Field(None, description="file with nothing but the secret, relative to this file")

    @model_validator(mode="before")
    @classmethod
    def _is_no_secret_itself(cls, value: object) -> object:
        """The value may be the secret, so no message repeats it."""
        if not isinstance(value, dict | cls):
            raise ValueError("a line file must not contain a secret - write {credential: NAME} or {file: PATH}")
        return value

    @model_validator(mode="after")
    def _is_one(self) -> SecretSection:
        if (self.credential is None) == (self.file is None):
            raise ValueError("a secret has one place - write {credential: NAME} or {file: PATH}")
        return self
