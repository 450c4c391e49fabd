"""API section: addresses, access, and limits.

Guarantees: what can be reached from other machines is encrypted, or says in so many words that it is not.
"""

from __future__ import annotations

import os
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from agent.line_file.values import SecretSection
from experts.catalog import FilePath, Section, Size
from experts.sizes import MEBIBYTE

UNIX = "unix:"
LOCAL_DOOR = "coserve.sock"
SOCKET_PATH_BYTES = 106  # of Linux: sun_path has 108, less the zero at its end and the mark of one not shown yet


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
    if address.startswith(UNIX):
        return True
    return is_loopback_name(address.rpartition(":")[0])


def is_loopback_name(host: str) -> bool:
    host = host.removeprefix("[").removesuffix("]")
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
    """Limits of the APIs; calls beyond are refused at once, with a retry hint."""

    requests: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = Field(
        1000, description="images and texts under way, of all callers together; default 1000"
    )
    memory: Size = Field(
        320 * MEBIBYTE, description="bytes of images and texts under way, of all callers; default 320MiB"
    )
    message: Size = Field(
        16 * MEBIBYTE, description="the largest message, both ways; each open stream keeps room for one; default 16MiB"
    )


class ApiSection(Section):
    """Addresses of the APIs."""

    _has_local_door: bool = False

    grpc: Addresses = Field(
        (),
        description="unix:PATH or HOST:PORT, one or a list; default unix:coserve.sock in the state, which the agent's "
        "user alone may open; []: none",
    )
    http: Addresses = Field((), description="unix:PATH or loopback HOST:PORT, one or a list; default none")
    tls: TlsSection | None = Field(None, description="certificate and key of the HOST:PORT addresses; default none")
    token: SecretSection | None = Field(
        None, description="what callers at HOST:PORT must show (authorization: Bearer TOKEN); default nothing"
    )
    insecure_ok: bool = Field(
        False, strict=True, description="true: addresses that other machines reach may do without tls; default false"
    )
    limits: ApiLimitsSection = Field(ApiLimitsSection(), description="what the APIs take at once")

    def with_local_door(self, state: Path) -> ApiSection:
        """The section with its default: gRPC at a socket in the state folder, if its path is short enough."""
        path = state / LOCAL_DOOR
        address = f"{UNIX}{path}"
        is_free = "grpc" not in self.model_fields_set and address not in self.http
        if not is_free or len(os.fsencode(path)) > SOCKET_PATH_BYTES:
            return self
        opened = self.model_copy(update={"grpc": (address,)})
        opened._has_local_door = True
        return opened

    @property
    def has_local_door(self) -> bool:
        """Whether gRPC is at the default socket only, which is its owner's alone."""
        return self._has_local_door

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
