"""Any bytes as a request's body: read as the service reads them, and judged by what an engine would make of the result.

Engines read bodies with Python's json module. Whatever it finds in what leaves the service, no connector params of the
client are among it, and all else is as the client sent it.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.parse import unquote_plus

import atheris

with atheris.instrument_imports(include=["extproc"]):
    from extproc import classify, openai, requestbody
    from extproc.errors import RequestError
    from extproc.jsonobject import nests_deeper

CONTENT_TYPES = [
    *("application/json", "", "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded")
]
DEPTH = 64
PLACES = (
    (),
    ("vllm_xargs",),
    ("extra_args",),
    ("sampling_params",),
    ("sampling_params", "vllm_xargs"),
    ("sampling_params", "extra_args"),
)


def request(content_type: str) -> classify.Request:
    return classify.Request("POST", "/v1/completions", (), True, None, content_type, False, "", False, ())


def as_engine(body: bytes) -> Any:
    """None where an engine answers 400. Numbers stay as they are spelled."""
    try:
        return json.loads(body, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return None


def smuggled(value: Any) -> list[tuple[str, ...]]:
    """Where an engine's KV connector would find params of the client."""
    found = []
    for place in PLACES:
        inner = value
        for key in place:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            found += [(*place, key) for key in openai.CONNECTOR_KEYS if key in inner]
    return found


def cleaned(value: dict[str, Any]) -> dict[str, Any]:
    left = json.loads(json.dumps(value))
    for *place, key in smuggled(value):
        inner = left
        for name in place:
            inner = inner[name]
        del inner[key]
    return dict(left)


def depth(text: bytes) -> int:
    """Levels of a text that an engine reads. Repeated keys count, too."""

    def levels(value: Any) -> int:
        return 1 + max(map(levels, value), default=0) if isinstance(value, list) else 0

    return levels(json.loads(text, object_pairs_hook=lambda pairs: [value for _, value in pairs]))


def check_form(body: bytes, *, urlencoded: bool) -> None:
    """A field's value as an engine would read it: JSON, in a form that passed."""
    fields = unquote_plus(body.decode("latin-1")).split("&") if urlencoded else body.decode("latin-1").split("\r\n")
    for field in fields:
        value = as_engine(field.partition("=")[2].encode() if urlencoded else field.encode("latin-1"))
        if isinstance(value, dict):
            assert not smuggled({"vllm_xargs": value}), field


def test_one_input(data: bytes) -> None:
    content_type = CONTENT_TYPES[data[0] % len(CONTENT_TYPES)] if data else ""
    text = data[1:]
    asked = request(content_type)
    try:
        body = requestbody.read(text, asked, json_depth=DEPTH)
    except RequestError as error:
        if error.status != 400:
            raise
        return
    if body is None:
        if asked.is_form:
            check_form(text, urlencoded=asked.is_urlencoded)
        else:
            assert not smuggled(as_engine(text))
        return
    client = as_engine(text)
    decode = openai.decode_body(body, None)
    value = as_engine(decode)
    if client is None:  # bad UTF-8 in a value, say, which engines refuse; unless it was in what was taken out
        assert value is None or not smuggled(value)
        return
    assert not smuggled(value)
    assert value == cleaned(client)
    assert decode == text or smuggled(client)
    levels = depth(text)
    assert levels <= DEPTH
    assert [nests_deeper(text, levels - 1), nests_deeper(text, levels)] == [True, False]
    openai.bypass_reason("/v1/completions", body)
    openai.model(body)
    openai.prompt_hash(body, 64)
    handed = as_engine(openai.decode_body(body, b'{"do_remote_prefill":true}'))
    assert handed == {**value, "kv_transfer_params": {"do_remote_prefill": True}}
    prefill = as_engine(openai.prefill_body(body, {"kv_transfer_params": b"{}"}))
    assert smuggled(prefill) == [("kv_transfer_params",)]
    assert (prefill["max_tokens"], prefill["stream"]) == ("1", False)
    assert "stream_options" not in prefill


def main() -> None:
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
