"""A prefiller's refusal (4xx) as the client's answer: what of it goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from extproc import replies
from extproc.enginehttp import EngineAnswer
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

Header = tuple[str, bytes]

# What describes the engine's connection or body framing, and what is the gateway's to say.
_NOT_ANSWERED: Final = frozenset(
    "connection content-length date host keep-alive proxy-connection server te trailer transfer-encoding upgrade "
    "x-request-id".split()
)
# With one that it does not accept from us, Envoy drops all that come after it.
_NOT_ACCEPTED_PREFIXES: Final = (":", "x-envoy-")
_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_BAD_IN_VALUE: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

_MAX_HEADER_BYTES: Final = 48 * 1024  # Envoy takes 60 KiB from an engine


def answer(refusal: EngineAnswer, own: Header) -> ext_proc.ProcessingResponse:
    """The engine's status, headers and body; ``own`` is the client's X-Request-Id, which comes first."""
    headers = [own]
    left = _MAX_HEADER_BYTES
    for name, value in sorted(_accepted(refusal), key=lambda header: not header[0].startswith("content-")):
        left -= len(name) + len(value)
        if left < 0:
            break
        headers.append((name, value))
    return replies.immediate(refusal.status, headers, refusal.body, "extproc_refused_by_prefill_engine")


def _accepted(refusal: EngineAnswer) -> Iterator[Header]:
    hops = {name.strip().lower() for key, value in refusal.headers if key == "connection" for name in value.split(",")}
    for name, value in refusal.headers:
        if name in _NOT_ANSWERED or name in hops or name.startswith(_NOT_ACCEPTED_PREFIXES):
            continue
        if _NAME.fullmatch(name) and not _BAD_IN_VALUE.search(value):
            yield name, value.encode("latin-1")
