"""The bodies that a client sees: JSON and server-sent events with vLLM 0.32's keys, in its order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import msgspec

from extproc.sim.config import VLLM_VERSION, SimConfig
from extproc.sim.schema import ChatRequest, CompletionRequest
from extproc.sim.serving import Generation
from extproc.sim.text import Choice, Delta, chat_logprobs, completion_logprobs
from extproc.sim.tokens import decode

to_json = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


class Answers:
    def __init__(self, config: SimConfig) -> None:
        identity = f"{config.model}/{config.seed}/{config.block_size}/{config.max_model_len}"
        self.fingerprint = f"vllm-{VLLM_VERSION}-{sha256(identity.encode()).hexdigest()[:8]}"
        self.with_details = config.prompt_tokens_details

    def _usage(self, generation: Generation) -> dict[str, Any]:
        return {
            "prompt_tokens": generation.prompt_tokens,
            "total_tokens": generation.prompt_tokens + generation.completion_tokens,
            "completion_tokens": generation.completion_tokens,
        }

    def _full_usage(self, generation: Generation) -> dict[str, Any]:
        details = {"cached_tokens": generation.cached_tokens, "created_cache_tokens": None, "multimodal_tokens": None}
        return {
            **self._usage(generation),
            "prompt_tokens_details": details if self.with_details else None,
            "completion_tokens_details": None,
        }

    # -- chat ----------------------------------------------------------------------------------------------------

    def chat(self, request: ChatRequest, generation: Generation) -> dict[str, Any]:
        """The answer to a finished chat completion."""
        echo = _echo(request)
        return {
            "id": generation.response_id,
            "object": "chat.completion",
            "created": generation.created,
            "model": generation.model,
            "choices": [
                self._chat_choice(request, index, choice, echo) for index, choice in enumerate(generation.choices)
            ],
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": self._full_usage(generation),
            "prompt_logprobs": _prompt_logprobs(generation.prompts[0], _chat_prompt_logprobs(request)),
            "prompt_token_ids": generation.prompts[0] if request.return_token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": generation.kv_transfer_params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _chat_choice(self, request: ChatRequest, index: int, choice: Choice, echo: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": echo + choice.text, "refusal": None, "annotations": None}
        return {
            "index": index,
            "message": {**message, "audio": None, "function_call": None, "reasoning": None},
            "logprobs": chat_logprobs(choice.logprobs, request.top_logprobs) if request.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.tokens if request.return_token_ids else None,
            "routed_experts": None,
        }

    async def chat_events(self, request: ChatRequest, generation: Generation) -> AsyncIterator[bytes]:
        """The events of a streamed chat completion, without the closing ``[DONE]``. Raises as Generation.run does."""
        head = {
            "id": generation.response_id,
            "object": "chat.completion.chunk",
            "created": generation.created,
            "model": generation.model,
        }
        include_usage, continuous = _usage_wanted(request)
        first = True
        async for index, delta in generation.run():
            if first:
                first = False
                echo = _echo(request)
                for number in range(len(generation.choices)):
                    opening: dict[str, Any] = {"index": number, "delta": {"role": "assistant", "content": ""}}
                    chunk = {**head, "choices": [{**opening, "logprobs": None, "finish_reason": None}]}
                    if continuous:
                        counts = _counts(len(generation.prompts[0]), 0)
                        chunk["usage"] = {**counts, "completion_tokens_details": None}
                    ids = generation.prompts[0] if request.return_token_ids else None
                    yield event({**chunk, "prompt_token_ids": ids, "prompt_text": None})
                    if echo:
                        repeated = {"index": number, "delta": {"content": echo}}
                        yield event({**head, "choices": [{**repeated, "logprobs": None, "finish_reason": None}]})
            choice: dict[str, Any] = {
                "index": index,
                "delta": {"content": delta.text},
                "logprobs": chat_logprobs([delta.logprobs or []], request.top_logprobs) if request.logprobs else None,
                "finish_reason": delta.finish_reason,
            }
            if delta.finish_reason is not None:
                choice["stop_reason"] = delta.stop_reason
            choice["token_ids"] = [delta.token] if request.return_token_ids else None
            yield event(self._chunk(head, choice, delta, generation, index, include_usage, continuous))
        if include_usage:
            yield event({**head, "choices": [], **self._final_usage(generation)})

    # -- completions ---------------------------------------------------------------------------------------------

    def completion(self, request: CompletionRequest, generation: Generation) -> dict[str, Any]:
        """The answer to a finished completion. Of several prompts' transfer params it carries the first's alone."""
        n = len(generation.choices) // len(generation.prompts)
        only_echo = bool(request.echo) and request.max_tokens == 0
        return {
            "id": generation.response_id,
            "object": "text_completion",
            "created": generation.created,
            "model": generation.model,
            "choices": [
                self._completion_choice(request, index, choice, generation.prompts[index // n], only_echo)
                for index, choice in enumerate(generation.choices)
            ],
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": self._full_usage(generation),
            "kv_transfer_params": generation.kv_transfer_params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _completion_choice(
        self, request: CompletionRequest, index: int, choice: Choice, prompt: list[int], only_echo: bool
    ) -> dict[str, Any]:
        echoed = decode(prompt) if request.echo else ""
        steps: list[Any] = [] if only_echo else list(choice.logprobs)
        prompt_logprobs = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            steps = [*_prompt_steps(prompt), *steps]
            prompt_logprobs = request.logprobs if prompt_logprobs is None else prompt_logprobs
        return {
            "index": index,
            "text": echoed if only_echo else echoed + choice.text,
            "logprobs": completion_logprobs(steps, 0) if request.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.tokens if request.return_token_ids else None,
            "prompt_logprobs": _prompt_logprobs(prompt, prompt_logprobs),
            "prompt_token_ids": prompt if request.return_token_ids else None,
            "routed_experts": None,
        }

    async def completion_events(self, request: CompletionRequest, generation: Generation) -> AsyncIterator[bytes]:
        """The events of a streamed completion, without the closing ``[DONE]``. Raises as Generation.run does."""
        head = {
            "id": generation.response_id,
            "object": "text_completion",
            "created": generation.created,
            "model": generation.model,
        }
        include_usage, continuous = _usage_wanted(request)
        n = len(generation.choices) // len(generation.prompts)
        begun: set[int] = set()
        sent: dict[int, int] = {}
        async for index, delta in generation.run():
            prompt = generation.prompts[index // n]
            opening = index not in begun
            begun.add(index)
            text = delta.text
            if opening and request.echo:
                text = decode(prompt) if request.max_tokens == 0 else decode(prompt) + text
            steps: list[Any] = [delta.logprobs] if delta.logprobs is not None else []
            if opening and request.echo and request.logprobs is not None:
                steps = [*_prompt_steps(prompt), *(steps if request.max_tokens else [])]
            choice: dict[str, Any] = {
                "index": index,
                "text": text,
                "logprobs": completion_logprobs(steps, sent.get(index, 0)) if request.logprobs is not None else None,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
                "prompt_token_ids": prompt if opening and (request.return_token_ids or request.echo) else None,
                "token_ids": [delta.token] if request.return_token_ids else None,
            }
            sent[index] = sent.get(index, 0) + len(text)
            yield event(self._chunk(head, choice, delta, generation, index, include_usage, continuous))
        if include_usage:
            yield event({**head, "choices": [], **self._final_usage(generation)})

    # -- both ----------------------------------------------------------------------------------------------------

    def _chunk(
        self,
        head: dict[str, Any],
        choice: dict[str, Any],
        delta: Delta,
        generation: Generation,
        index: int,
        include_usage: bool,
        continuous: bool,
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {**head, "choices": [choice]}
        if continuous:
            prompt = generation.prompts[index * len(generation.prompts) // len(generation.choices)]
            chunk["usage"] = _counts(len(prompt), len(generation.choices[index].tokens))
            if "delta" in choice:
                chunk["usage"]["completion_tokens_details"] = None
        if delta.finish_reason is not None and not include_usage:
            chunk["system_fingerprint"] = self.fingerprint
        return chunk

    def _final_usage(self, generation: Generation) -> dict[str, Any]:
        usage = self._usage(generation)
        if self.with_details:
            usage["prompt_tokens_details"] = {"cached_tokens": generation.cached_tokens}
        return {"usage": usage, "system_fingerprint": self.fingerprint}


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def _usage_wanted(request: ChatRequest | CompletionRequest) -> tuple[bool, bool]:
    options = request.stream_options
    include = bool(options and options.include_usage)
    return include, include and bool(options and options.continuous_usage_stats)


def _echo(request: ChatRequest) -> str:
    last = request.messages[-1]
    return last.content if request.echo and last.role == "assistant" and isinstance(last.content, str) else ""


def _chat_prompt_logprobs(request: ChatRequest) -> int | None:
    return request.top_logprobs if request.echo and request.prompt_logprobs is None else request.prompt_logprobs


def _prompt_logprobs(prompt: list[int], count: int | None) -> list[dict[str, Any] | None] | None:
    """One entry for each prompt token, the first null; each names the token itself and ``count`` others."""
    if count is None:
        return None
    shown: list[dict[str, Any] | None] = [None]
    for token in prompt[1:]:
        ranked = [token, *(other for other in range(count + 1) if other != token)][: max(count, 1)]
        shown.append(
            {
                str(candidate): {"logprob": -1.0 - rank, "rank": rank + 1, "decoded_token": decode([candidate])}
                for rank, candidate in enumerate(ranked)
            }
        )
    return shown


def _prompt_steps(prompt: list[int]) -> list[list[tuple[int, float | None]]]:
    """The prompt's tokens as ``echo`` with ``logprobs`` shows them: nothing is known about the first."""
    return [[(token, -1.0 if index else None)] for index, token in enumerate(prompt)]
