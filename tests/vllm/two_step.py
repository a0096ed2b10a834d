"""The two legs of a disaggregated request, sent by hand: what the service automates, without it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from extproc.demo.vllm.launch import MODEL_NAME, VllmEngine
from extproc.processes import plain_http_client

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = (
    "gateway request prefill decode engine blocks prompt answer stream memory lease router value cache token worker "
    "river stone paper window garden silver morning quiet bridge letter"
).split()

Body = dict[str, Any]


def words(count: int, seed: int) -> str:
    """That many words, other ones for each seed from the first word on, so that no prefix cache knows them."""
    draw = random.Random(seed)
    return f"{draw.randrange(10**9)} " + " ".join(draw.choice(WORDS) for _ in range(count))


def chat(prompt: str, **fields: Any) -> Body:
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL_NAME, "messages": messages, "temperature": 0, "max_tokens": 32} | fields


def completion(prompt: str | list[int], **fields: Any) -> Body:
    return {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, "max_tokens": 32} | fields


def prefill_leg(body: Body) -> Body:
    return body | {"stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


async def post(engine: VllmEngine, path: str, body: Body, headers: dict[str, str] | None = None) -> httpx.Response:
    async with plain_http_client(timeout_s=120.0) as client:
        return await client.post(engine.url + path, json=body, headers=headers)


async def prefill(engine: VllmEngine, body: Body, path: str = CHAT) -> Body:
    """Run the prefill leg. Returns ``kv_transfer_params`` as the engine gave them."""
    answer = await post(engine, path, prefill_leg(body))
    assert answer.status_code == 200, answer.text
    params: Body = answer.json()["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["remote_block_ids"][0]
    return params


async def introduce(prefiller: VllmEngine, decoder: VllmEngine) -> None:
    """Have them shake hands, see test_first_contact.py."""
    body = chat(words(5, 0))
    answer = await post(decoder, CHAT, body | {"kv_transfer_params": await prefill(prefiller, body)})
    assert answer.status_code == 200, answer.text
    await freed(prefiller, timeout_s=10)


def text_of(answer: httpx.Response) -> str:
    """The text of an answer, of either path, streamed or not."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return _choice_text(answer.json()["choices"][0], "message")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    return "".join(_choice_text(chunk["choices"][0], "delta") for chunk in chunks if chunk["choices"])


def _choice_text(choice: Body, part: str) -> str:
    text: str = choice["text"] if "text" in choice else choice[part].get("content") or ""
    return text


async def until(condition: Callable[[], Coroutine[Any, Any, bool]], timeout_s: float) -> float:
    """Seconds until the condition held. Raises TimeoutError."""
    started = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.005)
    return time.monotonic() - started


async def freed(engine: VllmEngine, timeout_s: float = 1.0) -> float:
    """Seconds until no block of the engine is in use. Raises TimeoutError."""

    async def nothing_pinned() -> bool:
        return await engine.pinned_blocks() == 0

    return await until(nothing_pinned, timeout_s)
