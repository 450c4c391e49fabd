"""API section: addresses, access, and limits.

Guarantees: an address that other machines reach is encrypted, or the file says in so many words that it is not. Who is
let in from elsewhere, by address or by proxy, sends a token.
"""

from __future__ import annotations

import os
import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from agent.line_file.values import Name, SecretSection
from experts.sections.values import FilePath, Section, Size
from experts.sizes import MEBIBYTE

UNIX = "unix:"
LOCAL_DOORS = {"grpc": "coserve.sock", "http": "coserve-web.sock"}  # in the state, for the agent's user alone
TAKEN_NAMES = ("anonymous", "owner", "signal", "token")  # callers that the audit names so
PORTS = {"http": 80, "https": 443}
HOST = re.compile(r"[\w.-]+|[0-9a-f:.]+:[0-9a-f:.]*", re.ASCII)
SOCKET_PATH_BYTES = 106  # Linux: sun_path has 108, less the final zero and the `~` of a hidden socket


def _address(text: str, info: ValidationInfo) -> str:
    if text.startswith(UNIX):
        path = text.removeprefix(UNIX)
        if not path:
            raise ValueError("the address has no path - write unix:./state/coserve.sock")
        folder: Path = (info.context or {})["folder"]
        return f"unix:{(folder / path).absolute()}"
    return host_and_port(text)


def host_and_port(text: str) -> str:
    """Check an address, and return it. Raises ValueError for one without a port."""
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


def _origin(text: str) -> str:
    """Origin of a page, as a browser writes it."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    host = (parts.hostname or "").lower()
    if parts.scheme not in PORTS or not HOST.fullmatch(host) or "@" in text:
        raise ValueError(f"{text!r} is no origin - write https://HOST or https://HOST:PORT")
    if parts.path not in ("", "/") or "?" in text or "#" in text:
        raise ValueError(f"{text!r} has a path, and pages are served at / only - give them a host or port of their own")
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}" + ("" if port in (None, PORTS[parts.scheme]) else f":{port}")


def _proxy(text: str, info: ValidationInfo) -> str:
    if text.startswith(UNIX):
        return _address(text, info)
    try:
        network = ip_network(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is no proxy - write its address, its network as 10.0.0.0/24, or unix:PATH"
        ) from None
    if not network.prefixlen:
        raise ValueError(f"{text!r} trusts every caller - write the address of the proxy")
    return str(network)


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


Address = Annotated[str, AfterValidator(_address)]
Origin = Annotated[str, AfterValidator(_origin)]
MANY = (
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}], "default": []}),
)
Addresses = Annotated[tuple[Address, ...], *MANY]
Origins = Annotated[tuple[Origin, ...], *MANY]
Proxies = Annotated[tuple[Annotated[str, AfterValidator(_proxy)], ...], *MANY]


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


class TokenSection(SecretSection):
    """Named token of a caller, and its role."""

    role: Literal["read", "inspect", "operate", "admin"] = Field(
        description="read: results and texts; inspect: also stored inspections; operate: also reviews, rework and "
        "triggers; admin: also reload, promotion and repository"
    )


def _names(tokens: dict[str, TokenSection]) -> dict[str, TokenSection]:
    if taken := [name for name in tokens if name in TAKEN_NAMES]:
        raise ValueError(f"{taken[0]!r} names another caller in the audit - give the token another name")
    return tokens


class ApiSection(Section):
    """Addresses of the APIs."""

    _local_doors: frozenset[str] = frozenset()

    grpc: Addresses = Field(
        (),
        description="unix:PATH or HOST:PORT, one or a list; default unix:coserve.sock in the state, which only the "
        "agent's user may open; []: none",
    )
    http: Addresses = Field(
        (),
        description="unix:PATH or HOST:PORT, one or a list; default unix:coserve-web.sock in the state, which only the "
        "agent's user may open; []: none",
    )
    tls: TlsSection | None = Field(None, description="certificate and key of the HOST:PORT addresses")
    token: SecretSection | None = Field(
        None, description="callers at HOST:PORT must send authorization: Bearer TOKEN; of the role admin"
    )
    tokens: Annotated[dict[Name, TokenSection], AfterValidator(_names)] = Field(
        {}, description="tokens by the name of their caller, each with a role"
    )
    public_origin: Origin | None = Field(
        None, description="address in the browser of the pages behind a proxy that ends TLS, as https://HOST"
    )
    trusted_proxy: Proxies = Field(
        (),
        description="address or network of the proxy, or a unix:PATH of http, one or a list: its X-Forwarded-For and "
        "X-Forwarded-Proto count, and callers through it need a token",
    )
    frame_ancestors: Origins = Field((), description="origins whose pages may show the station's in a frame")
    insecure_ok: bool = Field(False, strict=True, description="true: gRPC beyond this machine does without tls")
    limits: ApiLimitsSection = Field(ApiLimitsSection(), description="limits of the APIs")

    def with_local_doors(self, state: Path) -> ApiSection:
        """The section with its defaults: sockets in the state folder, where the path is short enough."""
        paths = {wire: state / name for wire, name in LOCAL_DOORS.items() if wire not in self.model_fields_set}
        free = {
            wire: f"{UNIX}{path}" for wire, path in paths.items()
            if len(os.fsencode(path)) <= SOCKET_PATH_BYTES and f"{UNIX}{path}" not in (*self.grpc, *self.http)
        }  # fmt: skip
        opened = self.model_copy(update={wire: (address,) for wire, address in free.items()})
        opened._local_doors = frozenset(free.values())
        return opened

    def is_owners(self, address: str) -> bool:
        """True for a default socket, which only its owner may open."""
        return address in self._local_doors

    @model_validator(mode="after")
    def _is_guarded(self) -> ApiSection:
        open_ = next((each for each in self.grpc if not is_loopback(each)), None)
        if open_ is not None and self.tls is None and not self.insecure_ok:
            raise ValueError(
                f"{open_} can be reached from other machines, unencrypted - add tls:, write 127.0.0.1, or in a "
                "trusted network insecure_ok: true"
            )
        far = next((each for each in self.http if not is_loopback(each)), None)
        if far is not None and (self.tls is None or not (self.token or self.tokens)):
            raise ValueError(
                f"{far} can be reached from other machines - add tls: and a token (tokens:), or write 127.0.0.1"
            )
        both = next((each for each in self.http if each in self.grpc and not each.endswith(":0")), None)
        if both is not None:
            raise ValueError(f"{both} is used by grpc and by http - give each another address")
        return self

    @model_validator(mode="after")
    def _has_its_proxy(self) -> ApiSection:
        if self.public_origin is not None and not self.trusted_proxy:
            raise ValueError("public_origin is that of a proxy - add the proxy's own address, trusted_proxy: 127.0.0.1")
        if self.trusted_proxy and not (self.token or self.tokens):
            raise ValueError("trusted_proxy lets in callers of other machines - add a token (tokens:)")
        unknown = next((each for each in self.trusted_proxy if each.startswith(UNIX) and each not in self.http), None)
        if unknown is not None:
            raise ValueError(f"trusted_proxy: {unknown} is no address of http - add it there")
        return self
