"""The demo's requests: what each shows, and what must be true of it."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from extproc.demo.stack import DemoEngine, Stack

_QUESTION = "What is the difference between prefill and decode when a language model answers? " * 6
# As long a prompt as the engines take.
_LONG = {"sim": "word " * 1500, "vllm": "word " * 480}
_FREED_WITHIN_S = 5.0
_TRIES = 8


class ScenarioFailed(Exception):
    """The gateway did not do what the scenario is there to show. The text says what came instead."""


@dataclass
class Shown:
    """What happened: the service's record of the request, and one line on why it is as it should be."""

    title: str
    record: dict[str, Any]
    verdict: str
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Scenario:
    title: str
    run: Callable[[Stack, httpx.AsyncClient], Awaitable[Shown]]
    simulated_only: bool = False


def _complete(record: dict[str, Any]) -> bool:
    """Both have reported: the exchange itself, and Envoy's access log."""
    return "decision" in record and "outcome" in record


def _id() -> str:
    return f"demo-{uuid.uuid4().hex[:12]}"


def _chat(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0, **more}


def _text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _text_of_events(body: str) -> tuple[str, dict[str, Any] | None]:
    """The text of an SSE answer, and its usage where one was sent. Raises ScenarioFailed if it is not complete."""
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise ScenarioFailed("the stream ended before [DONE]")
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return text, next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)


async def _post(
    client: httpx.AsyncClient, url: str, path: str, body: dict[str, Any], request_id: str
) -> httpx.Response:
    response = await client.post(f"{url}{path}", json=body, headers={"x-request-id": request_id})
    if response.status_code != 200:
        raise ScenarioFailed(f"{path} answered {response.status_code}: {response.text[:200]}")
    return response


async def _compare(
    stack: Stack, client: httpx.AsyncClient, path: str, body: dict[str, Any], title: str, notes: list[str] | None = None
) -> Shown:
    """Through the gateway and, alone, on one engine: the answers must be the same."""
    request_id = _id()
    response = await _post(client, stack.url, path, body, request_id)
    plain_body = {key: value for key, value in body.items() if not key.startswith("stream")}
    decoder = next(engine for engine in stack.engines if engine.role == "decode")
    plain = _text_of((await _post(client, decoder.url, path, plain_body, _id())).json())
    if body.get("stream"):
        text, usage = _text_of_events(response.text)
        if usage is None:
            raise ScenarioFailed("the stream carried no usage")
    else:
        text = _text_of(response.json())
    if text != plain:
        raise ScenarioFailed(f"the answer differs from a plain run: {text!r} instead of {plain!r}")
    record = await stack.exchange(request_id, _complete)
    if record["decision"] != "disaggregated":
        raise ScenarioFailed(f"the request was not disaggregated but {record['decision']}")
    return Shown(title, record, "same text as a plain run on one engine", notes or [])


async def chat(stack: Stack, client: httpx.AsyncClient) -> Shown:
    return await _compare(stack, client, "/v1/chat/completions", _chat(_QUESTION), "chat completion")


async def streamed(stack: Stack, client: httpx.AsyncClient) -> Shown:
    body = _chat(_QUESTION + "Be quick.", stream=True, stream_options={"include_usage": True})
    return await _compare(stack, client, "/v1/chat/completions", body, "streamed chat, with usage")


async def token_ids(stack: Stack, client: httpx.AsyncClient) -> Shown:
    body = {"model": "tiny", "prompt": [7 + i % 200 for i in range(180)], "max_tokens": 24, "temperature": 0}
    return await _compare(stack, client, "/v1/completions", body, "completion of token ids")


async def failing_prefiller(stack: Stack, client: httpx.AsyncClient) -> Shown:
    """One prefiller answers 500: the leg moves to the other, the client notices nothing."""
    broken = stack.named("prefill-1")
    await stack.fail(broken, "status", status=500, leg="prefill")
    try:
        for number in range(_TRIES):  # load decides which request meets the broken one
            body = _chat(f"{_QUESTION} Attempt {number}.")
            shown = await _compare(stack, client, "/v1/chat/completions", body, "prefill-1 answers 500")
            if reasons := shown.record.get("failed_attempts"):
                shown.verdict = f"moved to {shown.record['prefiller']} after {', '.join(reasons)}; same text"
                return shown
    finally:
        await client.delete(f"{broken.control_url}/sim/fail")
    raise ScenarioFailed("no request met the failing prefiller")


async def refusing_decoder(stack: Stack, client: httpx.AsyncClient) -> Shown:
    """One decoder is gone: Envoy takes the next of the list, with the same KV and without a second prefill."""
    gone = stack.named("decode-1")
    await stack.fail(gone, "refuse")
    try:
        for number in range(_TRIES):
            request_id = _id()
            body = _chat(f"{_QUESTION} Decoder {number}.")
            await _post(client, stack.url, "/v1/chat/completions", body, request_id)
            record = await stack.exchange(request_id, _complete)
            if record["decoder"] == gone.name:
                other = stack.named("decode-2").url.removeprefix("http://")
                if record["upstream"] != other:
                    raise ScenarioFailed(f"Envoy used {record['upstream']}, not {other}")
                attempts = record["upstream_attempts"]
                verdict = f"Envoy went on to decode-2 (attempt {attempts}), one prefill"
                return Shown("decode-1 refuses connections", record, verdict)
    finally:
        await client.delete(f"{gone.control_url}/sim/fail")
    raise ScenarioFailed("no request was sent to the refusing decoder")


async def hang_up(stack: Stack, client: httpx.AsyncClient) -> Shown:
    """The client leaves while its long prompt is being prefilled: no KV block may stay behind."""
    request_id = _id()
    body = _chat(_LONG[stack.kind], stream=True)
    call = asyncio.create_task(_post(client, stack.url, "/v1/chat/completions", body, request_id))
    prefillers = [engine for engine in stack.engines if engine.role == "prefill"]
    await _until(lambda: _any_in_use(stack, prefillers), "the prefill never started")
    call.cancel()
    left = time.monotonic()
    await asyncio.gather(call, return_exceptions=True)
    await _until(lambda: _none_in_use(stack, prefillers), "KV blocks stayed pinned")
    freed_ms = (time.monotonic() - left) * 1000
    record = await stack.exchange(request_id, _complete)
    return Shown("client hangs up in the prefill", record, f"all KV blocks free {freed_ms:.0f} ms later")


async def _any_in_use(stack: Stack, engines: list[DemoEngine]) -> bool:
    return any([await stack.kv_usage(engine) > 0 for engine in engines])


async def _none_in_use(stack: Stack, engines: list[DemoEngine]) -> bool:
    return not await _any_in_use(stack, engines)


async def _until(condition: Callable[[], Awaitable[bool]], otherwise: str) -> None:
    try:
        async with asyncio.timeout(_FREED_WITHIN_S):
            while not await condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise ScenarioFailed(otherwise) from None


SCENARIOS = (
    Scenario("chat completion", chat),
    Scenario("streamed chat, with usage", streamed),
    Scenario("completion of token ids", token_ids),
    Scenario("prefill-1 answers 500", failing_prefiller, simulated_only=True),
    Scenario("decode-1 refuses connections", refusing_decoder, simulated_only=True),
    Scenario("client hangs up in the prefill", hang_up),
)
