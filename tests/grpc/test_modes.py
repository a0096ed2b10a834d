"""Envoy's side of the protocol: processing modes, messages out of order, the endpoint picker's metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from extproc.pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from tests.grpc.stand import MODES, Stand
from tests.support.gateway import CHAT, CHAT_BODY, until
from tests.support.scripted_envoy import Mode, ScriptedEnvoy

pytestmark = pytest.mark.asyncio(loop_scope="session")

Message = ext_proc.ProcessingRequest
Reply = ext_proc.ProcessingResponse
DESTINATION = "x-gateway-destination-endpoint"


def headers(
    *,
    body: int | None = ProcessingMode.BUFFERED,
    response: int = ProcessingMode.NONE,
    end: bool = False,
    path: str = CHAT,
) -> Message:
    """The first message. ``body`` None: an Envoy too old to name its modes."""
    message = Message()
    lines = {":method": "GET" if end else "POST", ":path": path, "content-type": "application/json"}
    for name, value in lines.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.request_headers.end_of_stream = end
    if body is not None:
        message.protocol_config.request_body_mode = body  # type: ignore[assignment]
        message.protocol_config.response_body_mode = response  # type: ignore[assignment]
    return message


def body(text: bytes = CHAT_BODY, *, end: bool = True) -> Message:
    return Message(request_body=ext_proc.HttpBody(body=text, end_of_stream=end))


def response(status: str = "200", **metadata: Any) -> Message:
    message = Message()
    message.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
    if metadata:
        message.metadata_context.filter_metadata["envoy.lb"].update(metadata)
    return message


async def replies(stand: Stand, messages: Sequence[Message]) -> list[Reply]:
    """All replies to these messages, sent without waiting, but for those that ask for more time."""
    async with stand.envoy("BUFFERED") as envoy:
        return await answered(envoy, messages)


async def answered(envoy: ScriptedEnvoy, messages: Sequence[Message]) -> list[Reply]:
    stream = envoy.raw_stream()
    for message in messages:
        await stream.send(message)
    await stream.half_close()
    found = [reply for reply in await stream.ended() if not reply.HasField("override_message_timeout")]
    assert stream.code is not None
    assert stream.code.name == "OK"
    return found


def members(found: Sequence[Reply]) -> list[str | None]:
    return [reply.WhichOneof("response") for reply in found]


def check_refused(found: Sequence[Reply], setting: str, value: str) -> None:
    """One clear answer, whatever else was sent."""
    (reply,) = found
    answer = reply.immediate_response
    assert (answer.status.code, answer.details) == (500, "extproc_unsupported_processing_mode")
    assert f"{setting} {value} " in answer.body.decode()


# ---- modes that cannot be served ----


@pytest.mark.parametrize("mode", ["NONE", "STREAMED", "BUFFERED_PARTIAL", "GRPC", "77"])
@pytest.mark.parametrize("end", [False, True])
async def test_other_request_body_modes_are_refused(
    stand: Stand, mode: str, end: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    number = int(mode) if mode.isdigit() else ProcessingMode.BodySendMode.Value(mode)
    check_refused(await replies(stand, [headers(body=number, end=end), body()]), "request_body_mode", mode)
    assert "unsupported processing mode" in capsys.readouterr().out
    assert stand.prefills == []


@pytest.mark.parametrize(("mode", "name"), [(ProcessingMode.GRPC, "GRPC"), (9, "9")])
async def test_other_response_body_modes_are_refused(stand: Stand, mode: int, name: str) -> None:
    check_refused(await replies(stand, [headers(response=mode)]), "response_body_mode", name)


async def test_observability_mode_is_refused(stand: Stand) -> None:
    """Envoy would read no reply, and the request would go on as the client sent it."""
    message = headers()
    message.observability_mode = True
    check_refused(await replies(stand, [message]), "observability_mode", "true")


@pytest.mark.parametrize("first", [body(), Message(request_trailers=ext_proc.HttpTrailers())], ids=["body", "trailers"])
async def test_requests_without_their_headers_are_refused(stand: Stand, first: Message) -> None:
    first.protocol_config.request_body_mode = ProcessingMode.BUFFERED  # type: ignore[assignment]
    check_refused(await replies(stand, [first, response()]), "request_header_mode", "SKIP")
    assert stand.prefills == []


async def test_an_envoy_too_old_to_name_its_modes_is_served_as_buffered(stand: Stand) -> None:
    found = await replies(stand, [headers(body=None), body(), response()])
    assert members(found) == ["request_headers", "request_body", "response_headers"]
    assert found[1].request_body.response.body_mutation.body
    assert len(stand.prefills) == 1


# ---- modes of the response, which cost messages and are served all the same ----


@pytest.mark.parametrize("mode", ["STREAMED", "BUFFERED", "BUFFERED_PARTIAL"])
async def test_response_bodies_that_are_shown_are_left_alone(stand: Stand, mode: str) -> None:
    chunk = Message(response_body=ext_proc.HttpBody(body=b"data: {}\n\n"))
    end = Message(response_body=ext_proc.HttpBody(end_of_stream=True))
    number = ProcessingMode.BodySendMode.Value(mode)
    found = await replies(stand, [headers(response=number), body(), response(), chunk, chunk, end])
    assert members(found) == ["request_headers", "request_body", "response_headers", *["response_body"] * 3]
    assert all(not reply.response_body.response.HasField("body_mutation") for reply in found[3:])


async def test_response_bodies_that_are_dropped_unless_sent_back_are_sent_back(stand: Stand) -> None:
    number = ProcessingMode.FULL_DUPLEX_STREAMED
    large = bytes(range(256)) * 500
    found = await replies(
        stand,
        [
            headers(response=number),
            body(),
            response(),
            Message(response_body=ext_proc.HttpBody(body=b"data: {}\n\n")),
            Message(response_body=ext_proc.HttpBody(body=large)),
            Message(response_body=ext_proc.HttpBody(end_of_stream=True)),
            Message(response_trailers=ext_proc.HttpTrailers()),
        ],
    )
    chunks = [reply.response_body.response.body_mutation.streamed_response for reply in found[3:-1]]
    assert b"".join(chunk.body for chunk in chunks) == b"data: {}\n\n" + large
    assert max(len(chunk.body) for chunk in chunks) <= 62_000
    assert [chunk.end_of_stream for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert members(found)[-1] == "response_trailers"


# ---- messages out of order ----


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_that_envoy_gives_itself_is_left_alone(stand: Stand, mode: Mode) -> None:
    """A filter in front of ours, or Envoy's own 413: the response comes where the request should have gone on."""
    number = ProcessingMode.BodySendMode.Value(mode)
    first = response("401")
    first.protocol_config.request_body_mode = number  # type: ignore[assignment]
    assert members(await replies(stand, [first])) == ["response_headers"]
    found = await replies(stand, [headers(body=number), response("413")])
    assert members(found) == ([] if mode == "FULL_DUPLEX_STREAMED" else ["request_headers"]) + ["response_headers"]
    assert stand.counts("extproc_exchanges_total")["answered_by_envoy"] >= 2
    assert stand.prefills == []


async def test_what_comes_twice_or_too_late_changes_nothing(stand: Stand) -> None:
    found = await replies(stand, [headers(), headers(), body(), body(), response(), response(), body(b"x")])
    assert members(found) == [
        *("request_headers", "request_headers", "request_body", "request_body"),
        *("response_headers", "response_headers", "request_body"),
    ]
    changing = [reply for reply in found if reply.request_body.response.HasField("body_mutation")]
    assert len(changing) == 1
    assert len(stand.prefills) == 1


async def test_headers_that_come_twice_are_not_let_go_before_their_body(stand: Stand) -> None:
    """Where the reply to them is held back, another one would have the request go on as the client sent it."""
    number = ProcessingMode.FULL_DUPLEX_STREAMED
    found = await replies(stand, [headers(body=number), headers(body=number), body(end=False), body(b"")])
    assert members(found) == ["request_headers", "request_body"]
    assert DESTINATION in str(found[0].dynamic_metadata)


async def test_an_empty_message_is_no_message(stand: Stand) -> None:
    assert members(await replies(stand, [Message(), headers(), Message(), body(), Message()])) == [
        "request_headers",
        "request_body",
    ]


async def test_after_an_answer_of_ours_there_are_no_more_replies(stand: Stand) -> None:
    found = await replies(stand, [headers(), body(b'{"a":' + b"[" * 400 + b"]" * 400 + b"}"), body(), response()])
    assert members(found) == ["request_headers", "immediate_response"]


# ---- the endpoint picker's protocol ----


def hinted(message: Message, endpoints: Any) -> Message:
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({f"{DESTINATION}-subset": endpoints})
    return message


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spelled", ["list", "text"])
async def test_a_subset_limits_the_choice(stand: Stand, mode: Mode, spelled: str) -> None:
    """Of decoders: prefillers are not in Envoy's cluster."""
    number = ProcessingMode.BodySendMode.Value(mode)
    wanted = stand.decoders[1].endpoint
    hint = [wanted, "10.9.9.9:1"] if spelled == "list" else f"{wanted}, 10.9.9.9:1"
    for _ in range(3):
        found = await replies(stand, [hinted(headers(body=number), hint), body()])
        fields = next(reply for reply in found if reply.HasField("dynamic_metadata")).dynamic_metadata.fields
        assert fields["envoy.lb"].struct_value.fields[DESTINATION].string_value == wanted
    for end in (False, True):
        found = await replies(stand, [hinted(headers(body=number, end=end), ["10.9.9.9:1"]), body()])
        assert found[-1].immediate_response.status.code == 503
    assert len(stand.prefills) == 3


@pytest.mark.parametrize("mode", MODES)
async def test_the_endpoint_that_was_served_takes_the_load_over(stand: Stand, mode: Mode) -> None:
    """Envoy turned to another decoder of the list, or to one of its own choice."""
    assert stand.server is not None
    fleet = stand.server.service.fleet
    async with stand.envoy(mode) as envoy:
        stream = envoy.raw_stream()
        await stream.send(headers(body=ProcessingMode.BodySendMode.Value(mode)))
        await stream.send(body())
        await until(lambda: any(engine.inflight for engine in fleet.engines("decode")) and len(stand.prefills) == 1)
        await stream.arrived(2)
        (picked,) = [engine for engine in fleet.engines("decode") if engine.inflight]
        (other,) = [engine for engine in fleet.engines("decode") if not engine.inflight]
        held = picked.reserved_tokens
        await stream.send(response(**{f"{DESTINATION}-served": other.endpoint}))
        await until(lambda: (picked.inflight, other.inflight) == (0, 1))
        assert (picked.reserved_tokens, other.reserved_tokens) == (0, held)
        await stream.half_close()
        await stream.ended()
    assert (other.inflight, other.reserved_tokens) == (0, 0)
    (record,) = [one for one in stand.server.service.recent.list() if one.get("served") == other.endpoint]
    assert (record["decoder"], record["status"]) == (other.name, 200)


@pytest.mark.parametrize("endpoint", ["10.9.9.9:1", "", "not an endpoint"])
async def test_a_served_endpoint_that_is_not_ours_moves_nothing(stand: Stand, endpoint: str) -> None:
    found = await replies(stand, [headers(), body(), response(**{f"{DESTINATION}-served": endpoint})])
    assert members(found)[-1] == "response_headers"


async def test_metadata_of_other_shapes_is_none(stand: Stand) -> None:
    message = hinted(headers(), 7.0)
    found = await replies(stand, [message, body(), response(**{f"{DESTINATION}-served": [1]})])
    assert members(found)[0] == "request_headers"
    assert members(found)[-1] in ("response_headers", "immediate_response")
