"""What vLLM 0.32 accepts, in the three stages that differ by what they leave behind.

1. The schema (and the checks that run before it). A request that fails here never reaches the code that tells a
   prefiller that its blocks are not needed.
2. The serving layer: model name, prompt length, sampling parameters. A rejection here does tell it.
3. The engine, which no longer rejects.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from starlette.exceptions import HTTPException

from extproc.sim.errors import ApiError, bad_request, invalid_parameter

_INT64 = 2**63
MAX_LOGPROBS = 20
VOCABULARY_SIZE = 151_936
"""Token ids beyond the pieces that exist are legal and print as nothing, as a model's unused ids do."""
Seed = Annotated[int, Field(ge=-_INT64, le=_INT64 - 1)]
TokenId = Annotated[int, Field(ge=0)]
Stop = str | Annotated[list[str], Field(max_length=4)] | None


class Schema(BaseModel):
    """Unknown fields are ignored, as OpenAI's API asks. Numbers given as strings are numbers, as pydantic has it."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(Schema):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ResponseFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]


class StructuralTag(Schema):
    type: Literal["structural_tag"]
    format: Any


class OldStructuralTag(Schema):
    type: Literal["structural_tag"]
    structures: list[Any]
    triggers: list[str]


class Function(Schema):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Schema):
    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Schema):
    name: str


class NamedTool(Schema):
    function: NamedFunction
    type: Literal["function"] = "function"


class Part(Schema):
    """A part of a message. The simulated model looks at any kind, as a multimodal one does."""

    type: Literal[
        "text",
        "refusal",
        "image_url",
        "image_embeds",
        "input_audio",
        "audio_url",
        "audio_embeds",
        "video_url",
        "video_embeds",
        "file",
        "thinking",
        "prompt_embeds",
    ] = "text"
    text: str | None = None


class AssistantMessage(Schema):
    """The one message whose content may be null: it may consist of tool calls."""

    role: Literal["assistant"]
    content: str | list[Part | str] | None = None


class OtherMessage(Schema):
    role: str
    content: str | list[Part | str] = ""


Message = AssistantMessage | OtherMessage


class Generation(Schema):
    """The fields that chat and plain completions share."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    n: int | None = 1
    presence_penalty: float | None = None
    response_format: ResponseFormat | StructuralTag | OldStructuralTag | None = None
    seed: Seed | None = None
    stop: Stop = []
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=_INT64 - 1)] | None = None
    prompt_logprobs: int | None = None
    priority: Annotated[int, Field(ge=-_INT64, le=_INT64 - 1)] = 0
    request_id: str | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    bad_words: list[str] = []
    allowed_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None


# Checks on the raw body, before the schema. Where several complain, their order decides which one a client sees.


def _check_response_format(data: dict[str, Any]) -> None:
    wanted = data.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema" and wanted.get("json_schema") is None:
        raise invalid_parameter(
            "response_format",
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
        )


def _check_cache_salt(data: dict[str, Any]) -> None:
    if data.get("cache_salt") == "":
        raise invalid_parameter("cache_salt", "Parameter 'cache_salt' must be a non-empty string if provided.")


def _check_stream_options(data: dict[str, Any]) -> None:
    if data.get("stream_options") and not data.get("stream"):
        raise invalid_parameter("stream_options", "Stream options can only be defined when `stream=True`.")


def _check_numbers(data: dict[str, Any], *fields: str) -> None:
    for field in fields:
        value = data.get(field)
        if value is not None and not isinstance(value, int | float):
            raise invalid_parameter(field, f"`{field}` must be an integer.", value)


def _check_prompt_logprobs(data: dict[str, Any]) -> None:
    wanted = data.get("prompt_logprobs")
    if wanted is None:
        return
    if data.get("stream") and (wanted > 0 or wanted == -1):
        raise invalid_parameter("prompt_logprobs", "`prompt_logprobs` are not available when `stream=True`.")
    if wanted < 0 and wanted != -1:
        raise invalid_parameter("prompt_logprobs", "`prompt_logprobs` must be a positive value or -1.", wanted)


def _check_tools(data: dict[str, Any]) -> None:
    if data.get("tools") == []:
        raise invalid_parameter(
            "tools",
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
        )
    if "tool_choice" not in data and data.get("tools"):
        data["tool_choice"] = "auto"
    choice = data.get("tool_choice")
    if choice is None or choice == "none":
        return
    if data.get("tools") is None:
        raise invalid_parameter("tool_choice", "When using `tool_choice`, `tools` must be set.")
    if choice not in ("auto", "required") and not isinstance(choice, dict):
        raise invalid_parameter(
            "tool_choice",
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.',
        )
    if isinstance(choice, dict):
        _check_named_tool(choice, data["tools"])


def _check_named_tool(choice: dict[str, Any], tools: Any) -> None:
    usage = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'
    function = choice.get("function")
    if not isinstance(function, dict):
        raise invalid_parameter(
            "tool_choice.function", f"Invalid value for `function`: `{function}` in `tool_choice`! {usage}"
        )
    if "name" not in function:
        raise invalid_parameter(
            "tool_choice.function.name", f"Expected field `name` in `function` in `tool_choice`! {usage}"
        )
    name = function["name"]
    if not isinstance(name, str) or not name:
        raise invalid_parameter(
            "tool_choice.function.name", f"Invalid `name` in `function`: `{name}` in `tool_choice`! {usage}"
        )
    if all(tool["function"]["name"] != name for tool in tools):
        raise invalid_parameter(
            "tool_choice", "The tool specified in `tool_choice` does not match any of the specified `tools`"
        )


class ChatRequest(Generation):
    messages: list[Message]
    logprobs: bool | None = False
    top_logprobs: Annotated[int, BeforeValidator(lambda value: 0 if value is None else value)] = 0
    max_completion_tokens: int | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = "none"
    parallel_tool_calls: bool | None = True
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        """The client's limit: ``max_completion_tokens`` wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="before")
    @classmethod
    def _raw(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("messages", []) is None:
            raise bad_request("'NoneType' object is not iterable")
        if data.get("continue_final_message") and data.get("add_generation_prompt"):
            raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        _check_tools(data)
        _check_numbers(data, "prompt_logprobs", "top_logprobs")
        _check_prompt_logprobs(data)
        alternatives = data.get("top_logprobs")
        if alternatives is not None:
            if alternatives < 0 and alternatives != -1:
                raise invalid_parameter("top_logprobs", "`top_logprobs` must be a positive value or -1.", alternatives)
            if (alternatives == -1 or alternatives > 0) and not data.get("logprobs"):
                raise invalid_parameter("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true.")
        _check_stream_options(data)
        _check_response_format(data)
        _check_cache_salt(data)
        return data


class CompletionRequest(Generation):
    prompt: list[TokenId] | list[list[TokenId]] | str | list[str] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    n: int = 1
    suffix: str | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @model_validator(mode="before")
    @classmethod
    def _raw(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("prompt") in (None, "") and not data.get("prompt_embeds"):
            raise invalid_parameter("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
        _check_stream_options(data)
        _check_numbers(data, "prompt_logprobs", "logprobs")
        _check_prompt_logprobs(data)
        count = data.get("logprobs")
        if count is not None and count < 0 and count != -1:
            raise invalid_parameter("logprobs", "`logprobs` must be a positive value or -1.", count)
        _check_response_format(data)
        _check_cache_salt(data)
        return data if data.get("max_tokens") is not None else {**data, "max_tokens": 16}


class TokenizePrompt(Schema):
    model: str | None = None
    prompt: str
    return_token_strs: bool | None = False


class TokenizeMessages(Schema):
    model: str | None = None
    messages: list[Message]
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


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
