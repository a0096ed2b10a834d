"""What vLLM 0.32 accepts, in the three stages that differ by what they leave behind.

1. The schema (and the checks that run before it). A request that fails here never reaches the code that tells a
   prefiller that its blocks are not needed.
2. The serving layer: model name, prompt length, sampling parameters. A rejection here does tell it.
3. The engine, which no longer rejects.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException

from extproc.sim.errors import ApiError, bad_request, invalid_parameter
from extproc.sim.schema import (
    ChatRequest,
    CompletionRequest,
    Generation,
    Schema,
    TokenizeMessages,
    TokenizePrompt,
)

MAX_LOGPROBS = 20
VOCABULARY_SIZE = 151_936
"""Token ids beyond the pieces that exist are legal and print as nothing, as a model's unused ids do."""

Model = TypeVar("Model")

CHAT: TypeAdapter[ChatRequest | CompletionRequest] = TypeAdapter(ChatRequest)
COMPLETION: TypeAdapter[ChatRequest | CompletionRequest] = TypeAdapter(CompletionRequest)
TOKENIZE: TypeAdapter[TokenizePrompt | TokenizeMessages] = TypeAdapter(TokenizePrompt | TokenizeMessages)


def parse(adapter: TypeAdapter[Model], body: bytes, content_type: str | None) -> Model:
    """A request body, the way FastAPI and vLLM's handlers read it. Raises ApiError, or HTTPException for broken text.

    JSON is Python's: the last of two equal keys wins, NaN and Infinity are numbers.
    """
    media_type = (content_type or "").lower().split(";", maxsplit=1)[0]
    kind, _, subtype = media_type.strip().partition("/")
    value: Any = None
    if body and kind == "application" and (subtype == "json" or subtype.endswith("+json")):
        value = _json(body)
    if media_type != "application/json":
        raise schema_error(["Unsupported Media Type: Only 'application/json' is allowed"])
    if value is None:
        raise schema_error([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    try:
        return adapter.validate_python(value, from_attributes=True)
    except ValidationError as error:
        raise schema_error(
            [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors(include_url=False)]
        ) from None


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        problem = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise schema_error([{**problem, "ctx": {"error": error.msg}}]) from None
    except (UnicodeDecodeError, RecursionError):
        raise HTTPException(400, "There was an error parsing the body") from None


_MAX_N = 16384
_WRAPPERS = frozenset({"str", "int", "float", "bool", "bytes", "list", "tuple", "dict", "set", "none", "function-wrap"})


def schema_error(problems: list[Any]) -> ApiError:
    """FastAPI's RequestValidationError as vLLM words it: at most ten problems, each of bounded size."""
    noun = "error" if len(problems) == 1 else "errors"
    lines = [f"{len(problems)} validation {noun}:"]
    lines += [f"  {_problem(problem)}" for problem in problems[:10]]
    if len(problems) > 10:
        lines.append(f"  ...and {len(problems) - 10} more {noun}")
    first = problems[0]
    param = _location(first["loc"]) if isinstance(first, dict) else None
    return ApiError(400, "\n".join(lines), type="Bad Request", param=param)


def _problem(problem: Any) -> str:
    if isinstance(problem, dict):
        problem = {**problem, "loc": _location(problem["loc"]), "input": _shown(problem["input"])}
    text = str(problem)
    return text if len(text) <= 1000 else text[:1000] + "...[truncated]"


def _shown(value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 200 else text[:200] + "...[truncated]"


def _location(parts: tuple[Any, ...]) -> str:
    """Pydantic names union branches in a location; the API's consumers know fields and indexes only."""
    schemas = {schema.__name__ for schema in Schema.__subclasses__()}

    def is_branch(part: str) -> bool:
        return part.lower() in _WRAPPERS or part in schemas or bool(set("[](){}") & set(part))

    named = [str(part) for part in parts]
    return ".".join([part for part in named if not is_branch(part)] or named)


def check_sampling(request: Generation, max_tokens: int, n: int) -> None:
    """vLLM's SamplingParams, in its order. Raises ApiError."""
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.")
    if n > _MAX_N:
        limit = "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
        raise bad_request(f"n must be at most {_MAX_N}, got {n}. {limit}")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(request, name)
        if value is not None and not -2.0 <= value <= 2.0:
            raise bad_request(f"{name} must be in [-2, 2], got {value}.")
    if (penalty := request.repetition_penalty) is not None and not (math.isfinite(penalty) and penalty > 0):
        kind = "greater than zero, got" if math.isfinite(penalty) else "a finite number, got"
        raise bad_request(f"repetition_penalty must be {kind} {penalty}.")
    temperature = 1.0 if request.temperature is None else request.temperature
    if not math.isfinite(temperature):
        raise invalid_parameter("temperature", f"temperature must be a finite number, got {temperature}.", temperature)
    if temperature < 0.0:
        raise invalid_parameter("temperature", f"temperature must be non-negative, got {temperature}.", temperature)
    if temperature > 2.0:
        raise invalid_parameter("temperature", f"temperature must be in [0, 2], got {temperature}.", temperature)
    if request.top_p is not None and not 0.0 < request.top_p <= 1.0:
        raise invalid_parameter("top_p", f"top_p must be in (0, 1], got {request.top_p}.", request.top_p)
    if request.top_k is not None and request.top_k < -1:
        raise bad_request(f"top_k must be 0 (disable), or at least 1, got {request.top_k}.")
    if request.min_p is not None and not 0.0 <= request.min_p <= 1.0:
        raise bad_request(f"min_p must be in [0, 1], got {request.min_p}.")
    if max_tokens < 1:
        raise invalid_parameter("max_tokens", f"max_tokens must be at least 1, got {max_tokens}.", max_tokens)
    if request.min_tokens < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {request.min_tokens}.")
    if request.min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {request.min_tokens}."
        )
    unusable = [key for key in request.logit_bias or {} if not key.removeprefix("-").isdecimal()]
    if unusable:
        message = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {unusable}"
        raise invalid_parameter("logit_bias", message, unusable)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if not all(stop):
        raise bad_request("stop cannot contain an empty string.")
    if not all(request.bad_words):
        raise bad_request(f"bad_words cannot contain an empty string. Got bad_words={request.bad_words}")
    if temperature < 1e-5 and n > 1 and not request.use_beam_search:
        raise bad_request(f"n must be 1 when using greedy sampling, got {n}.")


def check_engine_input(request: Generation, prompt: list[int], logprobs: int | None) -> None:
    """What vLLM sees only when the engine takes the request: too late for the status of a stream. Raises ApiError."""
    for name, kind, count in (("logprobs", "sample", logprobs), ("prompt_logprobs", "prompt", request.prompt_logprobs)):
        if count is not None and (count > MAX_LOGPROBS or count == -1):
            wanted = count if count != -1 else VOCABULARY_SIZE
            raise invalid_parameter(
                name,
                f"Requested {kind} logprobs of {wanted}, which is greater than max allowed: {MAX_LOGPROBS}",
                wanted,
            )
    if not prompt:
        raise bad_request("The decoder prompt cannot be empty")
    if request.allowed_token_ids == []:
        raise invalid_parameter("allowed_token_ids", "allowed_token_ids is not None and empty!", [])
    if max(prompt) >= VOCABULARY_SIZE:
        raise bad_request(f"Token id {max(prompt)} is out of vocabulary")
