"""API section: addresses, access, and limits.

Guarantees: an address that other machines reach is encrypted, or the file says in so many words that it is not.
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
SOCKET_PATH_BYTES = 106  # Linux: sun_path has 108, less the final zero and the `~` of a hidden socket


def _address(text: str, info: ValidationInfo) -> str:
    if text.startswith(UNIX):
        path = text.removeprefix(UNIX)
        if not path:
            raise ValueError("the address has no path - write unix:./state/coserve.sock")
        folder: Path = (info.context or {})["folder"]
        return f"unix:{(folder / path).absolute()}"
    _, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not an address - write unix:PATH or 127.0.0.1:PORT, a port from 0 to 65535")
    return text


def is_loopback(address: str) -> bool:
    return address.startswith(UNIX) or is_loopback_name(address.rpartition(":")[0])


def is_loopback_name(host: str) -> bool:
    host = host.removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
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
    """Encryption of HOST:PORT addresses; read again at a reload."""

    certificate: FilePath = Field(description="PEM file: this box's certificate chain")
    key: FilePath = Field(description="PEM file: its private key")
    client_ca: FilePath | None = Field(None, description="PEM file of the authority of callers' certificates (mTLS)")


class ApiLimitsSection(Section):
    """Limits of the APIs; a call beyond them is refused at once, with a retry hint."""

    requests: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = Field(
        1000, description="images and texts of all callers at once"
    )
    memory: Size = Field(320 * MEBIBYTE, description="bytes of all callers' images and texts at once; default 320MiB")
    message: Size = Field(16 * MEBIBYTE, description="largest message; each open stream reserves one; default 16MiB")


class ApiSection(Section):
    """Addresses of the APIs."""

    _has_local_door: bool = False

    grpc: Addresses = Field(
        (),
        description="unix:PATH or HOST:PORT, one or a list; default unix:coserve.sock in the state, which only the "
        "agent's user may open; []: none",
    )
    http: Addresses = Field((), description="unix:PATH or loopback HOST:PORT, one or a list")
    tls: TlsSection | None = Field(None, description="certificate and key of the HOST:PORT addresses")
    token: SecretSection | None = Field(None, description="callers at HOST:PORT must send authorization: Bearer TOKEN")
    insecure_ok: bool = Field(False, strict=True, description="true: other machines may connect without tls")
    limits: ApiLimitsSection = Field(ApiLimitsSection(), description="limits of the APIs")

    def with_local_door(self, state: Path) -> ApiSection:
        """The section with its default: gRPC at a socket in the state folder, if the path is short enough."""
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
        """Whether gRPC is at the default socket alone, which only its owner may open."""
        return self._has_local_door

    @model_validator(mode="after")
    def _is_guarded(self) -> ApiSection:
        open_ = next((each for each in self.grpc if not is_loopback(each)), None)
        if open_ is not None and self.tls is None and not self.insecure_ok:
            raise ValueError(
                f"{open_} can be reached from other machines, unencrypted - add tls:, write 127.0.0.1, or in a "
                "trusted network insecure_ok: true"
            )
        far = next((each for each in self.http if not is_loopback(each)), None)
        if far is not None:
            raise ValueError(f"{far} can be reached from other machines - http is served at 127.0.0.1 and [::1] only")
        both = next((each for each in self.http if each in self.grpc and not each.endswith(":0")), None)
        if both is not None:
            raise ValueError(f"{both} is used by grpc and by http - give each another address")
        return self
