"""Real engines: time to the first token through each contender, by vLLM's own benchmark, on one pair.

``python -m bench.vllm`` needs ``make vllm``. Contenders take turns on the same pair, round after round;
a transfer is counted for each request whose KV the decoder really read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from bench.contenders import HOST, Contender, contender
from extproc.demo.vllm.install import HERE, find, offline
from extproc.demo.vllm.launch import MODEL_NAME, VllmEngine, running
from extproc.processes import free_port

CONTENDERS: Final = ("decoder alone", "two-step", "Envoy + extproc", "vllm-router")
TRANSFERS: Final = "vllm:nixl_bytes_transferred_count"
BASELINE: Final = "two-step"


@dataclass
class Cell:
    """A value for each round."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    failures: int = 0
    completed: int = 0
    transfers: int = 0


@contextlib.asynccontextmanager
async def two_step(prefill_url: str, decode_url: str) -> AsyncIterator[int]:
    """The least that can be between client and engines: both legs, one after the other, chunks passed on as they come.

    Yields its port.
    """
    async with ClientSession(
        connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None), auto_decompress=False
    ) as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            body: dict[str, Any] = await request.json()
            leg = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            leg.pop("stream_options", None)
            if "max_completion_tokens" in leg:
                leg["max_completion_tokens"] = 1
            async with session.post(prefill_url + request.path, json=leg) as answer:
                answer.raise_for_status()
                body["kv_transfer_params"] = (await answer.json())["kv_transfer_params"]
            async with session.post(decode_url + request.path, json=body) as answer:
                reply = web.StreamResponse(
                    status=answer.status, headers={"content-type": answer.headers["content-type"]}
                )
                await reply.prepare(request)
                async for chunk in answer.content.iter_any():
                    await reply.write(chunk)
                await reply.write_eof()
                return reply

        app = web.Application()
        app.router.add_post("/v1/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port(HOST)
        await web.TCPSite(runner, HOST, port).start()
        try:
            yield port
        finally:
            await runner.cleanup()


class Client:
    """vLLM's benchmark, imported once for all runs."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self._process = process
        self._directory = directory

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, directory: Path) -> AsyncIterator[Self]:
        with (directory / "benchmark.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(str(find().python), str(HERE / "benchmark.py"), "-"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=os.environ | offline() | {"NO_PROXY": "*"},
            )
            try:
                yield cls(process, directory)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def measure(self, port: int, *, prompts: int, rate: float, seed: int) -> dict[str, Any]:
        """One run. Returns what the benchmark saves. Raises RuntimeError where it fails."""
        file = self._directory / f"{port}-{seed}.json"
        command = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        command += ["--host", HOST, "--port", str(port)]
        command += ["--model", MODEL_NAME, "--served-model-name", MODEL_NAME, "--tokenizer", str(find().model)]
        command += ["--dataset-name", "random", "--random-input-len", "400", "--random-output-len", "20"]
        command += ["--num-prompts", str(prompts), "--request-rate", str(rate), "--burstiness", "100"]
        command += ["--seed", str(seed), "--ignore-eos", "--save-result", "--disable-tqdm"]
        command += ["--result-dir", str(self._directory), "--result-filename", file.name]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        async for line in self._process.stdout:
            if line == b"done\n":
                result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                return result
        raise RuntimeError((self._directory / "benchmark.log").read_text(errors="replace")[-2000:])


async def bench(names: list[str], *, prompts: int, rounds: int, rate: float) -> dict[str, Cell]:
    """``{contender: cell}``."""
    cells = {name: Cell() for name in names}
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prefill = VllmEngine("prefill", directory=directory)
        decode = VllmEngine("decode", directory=directory, load_failure_policy="recompute")
        await stack.enter_async_context(running(prefill, decode))
        client = await stack.enter_async_context(Client.started(directory))
        ports: dict[str, int] = {}
        for name in names:
            if name == "decoder alone":
                ports[name] = decode.port
            elif name == "two-step":
                ports[name] = await stack.enter_async_context(two_step(prefill.url, decode.url))
            else:
                started: Contender = await stack.enter_async_context(
                    contender(name, directory, prefill.port, decode.port)
                )
                ports[name] = started.port
        for name in names:  # handshakes, imports
            await client.measure(ports[name], prompts=4, rate=rate, seed=900 + names.index(name))
        for number in range(rounds):
            for index, name in enumerate(names):
                before = await decode.metric(TRANSFERS)
                # Prompts that no engine has seen.
                seed = 1000 + number * len(names) + index
                result = await client.measure(ports[name], prompts=prompts, rate=rate, seed=seed)
                cell = cells[name]
                cell.ttft_ms.append(result["median_ttft_ms"])
                cell.tpot_ms.append(result["median_tpot_ms"])
                cell.completed += result["completed"]
                cell.failures += prompts - result["completed"]
                cell.transfers += round(await decode.metric(TRANSFERS) - before)
                print(f"round {number + 1}: {name}: TTFT {cell.ttft_ms[-1]:.1f} ms", flush=True)
    return cells


def table(cells: dict[str, Cell]) -> str:
    """Markdown: medians over the rounds, and the first token's ratio to the two-step's."""
    base = statistics.median(cells[BASELINE].ttft_ms) if BASELINE in cells else None
    lines = [
        f"| contender | TTFT ms | of {BASELINE} | rounds | TPOT ms | failures | requests | NIXL transfers |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, cell in cells.items():
        ttft = statistics.median(cell.ttft_ms)
        ratio = f"{ttft / base:.2f}" if base else "–"
        rounds = ", ".join(f"{value:.1f}" for value in cell.ttft_ms)
        lines.append(
            f"| {name} | {ttft:.1f} | {ratio} | {rounds} | {statistics.median(cell.tpot_ms):.2f} "
            f"| {cell.failures} | {cell.completed + cell.failures} | {cell.transfers} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second, evenly spaced")
    parser.add_argument("contenders", nargs="*", default=list(CONTENDERS), help=", ".join(CONTENDERS))
    given = parser.parse_args()
    cells = asyncio.run(bench(given.contenders, prompts=given.prompts, rounds=given.rounds, rate=given.rate))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(table(cells))


if __name__ == "__main__":
    main()
