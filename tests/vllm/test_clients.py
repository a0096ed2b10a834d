"""Clients that none of us wrote, run by the engines' Python: the ``openai`` package and vLLM's own benchmark."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import pytest

from extproc.demo.vllm.install import HERE, find, offline
from extproc.demo.vllm.launch import MODEL_NAME
from tests.vllm.gateway import VllmGateway
from tests.vllm.two_step import CHAT, chat, freed, post, text_of, words

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPTS: Final = 100
OPENAI_SCRIPT: Final = """
import json, sys
from openai import NotFoundError, BadRequestError, OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
prompt = sys.argv[2]
ask = dict(model="tiny", messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=24)
said = {"chat": client.chat.completions.create(**ask).choices[0].message.content}
chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
said["streamed"] = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
said["usage"] = chunks[-1].usage.completion_tokens
text = dict(model="tiny", prompt=prompt, temperature=0, max_tokens=24)
said["text"] = client.completions.create(**text).choices[0].text
said["streamed text"] = "".join(c.choices[0].text for c in client.completions.create(**text, stream=True))
for name, wrong in (("model", {"model": "no-such-model"}), ("temperature", {"temperature": -1})):
    try:
        client.chat.completions.create(**{**ask, **wrong})
    except (NotFoundError, BadRequestError) as error:
        said[name] = [type(error).__name__, error.status_code, error.body["type"]]
said["models"] = [model.id for model in client.models.list()]
print(json.dumps(said))
"""


async def _run(*arguments: str) -> str:
    """A command of the engines' Python. Returns its output."""
    process = await asyncio.create_subprocess_exec(
        str(find().python),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**offline(), "PATH": "/usr/bin:/bin", "HOME": "/tmp", "NO_PROXY": "*"},
    )
    try:
        output, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    assert process.returncode == 0, (output + errors).decode()[-3000:]
    return output.decode()


async def test_the_openai_package(gateway: VllmGateway) -> None:
    before = await gateway.transfers()
    prompt = words(80, 600)
    said = json.loads(await _run("-c", OPENAI_SCRIPT, f"{gateway.url}/v1", prompt))
    alone = text_of(await post(gateway.prefill, CHAT, chat(prompt, max_tokens=24)))
    assert said["chat"] == said["streamed"] == alone
    assert said["usage"] == 24
    assert said["text"] == said["streamed text"] != ""
    assert said["model"] == ["NotFoundError", 404, "NotFoundError"]
    assert said["temperature"] == ["BadRequestError", 400, "BadRequestError"]
    assert said["models"] == [MODEL_NAME]
    await gateway.settled()
    await gateway.transferred(before, 4)
    assert await freed(gateway.prefill, timeout_s=5) < 5


@pytest.mark.parametrize(("backend", "path"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")])
async def test_vllms_benchmark(gateway: VllmGateway, backend: str, path: str, tmp_path: Path) -> None:
    before = await gateway.transfers()
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    await _run(
        *(str(HERE / "benchmark.py"), "--backend", backend, "--endpoint", path, "--host", host, "--port", port),
        *("--model", MODEL_NAME, "--served-model-name", MODEL_NAME, "--tokenizer", str(find().model)),
        *("--dataset-name", "random", "--random-input-len", "300", "--random-output-len", "12"),
        *("--num-prompts", str(PROMPTS), "--max-concurrency", "4", "--seed", str(len(path)), "--ignore-eos"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    )
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == PROMPTS
    assert result["failed"] == 0
    assert result["total_output_tokens"] == PROMPTS * 12
    await gateway.settled()
    assert gateway.counted("extproc_exchanges_total")["disaggregated"] >= PROMPTS
    await gateway.transferred(before, gateway.counted("extproc_exchanges_total")["disaggregated"])
