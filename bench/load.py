"""The benchmark's client: closed-loop workers on kept-alive connections, timing the first body byte and the end."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Final

import httptools
import uvloop

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"


@dataclass
class Samples:
    """Seconds for each request; ``events`` counts SSE events received."""

    first: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    failures: int = 0
    events: int = 0


class Connection(asyncio.Protocol):
    """One kept-alive connection, one request at a time."""

    def __init__(self) -> None:
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionResetError("closed"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self.body:
            self.first_at = time.perf_counter()
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def close(self) -> None:
        self._transport.close()

    async def request(self, head: bytes, body: bytes) -> bytes:
        self.body: list[bytes] = []
        self.status = 0
        self.first_at = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.writelines((head, body))
        await self._done
        return b"".join(self.body)


def head(path: str, host: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def body_of(size: int, *, stream: bool, tokens: int) -> bytes:
    """A chat request of about ``size`` bytes."""
    value = {"model": "m", "messages": [{"role": "user", "content": ""}], "max_tokens": tokens, "stream": stream}
    padding = max(0, size - len(json.dumps(value)))
    value["messages"] = [{"role": "user", "content": ("lorem ipsum dolor sit amet " * (padding // 27 + 1))[:padding]}]
    return json.dumps(value).encode()


def prompt_of(tokens: int, *, answer: int) -> bytes:
    """A streamed completion of a prompt that no other request begins like."""
    prompt = [random.randrange(1000, 30_000) for _ in range(tokens)]
    value = {"model": "m", "prompt": prompt, "max_tokens": answer, "stream": True, "ignore_eos": True, "temperature": 0}
    return json.dumps(value).encode()


async def _two_step(prefill: Connection, decode: Connection, host: str, body: bytes, path: str = CHAT) -> bytes:
    """What a client without any router has to do."""
    value = json.loads(body)
    asked = {**value, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    leg = json.dumps(asked).encode()
    answer = json.loads(await prefill.request(head(path, host, len(leg)), leg))
    value["kv_transfer_params"] = answer["kv_transfer_params"]
    leg = json.dumps(value).encode()
    return await decode.request(head(path, host, len(leg)), leg)


async def run(port: int, prefill_port: int | None, body: bytes, concurrency: int, seconds: float) -> Samples:
    """Load one address for a while. With ``prefill_port``, each request is sent in two steps."""
    loop = asyncio.get_running_loop()
    samples = Samples()
    host = f"127.0.0.1:{port}"
    request_head = head(CHAT, host, len(body))
    deadline = time.perf_counter() + seconds

    async def connect(to: int) -> Connection:
        return (await loop.create_connection(Connection, "127.0.0.1", to))[1]

    async def worker() -> None:
        decode = await connect(port)
        prefill = await connect(prefill_port) if prefill_port else None
        while time.perf_counter() < deadline:
            started = time.perf_counter()
            try:
                if prefill is None:
                    answer = await decode.request(request_head, body)
                else:
                    answer = await _two_step(prefill, decode, host, body)
            except OSError:
                samples.failures += 1
                decode = await connect(port)
                continue
            if decode.status != 200 or not answer:
                samples.failures += 1
                continue
            samples.first.append(decode.first_at - started)
            samples.total.append(time.perf_counter() - started)
            samples.events += answer.count(b"\ndata: ")

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return samples


async def run_at_rate(
    port: int, prefill_port: int | None, requests: int, rate: float, *, prompt: int, answer: int, burstiness: float
) -> Samples:
    """Requests at ``rate`` a second, whatever becomes of those before: the gaps are gamma-distributed, with the shape
    ``burstiness`` (1: Poisson arrivals; 100: almost even), as in ``vllm bench serve``."""
    loop = asyncio.get_running_loop()
    samples = Samples()
    host = f"127.0.0.1:{port}"

    async def one(body: bytes) -> None:
        decode = (await loop.create_connection(Connection, "127.0.0.1", port))[1]
        started = time.perf_counter()
        try:
            if prefill_port:
                prefill = (await loop.create_connection(Connection, "127.0.0.1", prefill_port))[1]
                received = await _two_step(prefill, decode, host, body, COMPLETIONS)
                prefill.close()
            else:
                received = await decode.request(head(COMPLETIONS, host, len(body)), body)
        except OSError:
            samples.failures += 1
            return
        finally:
            decode.close()
        if decode.status != 200 or not received.endswith(b"data: [DONE]\n\n"):
            samples.failures += 1
            return
        samples.first.append(decode.first_at - started)
        samples.total.append(time.perf_counter() - started)
        samples.events += received.count(b"\ndata: ")

    tasks = []
    for body in [prompt_of(prompt, answer=answer) for _ in range(requests)]:
        tasks.append(asyncio.create_task(one(body)))
        await asyncio.sleep(random.gammavariate(burstiness, 1 / (rate * burstiness)))
    await asyncio.gather(*tasks)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--prefill-port", type=int)
    parser.add_argument("--size", type=int, default=5 * 1024)
    parser.add_argument("--rate", type=float, default=0.0, help="open loop: requests a second, not as fast as they go")
    parser.add_argument("--requests", type=int, default=15, help="with --rate: how many")
    parser.add_argument("--prompt", type=int, default=8000, help="with --rate: tokens in")
    parser.add_argument("--burstiness", type=float, default=100.0, help="with --rate")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    if options.rate:
        shape = {"prompt": options.prompt, "answer": options.tokens, "burstiness": options.burstiness}
        load = run_at_rate(options.port, options.prefill_port, options.requests, options.rate, **shape)
    else:
        body = body_of(options.size, stream=options.stream, tokens=options.tokens)
        load = run(options.port, options.prefill_port, body, options.concurrency, options.seconds)
    started = time.perf_counter()
    samples = uvloop.run(load)
    json.dump(vars(samples) | {"seconds": time.perf_counter() - started}, sys.stdout)


if __name__ == "__main__":
    main()
