"""``extproc probe``: the client against grpcio-testing's channel, and against a real service with simulated engines."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc
import grpc_testing
import pytest

from extproc.config import build
from extproc.errors import ConfigError, ExtprocError
from extproc.pb.envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from extproc.pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.probe import ProbeError, ProbeRequest, TlsFiles, Transcript, changes, connect, play, why_unreachable
from extproc.processes import free_port
from extproc.server import Server
from extproc.sim.config import SimConfig
from extproc.sim.server import SimEngine
from tests.grpc.stand import Stand
from tests.support.certificates import issued
from tests.support.engines import Answer, RecordedRequest, answer_prefill
from tests.support.gateway import until

SERVICE: Final = ext_proc.DESCRIPTOR.services_by_name["ExternalProcessor"]
PROCESS: Final = SERVICE.methods_by_name["Process"]

BODY: Final = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}'
CHAT: Final = ProbeRequest("/v1/chat/completions", BODY)


# ── against a scripted service ────────────────────────────────────────────────────────────────────────────────────────


class Scripted:
    """Plays a request in a thread, while the test is the service."""

    def __init__(self, pool: ThreadPoolExecutor, request: ProbeRequest) -> None:
        channel = grpc_testing.channel([SERVICE], grpc_testing.strict_real_time())
        self._playing: Future[Transcript] = pool.submit(play, channel, request, timeout_s=20)
        _, self.rpc = channel.take_stream_stream(PROCESS)

    def take(self) -> ext_proc.ProcessingRequest:
        message: ext_proc.ProcessingRequest = self.rpc.take_request()
        return message

    def answer(self, **member: Any) -> None:
        self.rpc.send_response(ext_proc.ProcessingResponse(**member))

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, details: str = "") -> Transcript:
        self.rpc.terminate((), code, details)
        return self._playing.result(20)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def _mutation(
    headers: dict[str, bytes] | None = None, remove: tuple[str, ...] = (), body: bytes | None = None
) -> ext_proc.CommonResponse:
    common = ext_proc.CommonResponse()
    for name, value in (headers or {}).items():
        option = HeaderValueOption(header=HeaderValue(key=name, raw_value=value))
        common.header_mutation.set_headers.append(option)
    common.header_mutation.remove_headers.extend(remove)
    if body is not None:
        common.body_mutation.body = body
    return common


def test_a_request_is_sent_as_envoy_sends_it(pool: ThreadPoolExecutor) -> None:
    request = ProbeRequest("/v1/completions?a=b", b'{"prompt": "hi"}', headers={"X-Request-Id": "mine"})
    service = Scripted(pool, request)
    first = service.take()
    assert first.WhichOneof("request") == "request_headers"
    assert first.protocol_config.request_body_mode == ProcessingMode.BUFFERED
    assert first.protocol_config.response_body_mode == ProcessingMode.NONE
    assert not first.request_headers.end_of_stream
    headers = [(header.key, header.raw_value, header.value) for header in first.request_headers.headers.headers]
    assert headers == [
        (":method", b"POST", ""),
        (":path", b"/v1/completions?a=b", ""),
        (":scheme", b"http", ""),
        (":authority", b"probe", ""),
        ("content-type", b"application/json", ""),
        ("content-length", b"16", ""),
        ("x-request-id", b"mine", ""),
    ]
    service.answer(request_headers=ext_proc.HeadersResponse())
    second = service.take()
    assert second.WhichOneof("request") == "request_body"
    assert (second.request_body.body, second.request_body.end_of_stream) == (b'{"prompt": "hi"}', True)
    assert not second.HasField("protocol_config")
    service.answer(request_body=ext_proc.BodyResponse())
    service.rpc.requests_closed()  # and there it ends: no response ever comes
    assert service.end() == Transcript()


def test_all_changes_of_both_replies_are_told(pool: ThreadPoolExecutor) -> None:
    service = Scripted(pool, CHAT)
    service.take()
    service.answer(request_headers=ext_proc.HeadersResponse(response=_mutation(remove=("x-extproc-a",))))
    service.take()
    more_time = ext_proc.ProcessingResponse()
    more_time.override_message_timeout.FromMilliseconds(130_500)
    service.rpc.send_response(more_time)
    reply = ext_proc.ProcessingResponse(
        request_body=ext_proc.BodyResponse(response=_mutation({"x-request-id": b"ours", "x-odd": b"\xff"}, body=b"{}"))
    )
    reply.dynamic_metadata["envoy.lb"] = {"x-gateway-destination-endpoint": "10.0.0.8:8000"}
    reply.dynamic_metadata["extproc"] = {"ticket": "abc"}
    service.rpc.send_response(reply)
    assert service.end() == Transcript(
        set_headers={"x-request-id": "ours", "x-odd": "ÿ"},
        removed_headers=["x-extproc-a"],
        body=b"{}",
        metadata={"envoy.lb": {"x-gateway-destination-endpoint": "10.0.0.8:8000"}, "extproc": {"ticket": "abc"}},
        more_time_s=130.5,
    )


@pytest.mark.parametrize("at", ["request_headers", "request_body"])
def test_an_answer_of_the_services_own_ends_the_request(pool: ThreadPoolExecutor, at: str) -> None:
    service = Scripted(pool, CHAT)
    service.take()
    if at == "request_body":
        service.answer(request_headers=ext_proc.HeadersResponse())
        service.take()
    refusal = ext_proc.ImmediateResponse(body=b'{"error": {}}', details="extproc_overloaded")
    refusal.status.code = 503  # type: ignore[assignment]
    service.answer(immediate_response=refusal)
    service.rpc.requests_closed()
    assert service.end() == Transcript(
        immediate_status=503, immediate_body=b'{"error": {}}', details="extproc_overloaded"
    )


def test_a_body_that_the_service_does_not_want_is_kept(pool: ThreadPoolExecutor) -> None:
    service = Scripted(pool, ProbeRequest("/v1/audio", b"\x00"))
    service.take()
    service.answer(
        request_headers=ext_proc.HeadersResponse(),
        mode_override=ProcessingMode(request_body_mode=ProcessingMode.NONE),
    )
    service.rpc.requests_closed()
    assert service.end() == Transcript(wants_body=False)


def test_a_request_without_a_body_is_one_message(pool: ThreadPoolExecutor) -> None:
    service = Scripted(pool, ProbeRequest("/v1/models", b"", "GET"))
    assert service.take().request_headers.end_of_stream
    service.answer(request_headers=ext_proc.HeadersResponse())
    service.rpc.requests_closed()
    assert service.end() == Transcript()


def test_a_stream_that_ends_without_an_answer(pool: ThreadPoolExecutor) -> None:
    service = Scripted(pool, CHAT)
    service.take()
    with pytest.raises(ProbeError, match=r"^the service ended the stream without answering$") as fault:
        service.end()
    assert fault.value.code is None
    assert isinstance(fault.value, ExtprocError)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.UNAVAILABLE, "the service cannot be reached: UNAVAILABLE: nobody there"),
        (grpc.StatusCode.INTERNAL, "the service failed: INTERNAL: nobody there"),
        (grpc.StatusCode.UNIMPLEMENTED, "the service failed: UNIMPLEMENTED: nobody there"),
    ],
)
def test_a_stream_that_fails(pool: ThreadPoolExecutor, code: grpc.StatusCode, text: str) -> None:
    service = Scripted(pool, CHAT)
    service.take()
    with pytest.raises(ProbeError) as fault:
        service.end(code, "nobody there")
    assert (str(fault.value), fault.value.code) == (text, code)


def test_a_failure_after_the_answers_is_none_of_ours(pool: ThreadPoolExecutor) -> None:
    service = Scripted(pool, CHAT)
    service.take()
    service.answer(request_headers=ext_proc.HeadersResponse())
    service.take()
    service.answer(request_body=ext_proc.BodyResponse())
    service.rpc.requests_closed()
    assert service.end(grpc.StatusCode.INTERNAL) == Transcript()


def test_an_empty_reply_breaks_the_protocol(pool: ThreadPoolExecutor) -> None:
    service = Scripted(pool, CHAT)
    service.take()
    service.rpc.send_response(ext_proc.ProcessingResponse())
    with pytest.raises(ProbeError, match=r"^the service sent an empty reply$"):
        service.end()


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"messages": [],  "n": 9007199254740993}', ("POST", "/v1/chat/completions", {}, None)),
        ('{"prompt": "hi"}', ("POST", "/v1/completions", {}, None)),
        ('{"path": "/v1/models", "method": "GET"}', ("GET", "/v1/models", {}, b"")),
        ('{"path": "/x?y", "body": {"a": [1]}}', ("POST", "/x?y", {}, b'{"a": [1]}')),
        ('{"path": "/x", "body": "as it is"}', ("POST", "/x", {}, b"as it is")),
        ('{"path": "/x", "headers": {"A": "b"}, "body": []}', ("POST", "/x", {"A": "b"}, b"[]")),
    ],
)
def test_requests_are_read_from_files(tmp_path: Path, text: str, expected: tuple[Any, ...]) -> None:
    file = tmp_path / "request.json"
    file.write_text(text)
    request = ProbeRequest.read(file)
    body = text.encode() if expected[3] is None else expected[3]  # a body by itself stays byte for byte
    assert (request.method, request.path, request.headers, request.body) == (*expected[:3], body)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        ("[]", "expected a JSON object"),
        ('{"path": 1}', "Expected `str`, got `int` - at `$.path`"),
        ('{"path": "v1"}', "Expected `str` matching regex '^/' - at `$.path`"),
        ('{"path": "/x", "header": {}}', "Object contains unknown field `header`"),
        ('{"path": "/x", "headers": ["a"]}', "Expected `object`, got `array` - at `$.headers`"),
        ('{"path": "/x", "body": "\\ud800"}', "no text: surrogates not allowed"),
        ('{"path": "/x", "headers": {"a": "\\ud800"}}', "no text: surrogates not allowed"),
        ('{"path": "/x", "headers": {"a": 1}}', "Expected `str`, got `int` - at `$.headers[...]`"),
    ],
)
def test_files_that_hold_no_request(tmp_path: Path, text: str | None, problem: str) -> None:
    file = tmp_path / "request.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as fault:
        ProbeRequest.read(file)
    assert str(fault.value).startswith(f"{file}: {problem}")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (b'{"a": 1, "b": [1,2]}', b'{"b":[1, 2],"a":1}', []),
        (b'{"a": 1}', b'{"a": 2}', [("a", "1", "2")]),
        (b'{"a": 1}', b"{}", [("a", "1", "")]),
        (b'{"a": 1}', b'{"a": 1, "kv": {"x": null}}', [("kv", "", '{"x": null}')]),
        (
            b'{"z": 0, "a": 1}',
            b'{"n": 1, "z": "0", "a": null}',
            [("z", "0", '"0"'), ("a", "1", "null"), ("n", "", "1")],
        ),
        (b"no JSON", b'{"a": 1}', [("a", "", "1")]),
        (b"[1]", b"[2]", []),
    ],
)
def test_changes_of_a_body(before: bytes, after: bytes, expected: list[tuple[str, str, str]]) -> None:
    assert changes(before, after) == expected


@pytest.mark.parametrize("target", ["localhost", "http://localhost:9002", "localhost:port", "::1:9002", ""])
def test_a_target_that_is_none(target: str) -> None:
    with pytest.raises(ConfigError, match="expected host:port"):
        connect(target)


def test_tls_files_are_checked(tmp_path: Path) -> None:
    files = issued(tmp_path)
    TlsFiles(files.ca, files.certificate, files.key).credentials()
    with pytest.raises(ConfigError, match=r"^--certificate and --key belong together$"):
        TlsFiles(files.ca, files.certificate).credentials()
    with pytest.raises(ConfigError, match=rf"^--ca: {files.key} holds no PEM certificates$"):
        TlsFiles(files.key).credentials()
    with pytest.raises(ConfigError, match=r"^--certificate, --key: .* are no PEM certificate and its private key"):
        TlsFiles(files.ca, files.certificate, files.ca).credentials()
    with pytest.raises(ConfigError, match=r"absent\.pem: cannot be read: No such file or directory$"):
        TlsFiles(tmp_path / "absent.pem").credentials()


# ── against a real service ────────────────────────────────────────────────────────────────────────────────────────────


async def _probed(address: str, request: ProbeRequest, tls: TlsFiles | None = None) -> Transcript:
    def run() -> Transcript:
        with connect(address, tls) as channel:
            return play(channel, request, timeout_s=30)

    return await asyncio.to_thread(run)


@pytest.mark.parametrize("connector", ["nixl", "mooncake-ascend"])
async def test_a_probe_of_a_real_service_leaves_nothing_pinned(connector: Any) -> None:
    async with (
        SimEngine(SimConfig(role="prefill", connector=connector, record=True, prefill_us_per_token=1e5)) as prefiller,
        SimEngine(SimConfig(role="decode", connector=connector, record=True)) as decoder,
    ):
        fleet = {
            "connector": connector,
            "prefill": [{"url": prefiller.url}],
            "decode": [{"url": decoder.url}],
        }
        listen = {"listen": "127.0.0.1:0"}
        values = {"fleet": fleet, "grpc": listen, "admin": listen, "life": {"notice_s": 0, "drain_s": 5}}
        async with Server(build(values)) as server:
            request = ProbeRequest("/v1/completions", b'{"model": "tiny", "prompt": "hi", "max_tokens": 7}')
            transcript = await _probed(f"127.0.0.1:{server.grpc_port}", request)
            assert transcript.immediate_status is None
            (prefill,) = prefiller.requests
            assert transcript.set_headers["x-request-id"] == prefill.request_id
            assert transcript.metadata["envoy.lb"] == {
                "x-gateway-destination-endpoint": decoder.url.removeprefix("http://")
            }
            assert len(transcript.metadata["extproc"]["ticket"]) > 100
            assert transcript.body is not None
            ((key, before, after),) = changes(request.body, transcript.body)
            assert (key, before) == ("kv_transfer_params", "")
            assert json.loads(after)["remote_request_id"].startswith(f"cmpl-{prefill.request_id}-")
            assert transcript.more_time_s == server.config.prefill.budget_s + 10

            await prefiller.until(lambda: not prefiller.pinned)
            assert prefiller.state()["blocks"]["pinned"] == 0
            await until(lambda: server.releases.accounts.ended["released"] == 1)
            # Nobody decoded: that would have been the dry run's end.
            assert [record.outcome for record in decoder.requests if record.outcome == "completed"] == []


async def test_a_probe_over_mtls(tmp_path: Path) -> None:
    service, envoy = issued(tmp_path / "service"), issued(tmp_path / "envoy", "envoy.internal")
    tls = {"certificate": str(service.certificate), "key": str(service.key), "client_ca": str(envoy.ca)}
    async with Stand.standing({"grpc": {"listen": "127.0.0.1:0", "tls": tls}}, prefill=1, decode=1) as stand:
        transcript = await _probed(stand.grpc_address, CHAT, TlsFiles(service.ca, envoy.certificate, envoy.key))
        assert transcript.body is not None
        for files in (None, TlsFiles(service.ca)):
            with pytest.raises(ProbeError, match=r"^the service cannot be reached: UNAVAILABLE: ") as fault:
                await _probed(stand.grpc_address, CHAT, files)
            assert fault.value.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("mtls", [False, True])
async def test_why_a_service_with_tls_cannot_be_reached(tmp_path: Path, mtls: bool) -> None:
    """gRPC says no more than "Socket closed" where the one side speaks TLS and the other does not."""
    service, other = issued(tmp_path / "service"), issued(tmp_path / "other", "other.internal")
    tls = {"certificate": str(service.certificate), "key": str(service.key)}
    if mtls:
        tls["client_ca"] = str(other.ca)
    ours = "--certificate and --key, of an authority that its `grpc.tls.client_ca` trusts"
    async with Stand.standing({"grpc": {"listen": "127.0.0.1:0", "tls": tls}}, prefill=1, decode=1) as stand:

        async def why(files: TlsFiles | None) -> str:
            return await asyncio.to_thread(why_unreachable, stand.grpc_address, files)

        ca = "It speaks TLS: name the CA of its certificate with --ca"
        assert await why(None) == (f"{ca}, and {ours}." if mtls else f"{ca}.")
        if mtls:
            assert await why(TlsFiles(service.ca)) == f"It wants a client certificate: {ours}."
            wrong = TlsFiles(service.ca, service.certificate, service.key)
            assert await why(wrong) == f"It wants another client certificate: {ours}."
        else:
            assert await why(TlsFiles(other.ca)) == (
                f"It speaks TLS: is {other.ca} the CA of its certificate, "
                "and is that made out to the name you called it by?"
            )


async def test_why_a_service_without_tls_cannot_be_reached(tmp_path: Path) -> None:
    async with Stand.standing(prefill=1, decode=1) as stand:
        why = await asyncio.to_thread(why_unreachable, stand.grpc_address, TlsFiles(issued(tmp_path).ca))
        assert why == "It does not speak TLS: leave out --ca."
        assert await asyncio.to_thread(why_unreachable, stand.grpc_address, None) == ""
    nobody = f"127.0.0.1:{free_port()}"
    assert why_unreachable(nobody, None) == (
        f"Nobody answers at {nobody} (Connection refused): is `extproc serve` running there?"
    )


async def _command(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "extproc", "probe", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


def slowly(request: RecordedRequest) -> Answer:
    answer = answer_prefill(request)
    answer.delay_s = 0.3
    return answer


async def test_on_the_command_line(tmp_path: Path) -> None:
    """What it prints is others' text: nothing in it is taken for markup."""
    pd, bypassed, refused = (tmp_path / name for name in ("pd.json", "bypassed.json", "refused.json"))
    pd.write_text('{"model": "m", "prompt": "[red]hi[/nothing]", "kv_transfer_params": {"a": "[bold]"}}')
    bypassed.write_text('{"path": "/v1/models", "method": "GET"}')
    refused.write_text('{"path": "/v1/completions", "headers": {"content-encoding": "x[/]"}, "body": "{}"}')
    async with Stand.standing(prefill=1, decode=1) as stand:
        stand.prefillers[0].respond = slowly
        files = map(str, (pd, bypassed, refused))
        status, output, errors = await _command("--target", stand.grpc_address, *files)
        (prefill,) = stand.prefills
        await until(lambda: bool(stand.releases) and not stand.counts("extproc_handoffs_open"))
    assert (status, errors) == (0, "")
    endpoint, request_id = stand.decoders[0].endpoint, prefill.header("x-request-id")
    lines = output.splitlines()
    parts = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    assert [lines[number] for number in parts] == [
        f"POST /v1/completions ({pd.stat().st_size} bytes)",
        "GET /v1/models (0 bytes)",
        "POST /v1/completions (2 bytes)",
    ]
    assert lines[1] == "  asks Envoy for    140 s"
    assert f"  sets header       x-request-id: {request_id}" in lines[: parts[1]]
    assert f"  dynamic metadata  envoy.lb / x-gateway-destination-endpoint = {endpoint}" in lines[: parts[1]]
    assert lines[parts[1] - 1].startswith(
        '  body              kv_transfer_params: {"a": "[bold]"} → {"do_remote_prefill"'
    )
    assert lines[parts[2] - 1] == "  body              unchanged"
    assert lines[parts[2] + 1] == "  answers by itself 415 (extproc_unsupported_content_encoding)"
    assert json.loads(lines[parts[2] + 2])["error"]["code"] == "unsupported_content_encoding"


async def test_mistakes_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text('{"prompt": "hi"}')
    nobody = f"127.0.0.1:{free_port()}"
    status, output, errors = await _command("--target", nobody, str(file))
    assert (status, errors.startswith("the service cannot be reached: UNAVAILABLE: ")) == (1, True)
    assert errors.splitlines()[-1].startswith(f"Nobody answers at {nobody} (Connection refused): ")
    status, output, errors = await _command(str(tmp_path / "absent.json"))
    assert (status, output) == (2, "")
    assert errors == f"{tmp_path}/absent.json: cannot be read: No such file or directory\n"
    status, output, errors = await _command(str(file), "--key", str(file))
    assert (status, output, errors) == (2, "", "--certificate and --key need --ca\n")
