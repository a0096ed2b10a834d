"""The API server's half of a generation: from a validated body to engine requests, and from their tokens to answers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from extproc.sim.config import SimConfig
from extproc.sim.engine import Engine
from extproc.sim.errors import ApiError, internal_error, invalid_parameter, unknown_model
from extproc.sim.request import EngineDead, EngineRequest, OutputQueue, Sampling, Status, internal_id
from extproc.sim.text import Choice, Delta
from extproc.sim.tokens import encode, special
from extproc.sim.validation import (
    ChatRequest,
    CompletionRequest,
    Message,
    check_engine_input,
    check_sampling,
)


def chat_prompt(messages: list[Message], *, add_generation_prompt: bool = True) -> list[int]:
    """The chat template: ChatML. Parts of a message that are no text count as their type's name."""
    start, end = special("<|im_start|>"), special("<|im_end|>")
    tokens: list[int] = []
    for message in messages:
        tokens += [start, *encode(f"{message.role}\n{_content(message.content)}"), end, *encode("\n")]
    if add_generation_prompt:
        tokens += [start, *encode("assistant\n")]
    return tokens


def _content(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "".join(
            str(part["text"]) if part.get("type") == "text" else f"<|{part.get('type')}|>" for part in content
        )
    return content or ""


def prompts_of(request: CompletionRequest) -> list[list[int]]:
    """Each prompt of a completion request as token ids."""
    match request.prompt:
        case str(text):
            return [encode(text)]
        case [int(), *_] as tokens:
            return [tokens]  # type: ignore[list-item]
        case list(several):
            return [encode(one) if isinstance(one, str) else list(one) for one in several]  # type: ignore[arg-type]
    return []


@dataclass
class Generation:
    """One HTTP request's engine requests and the choices that they fill, in the answer's order."""

    response_id: str
    created: int
    model: str
    engine: Engine
    requests: list[EngineRequest]
    choices: list[Choice]
    prompts: list[list[int]]
    outputs: OutputQueue
    prompt_logprobs: int | None

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        return self.requests[-1].cached_tokens

    async def run(self) -> AsyncIterator[tuple[int, Delta]]:
        """Submit everything and yield (choice index, delta) until all choices are done.

        Raises ApiError for what only the engine sees and for a failed load, EngineDead when the core dies. Leaving it
        early, by an exception or by closing it, aborts what still runs.
        """
        try:
            for request in self.requests:
                check_engine_input(request.prompt, request.sampling.logprobs, self.prompt_logprobs)
                self.engine.submit(request)
            open_choices = set(range(len(self.requests)))
            while open_choices:
                index, output = await self.outputs.get()
                if isinstance(output, EngineDead):
                    raise output
                if index not in open_choices:
                    continue
                if output.status is Status.ERROR:
                    raise internal_error("Internal server error")
                delta = self.choices[index].add(output)
                yield index, delta
                if delta.finish_reason is not None:
                    open_choices.discard(index)
                    self.engine.abort(self.requests[index])
        finally:
            self.abort()

    def abort(self) -> None:
        """End what still runs."""
        for request in self.requests:
            self.engine.abort(request)

    async def finish(self) -> None:
        async for _ in self.run():
            pass


class Serving:
    def __init__(self, config: SimConfig, engine: Engine) -> None:
        self.config = config
        self.engine = engine

    def chat(self, request: ChatRequest, request_id: str | None) -> Generation:
        """Raises ApiError, EngineDead."""
        self._check_model(request.model)
        limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        self._check_limit(limit_name, request.limit)
        if not request.messages:
            raise ApiError(400, "list index out of range", type="BadRequestError")
        prompt = chat_prompt(request.messages, add_generation_prompt=request.add_generation_prompt)
        external = f"chatcmpl-{request_id or request.request_id or uuid.uuid4().hex}"
        logprobs = request.top_logprobs if request.logprobs else None
        return self._generation(request, external, [external], [prompt], request.n or 1, logprobs)

    def completion(self, request: CompletionRequest, request_id: str | None) -> Generation:
        """Raises ApiError, EngineDead."""
        if request.stream and request.use_beam_search:
            raise ApiError(400, "Streaming is not currently supported with beam search", type="BadRequestError")
        self._check_model(request.model)
        self._check_limit("max_tokens", request.limit)
        prompts = prompts_of(request)
        external = f"cmpl-{request_id or request.request_id or uuid.uuid4().hex}"
        ids = [f"{external}-{index}" for index in range(len(prompts))]
        return self._generation(request, external, ids, prompts, request.n, request.logprobs)

    def _check_model(self, name: str | None) -> None:
        if name and name not in self.config.models:
            raise unknown_model(name, self.config.models)
        if self.engine.death:
            raise EngineDead

    def _check_limit(self, name: str, limit: int | None) -> None:
        if limit is not None and limit > self.config.max_model_len:
            message = f"{name}={limit} cannot be greater than max_model_len={self.config.max_model_len}."
            raise invalid_parameter(name, f"{message} Please request fewer output tokens.", limit)

    def _generation(
        self,
        request: ChatRequest | CompletionRequest,
        response_id: str,
        ids: list[str],
        prompts: list[list[int]],
        n: int,
        logprobs: int | None,
    ) -> Generation:
        outputs: OutputQueue = asyncio.Queue()
        requests: list[EngineRequest] = []
        choices: list[Choice] = []
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        for external, prompt in zip(ids, prompts, strict=True):
            room = self._room(prompt)
            max_tokens = room if request.limit is None else min(room, request.limit)
            only_echo = isinstance(request, CompletionRequest) and request.echo and request.max_tokens == 0
            if only_echo:
                max_tokens = 1
            check_sampling(request, max_tokens, n)
            sampling = Sampling(
                max_tokens=max_tokens,
                min_tokens=request.min_tokens,
                ignore_eos=request.ignore_eos,
                stop_token_ids=frozenset(request.stop_token_ids or ()),
                seed=None if request.temperature == 0 else request.seed,
                logprobs=logprobs,
            )
            parent = internal_id(external)
            for choice in range(n):
                params = request.kv_transfer_params
                requests.append(
                    EngineRequest(
                        id=parent if n == 1 else f"{choice}_{parent}",
                        prompt=prompt,
                        sampling=sampling,
                        kv_transfer_params=dict(params) if params else None,
                        choice=choice,
                        index=len(requests),
                        outputs=outputs,
                    )
                )
                choices.append(Choice(stop, request.include_stop_str_in_output, request.min_tokens))
        return Generation(
            response_id=response_id,
            created=int(time.time()),
            model=self.config.models[0],
            engine=self.engine,
            requests=requests,
            choices=choices,
            prompts=prompts,
            outputs=outputs,
            prompt_logprobs=request.prompt_logprobs,
        )

    def _room(self, prompt: list[int]) -> int:
        """How many tokens may follow a prompt. Raises ApiError when the prompt alone is too long."""
        longest = self.config.max_model_len
        if len(prompt) > longest:
            # The tokenizer stops one token past the limit, so vLLM cannot tell how long a text really was.
            qualifier = "at least " if len(prompt) == longest + 1 else ""
            raise invalid_parameter(
                "input_tokens",
                f"This model's maximum context length is {longest} tokens. However, your prompt contains "
                f"{qualifier}{len(prompt)} input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt.",
                len(prompt),
            )
        return longest - len(prompt)
