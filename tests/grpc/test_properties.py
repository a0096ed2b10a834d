"""Whatever a client sends, and in whatever order messages come: properties of every exchange, searched by hypothesis.

``HYPOTHESIS_PROFILE=thorough`` searches a hundred times as long.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import structlog
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from extproc.jsonobject import JsonObject
from extproc.openai import CONNECTOR_KEYS
from extproc.pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from tests.grpc.inner import BEHAVIOURS, Behaviour, End, Inner, check_replies, raise_what_fails_inside

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
searched = settings(
    max_examples=10_000 if THOROUGH else 100, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

Message = ext_proc.ProcessingRequest
Result = TypeVar("Result")
Run = Callable[[Awaitable[Result]], Result]

BUFFERED, FULL_DUPLEX = ProcessingMode.BUFFERED, ProcessingMode.FULL_DUPLEX_STREAMED
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def run() -> Iterator[Run[Any]]:
    with asyncio.Runner() as runner:
        yield runner.run  # type: ignore[misc]


@pytest.fixture(scope="module", params=["error", "decode"])
def inner(run: Run[Any], request: pytest.FixtureRequest) -> Iterator[Inner]:
    """Both policies for failed prefills."""

    async def make() -> Inner:
        return Inner.made(
            prefill={"timeout_s": 0.005, "on_failure": request.param, "fallback": {"max_concurrent": 1}},
            log={"level": "error"},
        )

    made = run(make())
    yield made
    run(made.aclose())


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """A line for each of thousands of exchanges helps nobody; what fails inside fails the test."""
    before = structlog.get_config()
    raise_what_fails_inside()
    yield
    structlog.configure(**before)


def test_a_failure_inside_would_be_seen(run: Run[Any], inner: Inner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner.service, "admit", lambda: 1 / 0)
    with pytest.raises(AssertionError, match="failed inside"):
        run(inner.drive([headers(BUFFERED)]))
    run(inner.settled())


# ---- JSON texts, in every spelling ----

_space = st.sampled_from(["", "", " ", "\n\t", "\r\n "])
_numbers = st.from_regex(r"-?(0|[1-9][0-9]{0,24})(\.[0-9]{1,4})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.sampled_from(
    ["[[", "]}", '"', "\\", "é☃😀"]
)
_words = st.sampled_from(
    [
        *("model", "prompt", "messages", "input", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("max_output_tokens", "min_tokens", "n", "best_of", "echo", "tools", "vllm_xargs", "extra_args"),
        *("sampling_params", "kv_transfer_params", "ec_transfer_params", "batch_kv_transfer_params", "a", ""),
    ]
)


@st.composite
def _spelled(draw: st.DrawFn, text: str) -> str:
    """A JSON spelling of a string: escapes where they must be, and sometimes where they may be."""
    spelled = json.dumps(text, ensure_ascii=draw(st.booleans()))
    if text.isascii() and text.isalpha() and draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(text) - 1))
        spelled = f'"{text[:at]}\\u{ord(text[at]):04x}{text[at + 1 :]}"'
    return spelled


_scalars = _numbers | st.sampled_from(["true", "false", "null"]) | _texts.flatmap(_spelled)


@st.composite
def _lists(draw: st.DrawFn, items: st.SearchStrategy[str]) -> str:
    return "[" + ",".join(draw(_space) + item + draw(_space) for item in draw(st.lists(items, max_size=3))) + "]"


@st.composite
def _objects(draw: st.DrawFn, items: st.SearchStrategy[str], keys: st.SearchStrategy[str], most: int = 4) -> str:
    pairs = [
        draw(_space) + draw(keys.flatmap(_spelled)) + draw(_space) + ":" + draw(_space) + item + draw(_space)
        for item in draw(st.lists(items, max_size=most))
    ]
    return draw(_space) + "{" + (",".join(pairs) or draw(_space)) + "}" + draw(_space)


_values = st.recursive(_scalars, lambda inner: _lists(inner) | _objects(inner, _words | _texts), max_leaves=6)
bodies = _objects(_values, _words | _texts, most=7)


def pairs(text: bytes) -> list[tuple[str, Any]]:
    """Keys and values in order; numbers as they are spelled."""
    found: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list, parse_int=str, parse_float=str)
    return found


def without_ours(members_: Sequence[tuple[str, Any]], nested: tuple[str, ...] = ()) -> dict[str, Any]:
    """What must be left of a client's members: the last of each key, and none that steers a connector."""
    left: dict[str, Any] = {}
    for key, value in members_:
        left[key] = value
    for key in CONNECTOR_KEYS:
        left.pop(key, None)
    for key, inside in (("vllm_xargs", ()), ("extra_args", ()), ("sampling_params", ("vllm_xargs", "extra_args"))):
        value = left.get(key)
        if (nested and key not in nested) or not is_object(value):
            continue
        cleaned = without_ours(value, inside or ("-",))
        if cleaned != dict(value):
            left[key] = list(cleaned.items())
    return left


def is_object(value: Any) -> bool:
    """Of a value decoded into pairs: an empty one could be either, and holds nothing."""
    return isinstance(value, list) and bool(value) and all(isinstance(pair, tuple) for pair in value)


def headers(mode: int, path: str = CHAT, *, method: str = "POST", end: bool = False, **more: str) -> Message:
    message = Message()
    message.protocol_config.request_body_mode = mode  # type: ignore[assignment]
    lines = {":method": method, ":path": path, "content-type": "application/json", **more}
    for name, value in lines.items():
        message.request_headers.headers.headers.add(key=name.replace("_", "-"), raw_value=value.encode())
    message.request_headers.end_of_stream = end
    return message


def body_message(text: bytes, *, end: bool = True) -> Message:
    return Message(request_body=ext_proc.HttpBody(body=text, end_of_stream=end))


def response() -> Message:
    message = Message()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    return message


def decode_body(replies: Sequence[ext_proc.ProcessingResponse], given: bytes, mode: int) -> bytes:
    """What the decoder gets."""
    mutations = [reply.request_body.response.body_mutation for reply in replies if reply.HasField("request_body")]
    if mode == FULL_DUPLEX:
        assert [chunk.streamed_response.end_of_stream for chunk in mutations] == [False] * (len(mutations) - 1) + [True]
        return b"".join(chunk.streamed_response.body for chunk in mutations)
    (mutation,) = mutations
    return mutation.body if mutation.WhichOneof("mutation") else given


@searched
@given(bodies, st.sampled_from([CHAT, COMPLETIONS, "/v1/embeddings"]), st.sampled_from([BUFFERED, FULL_DUPLEX]))
@example('{"max_tokens":5,"max_tokens":7}', CHAT, BUFFERED)
@example(
    '{"vllm_xargs":{"kv_transfer_params":""},"vllm_xargs":{"a":1,"kv_transfer_params":0}}', COMPLETIONS, FULL_DUPLEX
)
@example(
    '{"sampling_params":{"extra_args":{"kv_transfer_params":{}},"kv_transfer_params":[]}}', "/v1/embeddings", BUFFERED
)
def test_the_decode_body_is_the_clients_but_for_our_keys(
    run: Run[Any], inner: Inner, text: str, path: str, mode: int
) -> None:
    given_body = text.encode()
    inner.engines.prefills.clear()
    exchanges = run(inner.drive([headers(mode, path), body_message(given_body), response()]))
    run(inner.settled())
    body = decode_body([reply for _, replies in exchanges for reply in replies], given_body, mode)
    disaggregated = bool(inner.engines.prefills)
    event("disaggregated" if disaggregated else "bypassed")

    left = without_ours(pairs(given_body))
    got = pairs(body)
    if disaggregated:
        params = [value for key, value in got if key == "kv_transfer_params"]
        assert len(params) == 1
        assert dict(params[0])["do_remote_prefill"] is True
        got = [(key, value) for key, value in got if key != "kv_transfer_params"]
    elif left == dict(pairs(given_body)):
        assert body == given_body  # nothing to take out: not a byte changes
    if body != given_body:
        assert len({key for key, _ in got}) == len(got)  # each key once
    assert without_ours(got) == dict(got) == left
    client, decode = JsonObject(given_body), JsonObject(body)
    for key in left:
        if key not in ("vllm_xargs", "extra_args", "sampling_params"):
            assert decode.raw(key) == client.raw(key)
    for prefill in inner.engines.prefills:
        check_prefill(prefill, left)


LIMITS = {"max_tokens": "1", "max_completion_tokens": "1", "max_output_tokens": "1", "stream": False}
DROPPED = ("stream_options", "min_tokens", "min_completion_tokens")


def check_prefill(prefill: bytes, left: dict[str, Any]) -> None:
    got = dict(pairs(prefill))
    assert dict(got.pop("kv_transfer_params"))["do_remote_decode"] is True
    expected = {key: value for key, value in left.items() if key not in DROPPED}
    expected |= {key: LIMITS[key] for key in LIMITS if key in left or key in ("max_tokens", "stream")}
    if "input" in left:
        expected["max_output_tokens"] = "1"
    assert got == expected


# ---- any messages, in any order ----

_chat = b'{"model":"m","messages":[],"max_tokens":5}'
_body_texts = st.sampled_from(
    [_chat, b'{"prompt":["a","b"]}', b"", b"{", b'{"kv_transfer_params":', b"\xff", b"[]"]
) | (st.binary(max_size=20))
_header_messages = st.builds(
    headers,
    st.sampled_from([BUFFERED, FULL_DUPLEX, BUFFERED, FULL_DUPLEX, 0, 1, 3, 5, 99]),
    st.sampled_from([CHAT, COMPLETIONS, "/v1/models", "", "/x?y", "\u00e9"]),
    method=st.sampled_from(["POST", "POST", "GET", "CONNECT", ""]),
    end=st.booleans(),
    content_type=st.sampled_from(["application/json", "audio/wav", "multipart/form-data; charset=x", ""]),
    content_encoding=st.sampled_from(["", "", "", "gzip"]),
    x_request_id=st.sampled_from(["", "a", "b" * 300]),
)


@st.composite
def _response_headers(draw: st.DrawFn) -> Message:
    message = Message()
    for value in draw(st.lists(st.sampled_from([b"200", b"404", b"503", b"", b"x", b"\xff"]), max_size=2)):
        message.response_headers.headers.headers.add(key=":status", raw_value=value)
    served = draw(st.sampled_from(["", "10.0.1.1:8000", "10.0.1.2:8000", "x"]))
    if served:
        message.metadata_context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": served})
    return message


_others = st.sampled_from(
    [
        Message(),
        Message(request_trailers=ext_proc.HttpTrailers()),
        Message(response_trailers=ext_proc.HttpTrailers()),
        Message(response_body=ext_proc.HttpBody(body=b"data: {}\n\n")),
        Message(response_body=ext_proc.HttpBody(end_of_stream=True)),
        Message(request_body=ext_proc.HttpBody(body=b"x" * 130_000, end_of_stream=True)),
    ]
)
_body_messages = st.builds(body_message, _body_texts, end=st.booleans())
_in_order = st.tuples(_header_messages, _body_messages, _response_headers()).map(list)
_any_order = st.lists(_header_messages | _body_messages | _response_headers() | _others, max_size=7)
sequences = _in_order | _any_order | st.tuples(_in_order, _any_order).map(lambda both: both[0] + both[1])


@searched
@given(
    sequences,
    st.lists(st.sampled_from(BEHAVIOURS), max_size=3),
    st.sampled_from(["half-close", "cancel"]),
    st.integers(0, 2),
    st.none() | st.integers(0, 25),
)
def test_every_message_gets_its_reply_and_nothing_leaks(
    run: Run[Any],
    inner: Inner,
    messages: list[Message],
    behaviours: list[Behaviour],
    end: End,
    pauses: int,
    cancel_after: int | None,
) -> None:
    before = set(inner.engines.pinned)
    exchanges = run(inner.drive(messages, behaviours, end=end, pauses=pauses, cancel_after=cancel_after))
    run(inner.settled())

    complete = cancel_after is None
    check_replies(exchanges if complete else exchanges[:-1])
    # A handoff that no decoder took is released, once; of one that was taken there is nothing to release.
    statuses = {
        header.raw_value
        for message, replies in exchanges
        if message.HasField("response_headers") and replies
        for header in message.response_headers.headers.headers
    }
    pinned = inner.engines.pinned - before
    kept = pinned - inner.engines.released
    event(f"pinned {len(pinned)}, kept {len(kept)}")
    assert inner.engines.released <= inner.engines.pinned
    assert len(kept) <= 1
    assert not kept or b"200" in statuses or not complete
    accounts = inner.releases.accounts
    assert accounts.requested == accounts.ended["released"]
