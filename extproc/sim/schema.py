"""The requests that vLLM 0.32 knows: fields and types, and the checks on the raw body that come before them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from extproc.sim.errors import bad_request, invalid_parameter

_INT64 = 2**63
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
