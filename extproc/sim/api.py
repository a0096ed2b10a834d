"""The HTTP API: vLLM's routes on Starlette, with FastAPI's answers to what is no such route."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from extproc.sim import listener
from extproc.sim.answers import DONE, Answers, to_json
from extproc.sim.config import VLLM_VERSION, SimConfig
from extproc.sim.engine import Engine
from extproc.sim.errors import ApiError, internal_error, unknown_model
from extproc.sim.failures import Failure, Failures
from extproc.sim.log import Record, RequestLog
from extproc.sim.request import EngineDead
from extproc.sim.schema import ChatRequest, CompletionRequest, TokenizeMessages
from extproc.sim.serving import Generation, Serving, chat_prompt, encode_text
from extproc.sim.tokens import decode
from extproc.sim.validation import CHAT, COMPLETION, TOKENIZE, parse

Events = AsyncIterator[bytes]
Reject = Callable[[dict[str, Any]], None]


class Api:
    def __init__(
        self,
        config: SimConfig,
        engine: Engine,
        failures: Failures,
        log: RequestLog,
        reject: Reject,
        control: list[Route],
    ) -> None:
        self.config = config
        self.engine = engine
        self.failures = failures
        self.log = log
        self._reject = reject
        self._serving = Serving(config, engine)
        self._answers = Answers(config)
        self._started = int(time.time())
        routes = [
            _route("/health", self._health, "GET"),
            _route("/ping", self._health, "GET", "POST"),
            _route("/load", self._load, "GET"),
            Route("/metrics{rest:path}", self._metrics, methods=["GET"]),
            _route("/version", self._version, "GET"),
            _route("/v1/models", self._models, "GET"),
            _route("/v1/chat/completions", self._chat, "POST"),
            _route("/v1/completions", self._completion, "POST"),
            _route("/tokenize", self._tokenize, "POST"),
        ]
        middleware = [Middleware(CORSMiddleware, allow_origins=[], allow_methods=["*"], allow_headers=["*"])]
        if config.api_key:
            middleware.insert(0, Middleware(_Authentication, key=config.api_key))
        self.app = Starlette(
            routes=[*routes, *control],
            middleware=middleware,
            exception_handlers={HTTPException: _http_error, ApiError: _api_error, EngineDead: _engine_dead},
        )

    # -- small routes --------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return Response(status_code=503 if self.engine.death else 200)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.engine.metrics.render(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _load(self, request: Request) -> Response:
        return JSONResponse({"server_load": 0})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": VLLM_VERSION})

    async def _models(self, request: Request) -> Response:
        permission = {
            "id": f"modelperm-{secrets.token_hex(16)}",
            "object": "model_permission",
            "created": self._started,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._started,
                "owned_by": "vllm",
                "root": self.config.models[0],
                "parent": None,
                "max_model_len": self.config.max_model_len,
                "permission": [permission],
            }
            for name in self.config.models
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def _tokenize(self, request: Request) -> Response:
        wanted = parse(TOKENIZE, await request.body(), request.headers.get("content-type"))
        if wanted.model and wanted.model not in self.config.models:
            raise unknown_model(wanted.model, self.config.models)
        if isinstance(wanted, TokenizeMessages):
            tokens = chat_prompt(wanted.messages, add_generation_prompt=wanted.add_generation_prompt)
        else:
            tokens = encode_text(wanted.prompt)
        strings = [decode([token]) for token in tokens] if wanted.return_token_strs else None
        limit = self.config.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings})

    # -- generation ----------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> ASGIApp:
        return await self._generate(request, CHAT)

    async def _completion(self, request: Request) -> ASGIApp:
        return await self._generate(request, COMPLETION)

    async def _generate(self, request: Request, schema: TypeAdapter[ChatRequest | CompletionRequest]) -> ASGIApp:
        body = await request.body()
        record = self.log.open(request.url.path, request.scope["headers"], body)
        try:
            # A body that fails here never gets to tell the prefiller anything.
            wanted = parse(schema, body, request.headers.get("content-type"))
        except ApiError as error:
            record.end("rejected", error.status)
            raise
        record.model, record.stream = wanted.model, bool(wanted.stream)
        record.leg = _leg(wanted.kv_transfer_params)
        failure = self.failures.take(record.leg)
        if failure is not None:
            answer = await self._fail(failure, record, wanted)
            if answer is not None:
                return answer
        told = wanted.kv_transfer_params
        try:
            generation = self._start(wanted, record)
            if wanted.stream:
                return _EventStream(self._events(wanted, generation), generation, record, failure)
            finished = await _unless_disconnected(request, generation.finish())
        except (ApiError, EngineDead) as error:
            status = error.status if isinstance(error, ApiError) else 500
            record.end("rejected" if status < 500 else "error", status)
            self._reject_if_told(told)
            raise
        if not finished:
            record.end("aborted")
            self._reject_if_told(told)
            return _NoAnswer()
        record.close(generation)
        if failure is not None and failure.mode in ("die_before_first_token", "die_mid_stream"):
            record.end("failed")
            listener.reset(request.scope)
            return _NoAnswer()
        record.end("completed", 200)
        return self._answer(wanted, generation, failure)

    def _reject_if_told(self, params: dict[str, Any] | None) -> None:
        if params and not self.engine.death:
            self._reject(params)

    def _start(self, wanted: ChatRequest | CompletionRequest, record: Record) -> Generation:
        if isinstance(wanted, ChatRequest):
            generation = self._serving.chat(wanted, record.request_id)
        else:
            generation = self._serving.completion(wanted, record.request_id)
        record.response_id = generation.response_id
        record.internal_ids = [request.id for request in generation.requests]
        record.prompt_tokens = generation.prompt_tokens
        return generation

    def _events(self, wanted: ChatRequest | CompletionRequest, generation: Generation) -> Events:
        if isinstance(wanted, ChatRequest):
            return self._answers.chat_events(wanted, generation)
        return self._answers.completion_events(wanted, generation)

    def _answer(
        self, wanted: ChatRequest | CompletionRequest, generation: Generation, failure: Failure | None
    ) -> Response:
        if isinstance(wanted, ChatRequest):
            answer = self._answers.chat(wanted, generation)
        else:
            answer = self._answers.completion(wanted, generation)
        if failure is not None and failure.mode == "no_params_key":
            del answer["kv_transfer_params"]
        body = to_json(answer)
        if failure is not None and failure.mode == "broken_json":
            body = body[: len(body) // 2]
        return Response(body, media_type="application/json")

    async def _fail(self, failure: Failure, record: Record, wanted: ChatRequest | CompletionRequest) -> ASGIApp | None:
        """The answer that a failure gives; None when the request goes on."""
        match failure.mode:
            case "status":
                record.end("failed", failure.status)
                headers = {} if failure.retry_after is None else {"retry-after": str(failure.retry_after)}
                kind = HTTPStatus(failure.status).phrase
                error = ApiError(failure.status, "injected failure", type=kind)
                return Response(to_json(error.body()), failure.status, headers, media_type="application/json")
            case "hang":
                record.end("failed")
                return _NoAnswer()
            case "close_without_answer":
                record.end("failed")
                return _NoAnswer(close=True)
            case "slow":
                await asyncio.sleep(failure.delay_s)
            case "null_params" | "no_params_key":
                wanted.kv_transfer_params = None
            case "engine_death":
                self.engine.die("an injected failure")
        return None


def _leg(params: dict[str, Any] | None) -> str:
    if params and params.get("do_remote_decode"):
        return "prefill"
    return "decode" if params and params.get("do_remote_prefill") else "plain"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, or cancel it when the client hangs up: then False."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class _NoAnswer:
    """Says nothing until the client is gone."""

    def __init__(self, *, close: bool = False) -> None:
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        listener.forget(scope)
        if self._close:
            listener.close(scope)
        await _disconnected(receive)


class _EventStream:
    """A streamed answer. Its head leaves at once, before the prefill; a client's hang-up aborts the generation."""

    def __init__(self, events: Events, generation: Generation, record: Record, failure: Failure | None) -> None:
        self._events = events
        self._generation = generation
        self._record = record
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._record.status = 200
        pump = asyncio.create_task(self._pump(scope, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait([pump, gone], return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            pump.cancel()
            gone.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
            self._generation.abort()
            self._record.close(self._generation)
            self._record.end("aborted")

    async def _pump(self, scope: Scope, send: Send) -> None:
        async def write(body: bytes) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": True})

        mode = self._failure.mode if self._failure is not None else None
        if mode == "die_before_first_token":
            await write(b"")
            self._die(scope)
            return
        outcome = "completed"
        try:
            async for chunk in self._events:
                await write(chunk)
                if mode == "die_mid_stream" and self._generation.completion_tokens >= self._tokens:
                    self._die(scope)
                    return
        except (ApiError, EngineDead) as error:
            outcome = "error"
            shown = error if isinstance(error, ApiError) else internal_error(str(error))
            # vLLM writes these few with Python's default separators.
            await write(f"data: {json.dumps(shown.body())}\n\n".encode())
        await write(DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._record.end(outcome)

    @property
    def _tokens(self) -> int:
        return self._failure.tokens if self._failure is not None else 0

    def _die(self, scope: Scope) -> None:
        self._record.end("failed")
        listener.reset(scope)


def _route(path: str, endpoint: Callable[[Request], Awaitable[ASGIApp]], *methods: str) -> Route:
    async def call(request: Request) -> Response:
        answer: Any = await endpoint(request)
        return answer  # type: ignore[no-any-return]

    route = Route(path, call, methods=list(methods))
    assert route.methods is not None
    route.methods.discard("HEAD")  # FastAPI's routes answer HEAD with 405
    return route


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(to_json(error.body()), error.status, media_type="application/json")


def _engine_dead(request: Request, error: Exception) -> Response:
    return _api_error(request, internal_error(str(error)))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, dict(error.headers or {}))


class _Authentication:
    """vLLM's ``--api-key``: a bearer token for everything under /v1, except OPTIONS."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._digest = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"].startswith("/v1"):
            scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
            given = hashlib.sha256(token.encode()).digest()
            if scheme.lower() != "bearer" or not secrets.compare_digest(given, self._digest):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
