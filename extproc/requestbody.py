"""A request's body: collected within limits, and read as far as routing it needs; nothing unreadable slips through."""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING, Final

from extproc import openai
from extproc.errors import RequestError
from extproc.jsonobject import BadJson, JsonObject, NotAnObject, TooDeep, TooManyMembers, nests_deeper

if TYPE_CHECKING:
    from extproc.classify import Request


_QUOTED_PRINTABLE: Final = bytes.maketrans(b"%=\r\n", b"=&  ")


class RequestBody:
    """The pieces that Envoy sends. They are held once: :meth:`take` gives them away."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: list[bytes] = []
        self._size = 0

    def add(self, chunk: bytes) -> None:
        """Raises RequestError (413) as soon as the body is larger than the limit, in bytes."""
        self._size += len(chunk)
        if self._size > self._limit:
            self._chunks.clear()
            raise RequestError(413, "body_too_large", f"The request body exceeds {self._limit} bytes.")
        self._chunks.append(chunk)

    def take(self) -> bytes:
        text = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        return text


def read(text: bytes, request: Request, *, json_depth: int) -> JsonObject | None:
    """The body as an object; None where it is none, and no engine will find params for its KV connector in it.

    Raises RequestError (400) for an object that nests deeper than ``json_depth`` or has thousands of members, and for
    anything else that names such params.
    """
    if not request.is_form:
        try:
            body = openai.parse(text)
        except TooDeep:
            raise _too_deep(json_depth) from None
        except TooManyMembers as error:
            raise RequestError(400, "json_too_large", f"The request body has {error} in one object.") from None
        except (NotAnObject, BadJson):
            pass
        else:
            if nests_deeper(text, json_depth):
                raise _too_deep(json_depth)
            return body
    if openai.names_connector_params(_unquoted(text) if request.is_urlencoded else text):
        # Engines read more as JSON than RFC 8259 allows. What cannot be cleaned is refused.
        message = "KV transfer parameters are set by the gateway and not accepted from clients."
        raise RequestError(400, "connector_params_not_accepted", message)
    return None


def _unquoted(text: bytes) -> bytes:
    """A urlencoded form as plain text, good enough to look for names in it: ``=`` and line ends are lost.

    Percent-encoding is quoted-printable with another sign, and for that there is C code; urllib's takes a second and
    200 MiB for a mebibyte of percent signs.
    """
    text = text.translate(_QUOTED_PRINTABLE)
    while b"==" in text:  # "%%" is no escape in a form, but one in quoted-printable
        text = text.replace(b"==", b"=")
    return binascii.a2b_qp(text)


def _too_deep(levels: int) -> RequestError:
    return RequestError(400, "json_too_deep", f"The request body nests deeper than {levels} levels.")
