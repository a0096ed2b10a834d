"""What an OpenAI-style request asks for, and how each leg's body differs from the client's.

The rules follow vLLM's request validation (0.9 to 0.33); everything here is a pure function of the request.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from extproc.jsonobject import JsonObject

CHAT_COMPLETIONS: Final = "/v1/chat/completions"
KV_PARAMS: Final = "kv_transfer_params"

# By these a client could steer the engines' KV transfer: a malformed value kills an engine, a well-formed one reads
# another request's KV.
CONNECTOR_KEYS: Final = (KV_PARAMS, "ec_transfer_params", "batch_kv_transfer_params")

# What all of these have in common, as it is and with any of its characters escaped.
_NAME: Final = b"_transfer_params"
_SPELLED_NAME: Final = re.compile(b"".join(rb"(?:%c|\\u00(?i:%02x))" % (byte, byte) for byte in _NAME))

_Places = Mapping[str, "_Places"]
# Where they may stand beside the top level: vLLM takes ``vllm_xargs`` (chat, completions, responses, messages) and
# ``sampling_params.extra_args`` (/inference/v1/generate) for the arguments that its KV connector reads.
_NESTED: Final[_Places] = {"vllm_xargs": {}, "extra_args": {}, "sampling_params": {"vllm_xargs": {}, "extra_args": {}}}

# The prefill leg answers with one token: what limits length is overruled, what asks for more than that is dropped.
_PREFILL_EDITS: Final[Mapping[str, bytes | None]] = {
    "stream": b"false",
    "stream_options": None,
    "max_tokens": b"1",
    "min_tokens": None,
    "min_completion_tokens": None,
}
_LENGTH_ALIASES: Final = ("max_completion_tokens", "max_output_tokens")

_MAX_SMALL_BYTES: Final = 4096  # of flags, counts, and a model's name

_LIST_OF_PROMPTS: Final = re.compile(rb'\[[ \t\n\r]*+["\[{]')
_decode_one = msgspec.json.Decoder(tuple[msgspec.Raw]).decode  # gives up at a second one, however many there are
_LIST_OF_CHATS: Final = re.compile(rb"\[[ \t\n\r]*+\[")


def parse(body: bytes) -> JsonObject:
    """Raises BadJson (TooDeep, TooManyMembers) or NotAnObject."""
    request = JsonObject(body)
    _no_connector_members(request)  # what is nested must be readable as well, or it could not be cleaned
    return request


def model(request: JsonObject) -> str | None:
    """The ``model`` asked for, or None where it is absent or no string (the engine has its own word on that)."""
    value = _value(request, "model")
    return value if isinstance(value, str) else None


def prompt_hash(request: JsonObject, length: int) -> bytes | None:
    """A hash of the prompt's first ``length`` bytes as the client spelled them; None where there is no prompt.

    Prompts that begin alike share KV blocks. The model is part of it.
    """
    prompt = request.members.get("messages", request.members.get("prompt", request.members.get("input")))
    if prompt is None:
        return None
    name = (model(request) or "").encode()
    return hashlib.blake2b(memoryview(prompt)[:length], digest_size=16, key=name[:64]).digest()


def bypass_reason(path: str, request: JsonObject) -> str | None:
    """Why this request must not be disaggregated, as a short metric label; None where it can be.

    A prefill returns one ``kv_transfer_params`` for one sequence, and only a full prompt pass computes prompt logprobs.
    ``path`` is the route's, without a query.
    """
    if _not_one(request, "n") or _not_one(request, "best_of"):
        return "several_choices"
    if _asked_for(request, "use_beam_search"):
        return "beam_search"
    if _asked_for(request, "echo") or _given(request, "prompt_logprobs"):
        return "prompt_logprobs"
    if _given(request, "prompt_embeds"):
        return "prompt_embeds"
    if _given(request, "previous_response_id") or _asked_for(request, "background"):
        return "stored_response"  # responses are kept by the engine that made them
    if path != CHAT_COMPLETIONS and not _one_prompt(request.raw("prompt")):
        return "several_prompts"
    if (messages := request.members.get("messages")) is not None and _LIST_OF_CHATS.match(memoryview(messages)):
        return "several_prompts"  # /v1/chat/completions/batch
    return None


def prefill_body(request: JsonObject, connector_edits: Mapping[str, bytes | None]) -> bytes:
    """The prefill leg: one token, not streamed, with the connector's own members on top."""
    edits = {key: value for key, value in _PREFILL_EDITS.items() if value is not None or key in request}
    edits |= {key: b"1" for key in _LENGTH_ALIASES if key in request}
    if "input" in request:
        edits["max_output_tokens"] = b"1"  # /v1/responses knows no max_tokens
    return request.edited({**edits, **_no_connector_members(request), **connector_edits})


def decode_body(request: JsonObject, kv_transfer_params: bytes | None) -> bytes:
    """The decode leg: the client's body and the handoff's params; the client's own bytes where there are neither."""
    edits = _no_connector_members(request)
    if kv_transfer_params is not None:
        edits[KV_PARAMS] = kv_transfer_params
    return request.edited(edits) if edits else request.text


def _no_connector_members(request: JsonObject, nested: _Places = _NESTED) -> dict[str, bytes | None]:
    """Edits that take every way to a KV connector out of a client's body."""
    edits: dict[str, bytes | None] = {key: None for key in CONNECTOR_KEYS if key in request}
    for key, further in nested.items():
        raw = request.raw(key)
        if raw is None or not raw.startswith(b"{"):
            continue
        arguments = JsonObject(raw)
        if inner := _no_connector_members(arguments, further):
            edits[key] = arguments.edited(inner)
    return edits


def names_connector_params(text: bytes) -> bool:
    """Whether a body that is no JSON object to us names connector params, in any spelling that an engine may read.

    Engines read more than RFC 8259 allows (UTF-16, UTF-32, NaN, half a surrogate pair), and fields of forms as JSON.
    """
    if b"\0" in text:
        text = text.replace(b"\0", b"")  # of UTF-16 and UTF-32, this leaves ASCII
    if b"\\u00" in text:
        return _SPELLED_NAME.search(text) is not None
    return _NAME in text


def _value(request: JsonObject, key: str) -> Any:
    """A small member, decoded; ``...`` for what cannot be (a number out of range, bad UTF-8) or is not small."""
    raw = request.members.get(key)
    if raw is None:
        return None
    if memoryview(raw).nbytes > _MAX_SMALL_BYTES:
        return ...
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return ...


def _given(request: JsonObject, key: str) -> bool:
    return request.raw(key) not in (None, b"null")


def _asked_for(request: JsonObject, key: str) -> bool:
    """Whether a flag may be set. Engines coerce strings and numbers, so what is unclear counts as set."""
    return _value(request, key) not in (None, False)


def _not_one(request: JsonObject, key: str) -> bool:
    """Whether a count may be anything but 1. Engines coerce strings and floats, so what is unclear counts as more."""
    value = _value(request, key)
    if value is None or value is True:
        return False
    try:
        return float(value) != 1
    except (TypeError, ValueError, OverflowError):
        return True


def _one_prompt(raw: bytes | None) -> bool:
    """Whether a ``prompt`` is one sequence: a string, a list of token ids, or a list that holds one of these."""
    if raw is None or not _LIST_OF_PROMPTS.match(raw):
        return True
    try:
        _decode_one(raw)
    except msgspec.ValidationError:
        return False
    return True
