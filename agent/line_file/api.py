"""Where the APIs answer, who may ask them, and how much at once.

Guarantees: what can be reached from other machines is encrypted, or says in so many words that it is not.
"""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from agent.line_file.values import SecretSection
from experts.catalog import FilePath, Section, Size
from experts.sizes import MEBIBYTE

UNIX = "unix:"


def _address(text: str, info: ValidationInfo) -> str:
    if text.startswith(UNIX):
        path = text.removeprefix(UNIX)
        if not path:
            raise ValueError("an address without a path - write unix:./state/coserve.sock")
        folder: Path = (info.context or {})["folder"]
        return f"unix:{(folder / path).absolute()}"
    _, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not an address - write unix:PATH or 127.0.0.1:PORT, a port from 0 to 65535")
    return text


def is_loopback(address: str) -> bool:
    """Whether this address (unix:PATH or HOST:PORT) can be reached from this machine alone."""
    if address.startswith(UNIX):
        return True
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


Address = Annotated[str, AfterValidator(_address)]
Addresses = Annotated[
    tuple[Address, ...],
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}], "default": []}),
]


class TlsSection(Section):
    """Encryption of the addresses that are no unix sockets; read anew at a reload."""

    certificate: FilePath = Field(description="PEM file: this box's certificate, and those above it")
    key: FilePath = Field(description="PEM file: its private key")
    client_ca: FilePath | None = Field(
        None, description="PEM file: who asks must show a certificate of this authority (mTLS); default anybody may"
    )


class ApiLimitsSection(Section):
    """What the APIs take at once; more is refused at once, with a hint when to try again."""

    requests: int = Field(
        1000,
        strict=True,
        ge=1,
        le=1_000_000,
        description="images and texts under way, of all callers together; default 1000",
    )
    memory: Size = Field(
        256 * MEBIBYTE, description="bytes of images and texts under way, of all callers; default 256MiB"
    )
    message: Size = Field(64 * MEBIBYTE, description="the largest message, both ways; default 64MiB")


class ApiSection(Section):
    """Where the APIs answer."""

    grpc: Addresses = Field((), description="unix:PATH or HOST:PORT, one or a list; default none")
    http: Addresses = Field((), description="unix:PATH or loopback HOST:PORT, one or a list; default none")
    tls: TlsSection | None = Field(None, description="certificate and key of the HOST:PORT addresses; default none")
    token: SecretSection | None = Field(
        None, description="what callers at HOST:PORT must show (authorization: Bearer TOKEN); default nothing"
    )
    insecure_ok: bool = Field(
        False, strict=True, description="true: addresses that other machines reach may do without tls; default false"
    )
    limits: ApiLimitsSection = Field(ApiLimitsSection(), description="what the APIs take at once")

    @model_validator(mode="after")
    def _is_guarded(self) -> ApiSection:
        open_ = next((each for each in self.grpc if not is_loopback(each)), None)
        if open_ is not None and self.tls is None and not self.insecure_ok:
            raise ValueError(
                f"{open_} can be reached from other machines, and unencrypted - add tls:, write 127.0.0.1, or, where "
                "the network is trusted, insecure_ok: true"
            )
        far = next((each for each in self.http if not is_loopback(each)), None)
        if far is not None:
            raise ValueError(f"{far} can be reached from other machines - http is served at 127.0.0.1 and [::1] only")
        both = next((each for each in self.http if each in self.grpc and not each.endswith(":0")), None)
        if both is not None:
            raise ValueError(f"{both} is given to grpc and to http - each has an address of its own")
        return self
