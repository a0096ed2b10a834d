"""The types of the configuration's values, with what each accepts. Error texts show no value: it may be a secret."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr

DAY_S = 24 * 60 * 60  # longer than anything here takes, and far below what timers and Envoy's durations can hold
Seconds = Annotated[float, Field(gt=0, le=DAY_S, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, le=DAY_S, allow_inf_nan=False)]

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_.])?")


def _is_host(text: str) -> bool:
    """Whether it is a host name, or an address without brackets."""
    if ":" not in text:
        return _HOST_NAME.fullmatch(text) is not None
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def split_listen(value: str) -> tuple[str, int]:
    """``host:port`` or ``[ipv6]:port`` -> (host without brackets, port). Port 0 asks the kernel for a free one.

    Raises ValueError when it is neither.
    """
    host, separator, port = value.rpartition(":")
    if not separator or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError("expected host:port, like 0.0.0.0:9002 or [::]:9002")
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        raise ValueError("an IPv6 address needs brackets, like [::]:9002")
    host = host[1:-1] if bracketed else host
    if bracketed != (":" in host) or not _is_host(host):
        raise ValueError("expected host:port, like 0.0.0.0:9002 or [::]:9002")
    return host, int(port)


def _listen(value: str) -> str:
    split_listen(value)
    return value


def _peer(value: str) -> str:
    try:
        split_listen(value)  # port 0 as well: who starts everything on free ports fills it in later
    except ValueError:
        raise ValueError("expected host:port, like 127.0.0.1:9002 or [::1]:9002") from None
    return value


def _dns_server(value: str) -> str:
    try:
        host, port = split_listen(value)
        ipaddress.ip_address(host)
    except ValueError:
        port = 0
    if not port:
        raise ValueError("expected address:port, like 10.0.0.10:53 or [fd00::10]:53")
    return value


def _collector(value: str) -> str:
    if "://" in value:
        return _engine_url(value)
    if split_listen(_peer(value))[1] == 0:
        raise ValueError("expected the port that the collector listens on, not 0")
    return value


def _engine_url(value: str) -> str:
    expected = "expected a URL like http://host:port"
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from None
    if parts.scheme not in ("http", "https") or not _is_host(parts.hostname or ""):
        raise ValueError(expected)
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{expected}, with no path, query or user")
    if port == 0 or value != value.strip():
        raise ValueError(expected)
    return f"{parts.scheme}://{parts.netloc.lower().removesuffix(':')}"


def _secret(value: SecretStr) -> SecretStr:
    """Keys come from files, which end in a newline; what is left goes into a header."""
    text = value.get_secret_value().strip()
    if not text:
        raise ValueError("must not be empty; leave the key out, or write null")
    if not (text.isascii() and text.isprintable()):
        raise ValueError("expected printable ASCII characters on one line")
    return SecretStr(text)


def _header_name(value: str) -> str:
    """In lower case, as Envoy writes them."""
    if not re.fullmatch(r":?[A-Za-z0-9!#$%&'*+.^_`|~-]+", value):
        raise ValueError("expected the name of a header, like x-api-key")
    return value.lower()


def _path(value: str) -> str:
    if not value.startswith("/") or "?" in value or "#" in value:
        raise ValueError("expected a path like /v1/completions, without a query")
    return value


def _probe_path(value: str) -> str:
    if not re.fullmatch("/[!-~]{0,1023}", value) or "#" in value:
        raise ValueError("expected a path like /health")
    return value


Listen = Annotated[str, AfterValidator(_listen)]
Peer = Annotated[str, AfterValidator(_peer)]
DnsServer = Annotated[str, AfterValidator(_dns_server)]
CollectorUrl = Annotated[str, AfterValidator(_collector)]
EngineUrl = Annotated[str, AfterValidator(_engine_url)]
RoutePath = Annotated[str, AfterValidator(_path)]
ProbePath = Annotated[str, AfterValidator(_probe_path)]
HeaderName = Annotated[str, AfterValidator(_header_name)]
Secret = Annotated[SecretStr, AfterValidator(_secret)]
