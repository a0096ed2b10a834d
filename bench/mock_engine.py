"""A vLLM look-alike that costs next to nothing, so that a benchmark measures what stands in front of it.

One process plays any number of engines, one for each port. A request whose body asks for ``do_remote_decode`` gets a
prefill's answer, one with ``"stream":true`` as many SSE events as its ``max_tokens``, any other one JSON answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from typing import Final

import httptools
import uvloop

_PARAMS: Final = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[*range(1, 40)]],
    "remote_engine_id": "0a89a86c-37e4-4c77-9740-8e497065bbde",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 1200,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}
_USAGE: Final = {"prompt_tokens": 1200, "total_tokens": 1201, "completion_tokens": 1}
_EVENT: Final = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1796041295,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":"token"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
_MAX_TOKENS: Final = re.compile(rb'"max_tokens": ?(\d+)')


class Settings:
    def __init__(self, token_ms: float, prefill_us_per_byte: float) -> None:
        self.token_s = token_ms / 1000
        self.prefill_s_per_byte = prefill_us_per_byte / 1e6


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._url = b""
        self._id = "0"
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url
        self._body.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._id = value.decode()
        elif name.lower() == b"expect":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        loop = asyncio.get_running_loop()
        if b'"do_remote_decode":true' in body or b'"do_remote_decode": true' in body:
            delay = len(body) * self._settings.prefill_s_per_byte
            if delay:
                self._timer = loop.call_later(delay, self._answer_prefill)
            else:
                self._answer_prefill()
        elif self._url in (b"/v1/chat/completions", b"/v1/completions"):
            if b'"stream":true' in body or b'"stream": true' in body:
                tokens = int(match[1]) if (match := _MAX_TOKENS.search(body)) else 16
                head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                self._stream(tokens, head)
            else:
                self._answer(
                    {"id": "chatcmpl-0", "choices": [{"message": {"content": "token " * 60}}], "usage": _USAGE}
                )
        elif self._url == b"/v1/models":
            self._answer({"object": "list", "data": [{"id": "m", "object": "model"}]})
        else:  # health, metrics, and what routers ask for: vllm-router has each chat prompt rendered first
            self._answer({"status": "ok", "version": "0.32.0"})

    def _answer_prefill(self) -> None:
        params = {**_PARAMS, "remote_request_id": f"chatcmpl-{self._id}-0a1b2c3d"}
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
        self._answer({"id": "chatcmpl-0", "choices": [choice], "usage": _USAGE, "kv_transfer_params": params})

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _stream(self, left: int, head: bytes = b"") -> None:
        loop = asyncio.get_running_loop()
        if left <= 0:
            self._transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        self._transport.write(head + _chunk(_EVENT))
        if self._settings.token_s:
            self._timer = loop.call_later(self._settings.token_s, self._stream, left - 1)
        else:
            loop.call_soon(self._stream, left - 1)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(ports: list[int], settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: Engine(settings), "127.0.0.1", port, backlog=1024) for port in ports]
    print("ready", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--token-ms", type=float, default=0.0)
    parser.add_argument("--prefill-us-per-byte", type=float, default=0.0)
    options = parser.parse_args()
    uvloop.run(_serve(options.ports, Settings(options.token_ms, options.prefill_us_per_byte)))


if __name__ == "__main__":
    main()
