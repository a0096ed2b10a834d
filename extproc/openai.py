"""What an OpenAI-style request asks for, and how each leg's body differs from the client's.

The rules follow vLLM's request validation (0.9 to 0.33); everything here is a pure function of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from extproc.jsonobject import BadJson, JsonObject, NotAnObject

COMPLETIONS: Final = "/v1/completions"
KV_PARAMS: Final = "kv_transfer_params"

# Where a client could hand parameters to a KV connector: the first as vLLM's own field, the others merged by vLLM
# into the same sampling arguments. A malformed value kills a decoder, a well-formed one reads another request's KV.
CONNECTOR_KEYS: Final = (KV_PARAMS, "ec_transfer_params", "batch_kv_transfer_params")
_NESTED_ARGUMENTS: Final = ("vllm_xargs", "extra_args", "sampling_params")

# The prefill leg answers with one token: what limits length is overruled, what asks for more than that is dropped.
_PREFILL_EDITS: Final[Mapping[str, bytes | None]] = {
    "stream": b"false",
    "stream_options": None,
    "max_tokens": b"1",
    "min_tokens": None,
    "min_completion_tokens": None,
}
_LENGTH_ALIASES: Final = ("max_completion_tokens", "max_output_tokens")


def parse(body: bytes) -> JsonObject:
    """Raises BadJson (TooDeep) or NotAnObject."""
    return JsonObject(body)


def model(request: JsonObject) -> str | None:
    """The ``model`` asked for, or None where it is absent or no string (the engine has its own word on that)."""
    value = _value(request, "model")
    return value if isinstance(value, str) else None


def bypass_reason(path: str, request: JsonObject) -> str | None:
    """Why this request must not be disaggregated, as a short metric label; None where it can be.

    A prefill returns one ``kv_transfer_params`` for one sequence, and only a full prompt pass computes prompt logprobs.
    """
    if _truthy_int(request, "n") or _truthy_int(request, "best_of"):
        return "several_choices"
    if _value(request, "use_beam_search") not in (None, False):
        return "beam_search"
    if _value(request, "echo") not in (None, False) or _value(request, "prompt_logprobs") is not None:
        return "prompt_logprobs"
    if request.raw("prompt_embeds") not in (None, b"null"):
        return "prompt_embeds"
    if path == COMPLETIONS and not _one_prompt(request.raw("prompt")):
        return "several_prompts"
    return None


def prefill_body(request: JsonObject, connector_edits: Mapping[str, bytes | None]) -> bytes:
    """The prefill leg: one token, not streamed, with the connector's own members on top."""
    edits = {key: value for key, value in _PREFILL_EDITS.items() if value is not None or key in request}
    edits |= {key: b"1" for key in _LENGTH_ALIASES if key in request}
    return request.edited({**edits, **_no_connector_members(request), **connector_edits})


def decode_body(request: JsonObject, kv_transfer_params: bytes | None) -> bytes:
    """The decode leg: the client's body and the handoff's params; the client's own bytes where there are neither."""
    edits = _no_connector_members(request)
    if kv_transfer_params is not None:
        edits[KV_PARAMS] = kv_transfer_params
    return request.edited(edits) if edits else request.text


def _no_connector_members(request: JsonObject) -> dict[str, bytes | None]:
    """Edits that take every way to a KV connector out of a client's body."""
    edits: dict[str, bytes | None] = {key: None for key in CONNECTOR_KEYS if key in request}
    for key in _NESTED_ARGUMENTS:
        if (raw := request.raw(key)) is not None:
            cleaned = _without_connector_keys(raw)
            if cleaned != raw:
                edits[key] = cleaned
    return edits


def _without_connector_keys(raw: bytes) -> bytes:
    if not raw.startswith(b"{"):
        return raw
    try:
        nested = JsonObject(raw)
    except (BadJson, NotAnObject):  # pragma: no cover (the enclosing text has been parsed)
        return raw
    edits = _no_connector_members(nested)
    return nested.edited(edits) if edits else raw


def smuggles_connector_keys(value: Any) -> bool:
    """Whether a body that only Python's json module accepts (NaN, a BOM, UTF-16) carries params for a connector."""
    if not isinstance(value, dict):
        return False
    return any(key in value for key in CONNECTOR_KEYS) or any(
        smuggles_connector_keys(value.get(key)) for key in _NESTED_ARGUMENTS
    )


def _value(request: JsonObject, key: str) -> Any:
    """A small member, decoded; an object of no type for what cannot be (too big a number, bad UTF-8)."""
    raw = request.members.get(key)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ...


def _truthy_int(request: JsonObject, key: str) -> bool:
    """Whether a count is anything but 1. Engines coerce strings and floats, so what is unclear counts as more."""
    value = _value(request, key)
    if value is None or value is True:
        return False
    try:
        return float(value) != 1
    except (TypeError, ValueError):
        return True


def _one_prompt(raw: bytes | None) -> bool:
    """Whether a completions ``prompt`` is one sequence: a string, one string in a list, or one list of token ids."""
    if raw is None or not raw.startswith(b"["):
        return True
    try:
        items = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except msgspec.MsgspecError:  # pragma: no cover (the enclosing text has been parsed)
        return False
    if len(items) <= 1:
        return True
    return all(bytes(item)[:1] not in (b'"', b"[", b"{") for item in (items[0], items[-1]))
