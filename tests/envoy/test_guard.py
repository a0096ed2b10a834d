"""The service is down and Envoy lets requests through: no connector params of a client reach a decoder all the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
import yaml

from extproc.bootstrap import render
from extproc.config import build
from extproc.processes import EnvoyProcess, envoy_process, free_port
from tests.support.engines import StubEngine
from tests.support.gateway import CHAT, Gateway
from tests.support.scripted_service import Handler, on_headers, serving

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

JSON = "application/json"
FORM = "multipart/form-data; boundary=x"
NAME = "kv_transfer_params"
ESCAPED = "".join(f"\\u{ord(character):04x}" for character in NAME)


class WithoutService:
    def __init__(self, engine: StubEngine, envoy: EnvoyProcess, client: httpx.AsyncClient) -> None:
        self.engine = engine
        self.envoy = envoy
        self.client = client

    async def post(self, body: bytes, content_type: str, path: str = CHAT) -> httpx.Response:
        return await self.client.post(path, content=body, headers={"content-type": content_type})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running() -> AsyncIterator[WithoutService]:
    async with StubEngine("decode") as engine:
        values = {
            "fleet": {"decode": [{"url": engine.url}]},
            "envoy": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "extproc": f"127.0.0.1:{free_port()}"},
        }
        async with envoy_process(render(build(values)), concurrency=1) as envoy:
            url = f"http://{(await envoy.listeners())['gateway']}"
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as client:
                yield WithoutService(engine, envoy, client)


@pytest.fixture
def gateway_alone(running: WithoutService) -> WithoutService:
    running.engine.requests.clear()
    return running


def part(name: str, value: bytes, *, more: bytes = b"") -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), more, value)


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--x--\r\n"


WAVE = part("file", bytes(range(256)) * 40, more=b'; filename="a.wav"')
SMUGGLED = {
    "top level": ('{"kv_transfer_params": {}}', JSON),
    "nested": ('{"vllm_xargs": {"kv_transfer_params": ""}}', JSON),
    "generate": ('{"sampling_params": {"extra_args": {"kv_transfer_params": {}}}}', JSON),
    "other params": ('{"ec_transfer_params": 0}', JSON),
    "escaped": (f'{{"{ESCAPED}": 0}}', JSON),
    "escaped in capitals": (f'{{"kv\\u005Ftransfer_param\\u0073": 0, "x": "{ESCAPED[:-1]}"}}', JSON),
    "another escape before": (f'{{"a": "\\\\\\u0022", "b\\u00e9": 1, "{ESCAPED}": 0}}', JSON),
    "half an escape before": (f'{{"\\\\u00": 1, "{ESCAPED}": 0}}', JSON),
    "repeated": (f'{{"kv_transfer_params": 0, "{NAME}": null}}', JSON),
    "no content type": (f'{{"{NAME}": 0}}', ""),
    "another content type": (f'{{"{NAME}": 0}}', "text/plain"),
    "two content types": (f'{{"{NAME}": 0}}', "audio/wav, application/json"),
    "like bytes": (f'{{"{NAME}": 0}}', "application/octet-stream+json"),
    "not a number": (f'{{"t": NaN, "{NAME}": 0}}', JSON),
    "half a pair": (f'{{"t": "\\ud800", "{NAME}": 0}}', JSON),
    "broken": (f'{{"{NAME}": 0', JSON),
}
ENCODINGS = ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


async def refused(gateway: WithoutService, body: bytes, content_type: str, path: str = CHAT) -> None:
    response = await gateway.post(body, content_type, path)
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json() == {
        "error": {
            "message": "The body may name KV transfer parameters. It cannot be looked into: the gateway's service is "
            "down.",
            "type": "gateway_error",
            "param": None,
            "code": "lua_response",
        }
    }
    assert gateway.engine.requests == []


@pytest.mark.parametrize("case", SMUGGLED)
async def test_params_in_json_are_refused(gateway_alone: WithoutService, case: str) -> None:
    text, content_type = SMUGGLED[case]
    await refused(gateway_alone, text.encode(), content_type)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", [NAME, ESCAPED])
async def test_params_in_any_encoding_that_engines_detect_are_refused(
    gateway_alone: WithoutService, encoding: str, name: str
) -> None:
    body = f'{{"prompt": "é☃", "{name}": 0}}'.encode(encoding)
    assert json.loads(body)[NAME] == 0
    await refused(gateway_alone, body, JSON)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/responses", "/v1/messages", "/invocations", "/v1/chat%2Fcompletions", "/new?x=1"]
)
async def test_params_are_refused_on_every_path(gateway_alone: WithoutService, path: str) -> None:
    await refused(gateway_alone, b'{"kv_transfer_params": {"do_remote_prefill": true}}', JSON, path)


FORMS = {
    "plain": (form(WAVE, part("vllm_xargs", b'{"kv_transfer_params": ""}')), FORM),
    "escaped": (form(WAVE, part("vllm_xargs", f'{{"{ESCAPED}": ""}}'.encode())), FORM),
    "named in code": (form(part("a", NAME.encode(), more=b"; name*=utf-8''vllm%5Fxargs")), FORM),
    "utf-7": (form(part("vllm_xargs", '{"kv_transfer_params": ""}'.encode("utf-7"))), f"{FORM}; charset=utf-7"),
    "ebcdic": (form(WAVE, part("model", b"m")), f"{FORM}; charset=cp037"),
    "a second charset": (form(WAVE), f"{FORM}; charset=utf-8; charset*=us-ascii''utf-16"),
    "urlencoded": (b"vllm_xargs=%7B%22kv%5Ftransfer%5Fparams%22%3A0%7D", "application/x-www-form-urlencoded"),
}


@pytest.mark.parametrize("case", FORMS)
async def test_params_in_forms_are_refused(gateway_alone: WithoutService, case: str) -> None:
    await refused(gateway_alone, *FORMS[case], "/v1/audio/transcriptions")


HARMLESS = {
    "chat": (b'{"messages": [{"content": "\\u00e9 \\\\u005f \xc3\xa9"}], "stream": false}', JSON),
    "almost": (b'{"transfer_params": 1, "kv_transfer": 2, "kv-transfer-params": 3}', JSON),
    "charset": (b'{"prompt": "hi"}', "application/json; charset=utf-8"),
    "utf-16": ('{"prompt": "é☃"}'.encode("utf-16"), JSON),
    "text": (b"not json", "text/plain"),
    "form": (form(WAVE, part("model", b"m")), FORM),
    "form in utf-8": (form(WAVE), 'multipart/form-data; charset="UTF-8"; boundary=x'),
    "audio": (b"kv_transfer_params", "audio/wav"),
    "bytes": (b"\\u00" * 10, "application/octet-stream"),
    "bytes and more": (b"\\u00" * 10 + b"kv_transfer_params", "Application/Octet-Stream ; a=b"),
    "nothing": (b"", JSON),
    "large": (b'{"messages": "%b"}' % (b"x" * 8_000_000), JSON),
}


@pytest.mark.parametrize("case", HARMLESS)
async def test_everything_else_passes_as_it_is(gateway_alone: WithoutService, case: str) -> None:
    body, content_type = HARMLESS[case]
    response = await gateway_alone.post(body, content_type)
    (request,) = gateway_alone.engine.requests
    assert (request.body, request.header("content-type")) == (body, content_type)
    assert response.status_code in (200, 400)  # the engine's word


async def test_requests_without_a_body_pass(gateway_alone: WithoutService) -> None:
    assert (await gateway_alone.client.get("/v1/models")).status_code == 200
    assert (await gateway_alone.client.post(CHAT)).status_code == 400  # the engine's answer


async def aborts(context: Any) -> None:
    """Once it has the whole request."""
    while (message := await context.read()) is not grpc.aio.EOF:
        if message.request_headers.end_of_stream or message.request_body.end_of_stream:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


async def aborts_at_once(context: Any) -> None:
    await context.read()
    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


async def ends(context: Any) -> None:
    """Without an answer, and in good order: Envoy then goes on even where it should not."""
    await context.read()


async def answers_headers_alone(context: Any) -> None:
    await context.read()
    await context.write(on_headers())
    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


async def says_nothing(context: Any) -> None:
    while await context.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("failing", [aborts, aborts_at_once, ends, answers_headers_alone, says_nothing])
@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
@pytest.mark.parametrize("fail_open", [True, False])
async def test_params_reach_no_decoder_whenever_and_however_the_service_fails(
    failing: Handler, mode: str, fail_open: bool
) -> None:
    async with StubEngine("decode") as engine, serving(failing) as (service, _):
        values = {
            "fleet": {"decode": [{"url": engine.url}]},
            "envoy": {
                "listen": "127.0.0.1:0",
                "admin": "127.0.0.1:0",
                "extproc": service,
                "fail_open": fail_open,
                "message_timeout_s": 0.5,
            },
        }
        bootstrap = yaml.safe_load(render(build(values)))
        for cluster in bootstrap["static_resources"]["clusters"]:
            cluster.pop("health_checks", None)
        manager = bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        modes = manager["http_filters"][0]["typed_config"]["processing_mode"]
        modes |= {"request_body_mode": mode, "request_trailer_mode": "SKIP" if mode == "BUFFERED" else "SEND"}
        async with envoy_process(yaml.safe_dump(bootstrap), concurrency=1) as envoy:
            url = f"http://{(await envoy.listeners())['gateway']}"
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=4) as client:
                statuses: list[int | None] = []
                for body in (b'{"kv_transfer_params": {}, "prompt": "a"}', b'{"prompt": "b"}'):
                    try:
                        answer = await client.post(CHAT, content=body, headers={"content-type": JSON})
                        statuses.append(answer.status_code)
                    except httpx.ReadTimeout:  # nobody has a time limit in the full-duplex mode but the service
                        statuses.append(None)
        assert statuses[0] in (None, 400, 500, 503, 504)
        # After a stream that ended in good order Envoy 1.40 goes on without the body, in the full-duplex mode.
        assert {request.body for request in engine.requests} <= {b'{"prompt": "b"}', b""}
        # That mode fails closed, whatever the configuration says.
        assert (statuses[1] == 200) == (mode == "BUFFERED" and (fail_open or failing is ends))


async def test_with_the_service_a_text_may_name_them(gateway: Gateway) -> None:
    """The guard leaves alone what the service has seen."""
    body = b'{"model":"m","messages":[{"role":"user","content":"what are kv_transfer_params?"}]}'
    assert (await gateway.post(body)).status_code == 200
    assert (await gateway.post(body, path="/v1/embeddings")).status_code == 200
    assert [request.body for request in gateway.decodes].count(body) == 1
