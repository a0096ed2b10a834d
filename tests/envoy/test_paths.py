"""Requests that are not disaggregated: without a body, on other paths; and that no message goes unanswered."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.engines import Answer, RecordedRequest
from tests.support.gateway import CHAT, COMPLETIONS, Gateway, within

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]


def as_an_engine(request: RecordedRequest) -> Answer:
    """FastAPI's words for what is not a POST of JSON on one of its paths."""
    if request.method == "OPTIONS":
        return Answer(
            405, [("allow", "POST"), ("content-type", "application/json")], b'{"detail":"Method Not Allowed"}'
        )
    if request.method == "HEAD":
        return Answer(405, [("allow", "GET")])
    if request.method == "DELETE":
        return Answer(404, [("content-type", "application/json")], b'{"detail":"Not Found"}')
    if not request.body:
        return Answer(400, [("content-type", "application/json")], b'{"object":"error","message":"no body"}')
    return Answer(200, [("content-type", "application/json"), ("x-engine", "1")], b'{"object" : "list"}')


@pytest.fixture(autouse=True)
def engines(gateway: Gateway) -> None:
    for engine in gateway.decoders:
        engine.respond = as_an_engine


COUNTED = ("streams_started", "stream_msgs_sent", "stream_msgs_received")
PROBLEMS = (
    "spurious_msgs_received",
    "failure_mode_allowed",
    "message_timeouts",
    "streams_failed",
    "rejected_header_mutations",
)


async def ext_proc_stats(gateway: Gateway) -> Counter[str]:
    stats = await gateway.envoy.stats(r"http\.gateway\.ext_proc\.")
    counted = {name.rsplit(".", 1)[1]: value for name, value in stats.items()}
    return Counter({name: counted[name] for name in (*COUNTED, *PROBLEMS)})


async def messages_since(gateway: Gateway, before: Counter[str]) -> tuple[int, int, int]:
    """(streams, messages to the service, replies), none of which was a problem to Envoy."""
    change = await ext_proc_stats(gateway) - before
    assert not {problem: change[problem] for problem in PROBLEMS if change[problem]}
    return change["streams_started"], change["stream_msgs_sent"], change["stream_msgs_received"]


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/v1/models", 200, b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'),
        ("GET", "/health", 200, b""),
        ("HEAD", "/v1/models", 405, b""),
        ("OPTIONS", CHAT, 405, b'{"detail":"Method Not Allowed"}'),
        ("DELETE", "/x", 404, b'{"detail":"Not Found"}'),
        ("POST", CHAT, 400, b'{"object":"error","message":"no body"}'),
        ("POST", COMPLETIONS, 400, b'{"object":"error","message":"no body"}'),
    ],
)
async def test_B07_B16_requests_without_a_body(
    gateway: Gateway, method: str, path: str, status: int, body: bytes
) -> None:
    before = await ext_proc_stats(gateway)
    cors = {"origin": "http://a", "access-control-request-method": "POST"} if method == "OPTIONS" else {}
    name = f"b16-{method}-{path}"
    response = await within(2, gateway.client.request(method, path, headers={"x-request-id": name, **cors}))
    assert (response.status_code, response.content) == (status, body)
    assert response.headers["x-request-id"] == name
    assert gateway.prefills == []
    record = await gateway.exchange(name)
    assert record["decision"] == "bypass"
    got = [r for engine in gateway.decoders for r in (*engine.requests, *engine.probes) if r.target == path]
    (request,) = [r for r in got if r.header("x-request-id") == record["request_id"]]
    assert (request.method, request.body) == (method, b"")
    assert request.header("origin") == cors.get("origin")
    # Request headers and response headers, one reply each.
    assert await messages_since(gateway, before) == (1, 2, 2)


async def test_B16_a_chunked_body_of_no_bytes(gateway: Gateway) -> None:
    response = await within(
        2,
        gateway.raw(
            b"POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % CHAT.encode()
        ),
    )
    assert response.startswith(b"HTTP/1.1 400 ")
    assert response.endswith(b'{"object":"error","message":"no body"}')
    assert gateway.prefills == []
    assert [request.body for request in gateway.decodes] == [b""]


@pytest.mark.parametrize("path", [f"{CHAT}?x=1", f"{COMPLETIONS}?api-version=1&a=%2F%20?&b="])
async def test_B30_a_query_stays_on_both_legs(gateway: Gateway, path: str) -> None:
    body = b'{"model":"m","messages":[],"prompt":"hi"}'
    response = await gateway.raw(
        b"POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
    )
    assert response.startswith(b"HTTP/1.1 200 ")
    (prefill,), (decode,) = gateway.prefills, gateway.decodes
    assert (prefill.target, decode.target) == (path, path)
    assert "kv_transfer_params" in decode.json()


@pytest.mark.parametrize(
    "path",
    [
        f"{CHAT}/",
        "//v1/completions",
        f"{CHAT}/render",
        "/chat/completions",
        "/V1/completions",
        "/v1/%63ompletions",
        "/v1/embeddings",
        "/tokenize",
        "/v1/rerank",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
    ],
)
async def test_B07_B30_other_paths_pass_untouched(gateway: Gateway, path: str) -> None:
    before = gateway.counts("extproc_bypass_total").get("path", 0)
    messages = await ext_proc_stats(gateway)
    body = b' {"model": "m",  "input": "\xc3\xa9", "n": 9007199254740993}\n'
    answer = Answer(422, [("content-type", "application/json"), ("x-engine", "2")], b'{"detail":[ ]}')
    for engine in gateway.decoders:
        engine.respond = lambda _: answer
    response = await gateway.raw(
        b"POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"X-Request-Id: b30\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
    )
    assert response.startswith(b"HTTP/1.1 422 ")
    assert b"x-engine: 2\r\n" in response
    assert response.endswith(b'\r\n\r\n{"detail":[ ]}')
    assert gateway.prefills == []
    (request,) = gateway.decodes
    assert (request.target, request.body, request.header("content-length")) == (path, body, str(len(body)))
    assert gateway.counts("extproc_bypass_total")["path"] == before + 1
    # Request headers, request body and response headers, one reply each.
    assert await messages_since(gateway, messages) == (1, 3, 3)


@pytest.mark.parametrize("body", [b"[1,2]", b'"text"', b"not json", b'{"model":"m"', b"\xff\xfe", b"{}"])
async def test_bodies_for_the_engine_to_judge(gateway: Gateway, body: bytes) -> None:
    """What we cannot read, an engine refuses in its own words; it gets each byte of it."""
    answer = Answer(400, [("content-type", "application/json")], b'{"error":{"message":"bad"}}')
    for engine in gateway.decoders:
        engine.respond = lambda _: answer
    for prefiller in gateway.prefillers:
        prefiller.respond = lambda _: answer
    response = await gateway.post(body)
    assert (response.status_code, response.content) == (400, answer.body)
    if body != b"{}":  # an object is a prefiller's to refuse
        assert gateway.prefills == []
        assert [request.body for request in gateway.decodes] == [body]


async def test_an_upload_passes_byte_for_byte(gateway: Gateway) -> None:
    body = b"--x\r\ncontent-disposition: form-data; name=file\r\n\r\n" + bytes(range(256)) * 400 + b"\r\n--x--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=x", "authorization": "Bearer k1"}
    response = await gateway.post(body, path="/v1/audio/transcriptions", headers=headers)
    assert response.status_code == 200
    (request,) = gateway.decodes
    assert request.body == body
    assert request.header("content-type") == "multipart/form-data; boundary=x"
    assert request.header("authorization") == "Bearer k1"
    assert request.header("content-length") == str(len(body))
    assert gateway.prefills == []


@pytest.mark.parametrize(
    "more",
    [
        b'"n":2',
        b'"best_of":2',
        b'"use_beam_search":true',
        b'"echo":true',
        b'"prompt_logprobs":1',
        b'"prompt":["a","b"]',
    ],
)
async def test_requests_that_one_handoff_cannot_carry(gateway: Gateway, more: bytes) -> None:
    body = b'{"model":"m",' + more + b"}"
    assert (await gateway.post(body, path=COMPLETIONS)).status_code == 200
    assert gateway.prefills == []
    assert [request.body for request in gateway.decodes] == [body]
