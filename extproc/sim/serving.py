"""The API server's half of a generation: from a validated body to engine requests, and from their tokens to answers."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from extproc.sim.config import SimConfig
from extproc.sim.engine import Engine
from extproc.sim.errors import ApiError, bad_request, internal_error, invalid_parameter, unknown_model
from extproc.sim.request import EngineDead, EngineRequest, OutputQueue, Sampling, Status, internal_id
from extproc.sim.schema import ChatRequest, CompletionRequest, Message, Part
from extproc.sim.text import Choice, Delta
from extproc.sim.tokens import LONGEST_PIECE, encode, special
from extproc.sim.validation import check_engine_input, check_sampling


def encode_text(text: str) -> list[int]:
    """Raises ApiError for a text that the tokenizer cannot take."""
    try:
        return encode(text)
    except UnicodeEncodeError:
        message = "TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]"
        raise bad_request(message) from None


def chat_prompt(messages: list[Message], *, add_generation_prompt: bool = True) -> list[int]:
    """The chat template: ChatML. Parts of a message that are no text count as their type's name. Raises ApiError."""
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    start, end = special("<|im_start|>"), special("<|im_end|>")
    tokens: list[int] = []
    for message in messages:
        tokens += [start, *encode_text(f"{message.role}\n{_content(message.content)}"), end, *encode("\n")]
    if add_generation_prompt:
        tokens += [start, *encode("assistant\n")]
    return tokens


def _content(content: str | list[Part | str] | None) -> str:
    if isinstance(content, list):
        parts = [Part(text=part) if isinstance(part, str) else part for part in content]
        return "".join(part.text or "" if part.type == "text" else f"<|{part.type}|>" for part in parts)
    return content or ""


def prompts_of(request: CompletionRequest) -> list[list[int]]:
    """Each prompt of a completion request as token ids."""
    match request.prompt:
        case str(text):
            return [encode_text(text)]
        case [int(), *_] as tokens:
            return [tokens]  # type: ignore[list-item]
        case list(several):
            return [encode_text(one) if isinstance(one, str) else list(one) for one in several]  # type: ignore[arg-type]
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
    wanted: ChatRequest | CompletionRequest
    kv_transfer_params: dict[str, Any] | None = None
    """Of the first prompt's choices, what the last one to end came with."""

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Of the last prompt. A decoder reports what the prefiller found cached, not its own near-perfect hit."""
        request = self.requests[-1]
        params = request.kv_transfer_params or {}
        return int(params.get("remote_prefill_cached_tokens") or 0) if request.pulled else request.cached_tokens

    async def run(self) -> AsyncIterator[tuple[int, Delta]]:
        """Submit everything and yield (choice index, delta) until all choices are done.

        Raises ApiError for what only the engine sees and for a failed load, EngineDead when the core dies. Leaving it
        early, by an exception or by closing it, aborts what still runs.
        """
        try:
            for request in self.requests:
                check_engine_input(self.wanted, request.prompt, request.sampling.logprobs)
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
                if delta.finish_reason is not None and index < len(self.choices) // len(self.prompts):
                    self.kv_transfer_params = output.kv_transfer_params
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
        self._check_limits(limit_name, request)
        self._check_abilities(request)
        prompt = chat_prompt(request.messages, add_generation_prompt=request.add_generation_prompt)
        external = f"chatcmpl-{request_id or request.request_id or secrets.token_hex(8)}"
        logprobs = request.top_logprobs if request.logprobs else None
        return self._generation(
            request, external, [external], [prompt], 1 if request.n is None else request.n, logprobs
        )

    def completion(self, request: CompletionRequest, request_id: str | None) -> Generation:
        """Raises ApiError, EngineDead."""
        if request.stream and request.use_beam_search:
            raise bad_request("Streaming is not currently supported with beam search")
        self._check_model(request.model)
        self._check_limits("max_tokens", request)
        if request.suffix is not None:
            texts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
            told = "suffix requires text prompt input for FIM completion rendering"
            if all(isinstance(text, str) for text in texts):
                told = "suffix is only supported for models with FIM completion rendering"
            raise ApiError(400, told, type="BadRequestError", param="suffix")
        self._check_text(request.prompt)
        prompts = prompts_of(request)
        if not prompts:
            raise bad_request("You must pass at least one prompt")
        external = f"cmpl-{request_id or request.request_id or secrets.token_hex(8)}"
        ids = [f"{external}-{index}" for index in range(len(prompts))]
        return self._generation(
            request, external, ids, prompts, 1 if request.n is None else request.n, request.logprobs
        )

    def _check_model(self, name: str | None) -> None:
        if name and name not in self.config.models:
            raise unknown_model(name, self.config.models)
        if self.engine.death:
            raise EngineDead

    def _check_abilities(self, request: ChatRequest) -> None:
        choice = request.tool_choice
        if not self.config.tool_parser and choice not in (None, "none"):
            if choice == "auto":
                raise bad_request(
                    '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
                )
            named = f'"{choice}"' if isinstance(choice, str) else f'function "{choice.function.name}"'
            raise bad_request(f"tool_choice={named} requires --tool-call-parser to be set")
        if self.config.multimodal:
            return
        contents = [message.content for message in request.messages if isinstance(message.content, list)]
        parts = [part for content in contents for part in content if isinstance(part, Part)]
        if any(part.type not in ("text", "refusal", "thinking") for part in parts):
            raise bad_request(f"{self.config.models[0]} is not a multimodal model")

    def _check_limits(self, name: str, request: ChatRequest | CompletionRequest) -> None:
        longest, limit, keep = self.config.max_model_len, request.limit, request.truncate_prompt_tokens
        if limit is not None and limit > longest:
            message = f"{name}={limit} cannot be greater than max_model_len={longest}."
            raise invalid_parameter(name, f"{message} Please request fewer output tokens.", limit)
        if keep is not None and keep > longest:
            message = f"truncate_prompt_tokens={keep} cannot be greater than max_model_len = {longest}."
            raise invalid_parameter(
                "truncate_prompt_tokens", f"{message} Please request a smaller truncation size.", keep
            )

    def _generation(
        self,
        request: ChatRequest | CompletionRequest,
        response_id: str,
        ids: list[str],
        prompts: list[list[int]],
        n: int,
        logprobs: int | None,
    ) -> Generation:
        prompts = [self._fitted(request, prompt) for prompt in prompts]
        outputs: OutputQueue = asyncio.Queue()
        requests: list[EngineRequest] = []
        choices: list[Choice] = []
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        for external, prompt in zip(ids, prompts, strict=True):
            room = self.config.max_model_len - len(prompt)
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
            wanted=request,
        )

    def _fitted(self, request: ChatRequest | CompletionRequest, prompt: list[int]) -> list[int]:
        """The prompt as the engine gets it. Raises ApiError when it is too long for the context."""
        longest = self.config.max_model_len
        keep = request.truncate_prompt_tokens
        if keep is not None:
            prompt = prompt[: longest - 1 if keep == -1 else keep]
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
        return prompt

    def _check_text(self, prompt: Any) -> None:
        """A text that cannot fit, however it tokenizes, is refused before it is tokenized. Raises ApiError."""
        longest = self.config.max_model_len
        limit = longest * LONGEST_PIECE
        for text in [prompt] if isinstance(prompt, str) else prompt or []:
            if isinstance(text, str) and len(text) > limit:
                raise invalid_parameter(
                    "input_text",
                    f"This model's maximum context length is {longest} tokens. However, your prompt contains "
                    f"{len(text)} characters (more than {limit} characters, which is the upper bound for {longest} "
                    "input tokens). Please reduce the length of the input prompt.",
                    len(text),
                )
