"""What a request asks for, and what each leg's body becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc import openai
from extproc.connectors import connector
from extproc.jsonobject import BadJson, JsonObject, TooDeep

# A slow machine is no failure.
_STEADY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PARAMS = b'{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"later_key":18446744073709551616}'
NIXL = connector("nixl").prefill_edits()
ASCEND = connector("mooncake-ascend").prefill_edits()


def _request(value: Any) -> JsonObject:
    return openai.parse(value if isinstance(value, bytes) else json.dumps(value).encode())


def _prefill(value: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(openai.prefill_body(_request(value), {}))
    return body


def _decode(value: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(openai.decode_body(_request(value), PARAMS))
    return body


# ── bypass (D8) ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"n": 2}, "several_choices"),
        ({"n": 0}, "several_choices"),
        ({"n": "2"}, "several_choices"),
        ({"n": " 2 "}, "several_choices"),
        ({"n": 2.0}, "several_choices"),
        ({"n": "two"}, "several_choices"),
        ({"n": [1]}, "several_choices"),
        ({"n": False}, "several_choices"),
        ({"n": 10**400}, "several_choices"),
        (b'{"n":1e999}', "several_choices"),
        (b'{"n":' + b"9" * 5000 + b"}", "several_choices"),
        (b'{"n":"\xff"}', "several_choices"),
        (b'{"n":1,"\\u006e":2}', "several_choices"),
        ({"best_of": 3}, "several_choices"),
        ({"best_of": "3"}, "several_choices"),
        ({"use_beam_search": True}, "beam_search"),
        ({"use_beam_search": "true"}, "beam_search"),
        ({"use_beam_search": 1}, "beam_search"),
        ({"echo": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"echo": "yes"}, "prompt_logprobs"),
        ({"echo": True, "max_tokens": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": 2}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt_embeds": ["AAAA"]}, "prompt_embeds"),
        ({"previous_response_id": "resp_1"}, "stored_response"),
        ({"background": True}, "stored_response"),
    ],
)
def test_requests_that_one_handoff_cannot_serve_are_not_disaggregated(body: Any, reason: str) -> None:
    assert openai.bypass_reason(CHAT, _request(body)) == reason
    assert openai.bypass_reason(COMPLETIONS, _request(body)) == reason


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 1},
        {"n": "1"},
        {"n": 1.0},
        {"n": True},
        {"n": None, "best_of": None},
        {"best_of": 1},
        {"use_beam_search": False, "echo": False, "background": False},
        {"use_beam_search": None, "echo": None, "prompt_logprobs": None, "prompt_embeds": None},
        {"use_beam_search": 0, "echo": 0},
        {"previous_response_id": None, "background": None},
        {"logprobs": True, "top_logprobs": 3, "stream": True, "tools": [], "response_format": {"type": "json_object"}},
        b'{"n":2,"n":1}',
    ],
)
def test_everything_else_is_disaggregated(body: Any) -> None:
    assert openai.bypass_reason(CHAT, _request(body)) is None
    assert openai.bypass_reason(COMPLETIONS, _request(body)) is None


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (b'"hi"', None),
        (b'""', None),
        (b"null", None),
        (b'["hi"]', None),
        (b'[ "hi" ]', None),
        (b"[1,2,3]", None),
        (b"[ 1 , 2 ]", None),
        (b"[\n-1]", None),
        (b"[[1,2,3]]", None),
        (b"[]", None),
        (b"[[]]", None),
        (b'["a,b"]', None),
        (b'["a","b"]', "several_prompts"),
        (b'["a", "b"]', "several_prompts"),
        (b'[ "a" , "b" ]', "several_prompts"),
        (b"[[1,2],[3]]", "several_prompts"),
        (b"[ [1], [2] ]", "several_prompts"),
        (b'["","",""]', "several_prompts"),
    ],
)
def test_shapes_of_a_prompt(prompt: bytes, reason: str | None) -> None:
    body = _request(b'{"model":"m","prompt":%b,"max_tokens":5}' % prompt)

    assert openai.bypass_reason(COMPLETIONS, body) == reason
    assert openai.bypass_reason("/invocations", body) == reason


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (b'[{"content":"a"}]', None),
        (b'[ {"content":[["a"]]} ]', None),
        (b"[]", None),
        (b"null", None),
        (b'[[{"content":"a"}]]', "several_prompts"),
        (b'[ \n[{"content":"a"}], [{"content":"b"}]]', "several_prompts"),
    ],
)
def test_a_batch_of_chats_is_several_prompts(messages: bytes, reason: str | None) -> None:
    body = _request(b'{"messages":%b}' % messages)

    assert openai.bypass_reason("/v1/chat/completions/batch", body) == reason
    assert openai.bypass_reason(CHAT, body) == reason


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "hi"}],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "d"}}],
            }
        ],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]}],
    ],
)
def test_a_chat_is_one_prompt(messages: Any) -> None:
    assert openai.bypass_reason(CHAT, _request({"messages": messages})) is None
    assert openai.bypass_reason(CHAT, _request({"messages": messages, "prompt": ["a", "b"]})) is None


def test_the_prompt_object_of_the_responses_api_is_no_list() -> None:
    assert openai.bypass_reason("/v1/responses", _request({"input": "hi", "prompt": {"id": "p"}})) is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [(b'{"model":"m"}', "m"), (b'{"model":null}', None), (b"{}", None), (b'{"model":7}', None), (b'{"model":""}', "")],
)
def test_the_model(body: bytes, expected: str | None) -> None:
    assert openai.model(_request(body)) == expected


# ── the prefill leg ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "limits"),
    [
        ({}, {"max_tokens": 1}),
        ({"max_tokens": 50}, {"max_tokens": 1}),
        ({"max_tokens": None}, {"max_tokens": 1}),
        ({"max_tokens": "7"}, {"max_tokens": 1}),
        ({"max_tokens": True}, {"max_tokens": 1}),
        (b'{"max_tokens":1E2}', {"max_tokens": 1}),
        ({"max_completion_tokens": 500}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ({"max_completion_tokens": None}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ({"max_tokens": 9, "max_completion_tokens": 500}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ({"max_output_tokens": 500}, {"max_tokens": 1, "max_output_tokens": 1}),
        ({"input": "hi"}, {"input": "hi", "max_tokens": 1, "max_output_tokens": 1}),
        ({"max_tokens": 100, "min_tokens": 5}, {"max_tokens": 1}),
        ({"min_tokens": None, "min_completion_tokens": 3}, {"max_tokens": 1}),
        (b'{"max_tokens":5,"max_tokens":7}', {"max_tokens": 1}),
        (b'{"max_tok\\u0065ns":5}', {"max_tokens": 1}),
    ],
)
def test_the_prefill_generates_one_token(body: Any, limits: dict[str, Any]) -> None:
    assert _prefill(body) == {"stream": False, **limits}
    assert _decode(body) == {**(json.loads(body) if isinstance(body, bytes) else body), "kv_transfer_params": _params()}


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, {}, None])
def test_the_prefill_is_not_streamed_and_has_no_stream_options(options: Any) -> None:
    body = {"stream": True, "stream_options": options, "prompt": "hi"}

    assert _prefill(body) == {"stream": False, "prompt": "hi", "max_tokens": 1}
    assert _decode(body) == {**body, "kv_transfer_params": _params()}


def test_the_prefill_of_each_connector() -> None:
    asks = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    body = _request({"min_tokens": 5, "kv_transfer_params": {"do_remote_prefill": True}})

    assert json.loads(openai.prefill_body(body, NIXL)) == {
        "kv_transfer_params": asks,
        "stream": False,
        "max_tokens": 1,
    }
    assert json.loads(openai.prefill_body(body, ASCEND)) == {
        "min_tokens": 1,
        "kv_transfer_params": asks,
        "stream": False,
        "max_tokens": 1,
    }


def test_what_no_leg_changes_reaches_both_byte_for_byte() -> None:
    untouched = (
        b'"seed":9007199254740993, "temperature": 0.70,"logit_bias":{"10":1,"9":-1},"logprobs":true,"top_logprobs":3,'
        b'"tools":[{"type":"function","function":{"name":"f","parameters":{"required":["z"],"properties":{"z":{},"a":{}}}}}],'
        b'"messages":[{"content":"\xc3\xa9\\u2603","role":"user"}],"response_format":{"type":"json_schema","json_schema":{}},'
        b'"metadata":{"b":1,"a":2},"chat_template_kwargs":{"z":false},"guided_json":"{}","unknown":1e400'
    )
    request = openai.parse(b'{"stream":true,' + untouched + b"}")

    assert openai.prefill_body(request, NIXL) == (
        b'{"stream":false,'
        + untouched
        + b',"max_tokens":1,"kv_transfer_params":'
        + (NIXL["kv_transfer_params"] or b"")
        + b"}"
    )
    assert openai.decode_body(request, PARAMS) == (
        b'{"stream":true,' + untouched + b',"kv_transfer_params":' + PARAMS + b"}"
    )


# ── the decode leg ───────────────────────────────────────────────────────────────────────────────────────────────────


def _params() -> Any:
    return json.loads(PARAMS)


def test_without_params_the_decoder_gets_the_clients_own_bytes() -> None:
    text = b'{ "prompt" : "hi" , "n":2, "max_tokens":5, "max_tokens":7 }'

    assert openai.decode_body(openai.parse(text), None) == text


def test_the_handoffs_params_are_passed_on_verbatim() -> None:
    text = b'{ "prompt" : "hi" }'

    assert openai.decode_body(openai.parse(text), PARAMS) == b'{ "prompt" : "hi","kv_transfer_params":' + PARAMS + b" }"


def test_with_repeated_keys_both_legs_act_on_the_last_and_have_each_once() -> None:
    request = openai.parse(b'{"max_tokens":5,"prompt":"a","max_tok\\u0065ns":7,"prompt":"b"}')

    assert openai.prefill_body(request, {}) == b'{"max_tokens":1,"prompt":"b","stream":false}'
    assert openai.decode_body(request, PARAMS) == (
        b'{"max_tokens":7,"prompt":"b","kv_transfer_params":' + PARAMS + b"}"
    )


# ── a client's own connector params never survive ────────────────────────────────────────────────────────────────────

_SMUGGLED = [
    b'{"kv_transfer_params":{"do_remote_prefill":true}}',
    b'{"kv_transfer_params":null}',
    b'{"kv_transfer_params":""}',
    b'{"kv_transfer_param\\u0073":{}}',
    b'{"\\u006b\\u0076_transfer_params":{},"kv_transfer_params":{}}',
    b'{"kv_transfer_params":{},"kv_transfer_params":{}}',
    b'{"ec_transfer_params":{"a":1},"batch_kv_transfer_params":{"b":1}}',
    b'{"vllm_xargs":{"kv_transfer_params":""}}',
    b'{"vllm_xargs":{"kv_transfer_params":0,"kv_transfer_params":[]}}',
    b'{"vllm_x\\u0061rgs":{"kv_transfer_p\\u0061rams":["do_remote_decode"]}}',
    b'{"vllm_xargs":{},"vllm_xargs":{"kv_transfer_params":""}}',
    b'{"vllm_xargs":{"kv_transfer_params":""},"vllm_xargs":{"kv_transfer_params":1}}',
    b'{"vllm_xargs" : { "ec_transfer_params" : 1 } }',
    b'{"extra_args":{"kv_transfer_params":{}}}',
    b'{"sampling_params":{"extra_args":{"kv_transfer_params":{"do_remote_prefill":true}}}}',
    b'{"sampling_params":{"vllm_xargs":{"kv_transfer_params":null}}}',
    b'{"sampling_params":{"kv_transfer_params":{},"extra_args":{"a":{"kv":1},"kv_transfer_params":{}}}}',
]


def _connector_keys(value: Any, path: str = "") -> list[str]:
    """Every place in a decoded body under which an engine would find connector params."""
    found = []
    for key, inner in value.items():
        here = f"{path}{key}"
        if key in ("kv_transfer_params", "ec_transfer_params", "batch_kv_transfer_params"):
            found.append(here)
        elif isinstance(inner, dict) and here in (
            "vllm_xargs",
            "extra_args",
            "sampling_params",
            "sampling_params.extra_args",
            "sampling_params.vllm_xargs",
        ):
            found += _connector_keys(inner, here + ".")
    return found


@pytest.mark.parametrize("text", _SMUGGLED)
def test_connector_params_of_a_client_are_removed_from_every_leg(text: bytes) -> None:
    request = openai.parse(b'{"prompt":"hi","seed":1.50,' + text[1:])

    for body in (openai.prefill_body(request, {}), openai.decode_body(request, None)):
        assert _connector_keys(json.loads(body)) == []
        assert b'"prompt":"hi","seed":1.50' in body
    assert _connector_keys(json.loads(openai.prefill_body(request, NIXL))) == ["kv_transfer_params"]
    handed = json.loads(openai.decode_body(request, PARAMS))
    assert _connector_keys(handed) == ["kv_transfer_params"]
    assert handed["kv_transfer_params"] == _params()


def test_what_stands_beside_nested_connector_params_is_kept() -> None:
    text = b'{"vllm_xargs":{ "bad_words" : ["a"], "kv_transfer_params":"", "seed":9007199254740993 },"prompt":"hi"}'

    assert openai.decode_body(openai.parse(text), None) == (
        b'{"vllm_xargs":{ "bad_words" : ["a"], "seed":9007199254740993 },"prompt":"hi"}'
    )


@pytest.mark.parametrize(
    "text",
    [
        b'{"vllm_xargs":{"a":1},"prompt":"hi"}',
        b'{"vllm_xargs":null,"sampling_params":[1],"extra_args":"kv_transfer_params"}',
        b'{"metadata":{"kv_transfer_params":"a client\'s own note"},"messages":[{"content":"kv_transfer_params"}]}',
    ],
)
def test_what_no_connector_reads_is_left_alone(text: bytes) -> None:
    assert openai.decode_body(openai.parse(text), None) == text


@pytest.mark.parametrize(
    "text",
    [
        b'{"vllm_xargs":{"\xed\xa0\x80":1,"kv_transfer_params":""}}',
        b'{"vllm_xargs":{"\\ud800":1,"kv_transfer_params":""}}',
        b'{"sampling_params":{"extra_args":{"\xff":1,"kv_transfer_params":{}}}}',
    ],
)
def test_nested_arguments_that_cannot_be_cleaned_make_the_body_unreadable(text: bytes) -> None:
    """Python's json module, which engines use, reads the first two."""
    with pytest.raises(BadJson):
        openai.parse(text)


def test_nesting_of_the_same_arguments_costs_nothing() -> None:
    depth = 300
    text = b'{"extra_args":' * depth + b'{"kv_transfer_params":1,"pad":"' + b"x" * 100_000 + b'"}' + b"}" * depth

    assert openai.decode_body(openai.parse(text), None) == text  # no engine looks that deep


def test_absurd_nesting_is_reported_as_such() -> None:
    with pytest.raises(TooDeep):
        openai.parse(b'{"n":' + b"[" * 50_000 + b"]" * 50_000 + b"}")


# ── bodies that only Python's json module reads, and forms ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", _SMUGGLED)
@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
def test_other_encodings_hide_no_connector_params(text: bytes, encoding: str) -> None:
    body = text.decode().encode(encoding)

    with pytest.raises(BadJson):
        openai.parse(body)
    assert json.loads(body) == json.loads(text)  # an engine reads it
    assert openai.names_connector_params(body)


@pytest.mark.parametrize("odd", ["NaN", "Infinity", "-Infinity", '"\\ud800"'])
@pytest.mark.parametrize("text", _SMUGGLED)
def test_numbers_and_strings_that_only_pythons_parser_reads_hide_none_either(text: bytes, odd: str) -> None:
    body = b'{"temperature":%b,' % odd.encode() + text[1:]

    with pytest.raises(BadJson):
        openai.parse(body)
    assert openai.names_connector_params(body)


@pytest.mark.parametrize("position", range(len("kv_transfer_params")))
@pytest.mark.parametrize("spell", ["\\u00%02x", "\\u00%02X"])
def test_no_escape_hides_the_name(position: int, spell: str) -> None:
    name = "kv_transfer_params"
    spelled = name[:position] + spell % ord(name[position]) + name[position + 1 :]

    assert json.loads(f'"{spelled}"') == name
    assert openai.names_connector_params(b'{"%b": NaN}' % spelled.encode())
    assert openai.names_connector_params(f'{{"{spelled}": NaN}}'.encode("utf-16"))


def test_the_name_with_all_its_characters_escaped() -> None:
    spelled = "".join(f"\\u{ord(character):04x}" for character in "kv_transfer_params")

    assert openai.names_connector_params(b"[" + spelled.encode() + b"]")


@pytest.mark.parametrize("name", openai.CONNECTOR_KEYS)
def test_a_field_of_a_form_is_looked_into(name: str) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{"%b": ""}\r\n--x--' % name.encode()

    assert openai.names_connector_params(form)
    assert not openai.names_connector_params(form.replace(name.encode(), b"seed"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        b"\0" * 1000,
        b'{"temperature":NaN,"prompt":"\\u0061\\u00e9"}',
        '{"prompt":"kv_transfer"}'.encode("utf-16"),
        b'{"_transfer_param": 1}',
        b'"\\u005ftransfer\\u005fparam"',
    ],
)
def test_bodies_that_name_none_pass(body: bytes) -> None:
    assert not openai.names_connector_params(body)


_members = st.sampled_from([*openai.CONNECTOR_KEYS, "vllm_xargs", "extra_args", "sampling_params", "prompt", "n"])
_trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(_members, inner, max_size=4) | st.lists(inner, max_size=2),
    max_leaves=12,
)


@settings(_STEADY, max_examples=60)
@given(st.dictionaries(_members, _trees, max_size=5))
def test_no_tree_of_arguments_leaves_params_where_a_connector_reads_them(value: dict[str, Any]) -> None:
    request = _request(value)

    assert _connector_keys(json.loads(openai.decode_body(request, None))) == []
    assert _connector_keys(json.loads(openai.prefill_body(request, {}))) == []
    if not _connector_keys(value):
        assert openai.decode_body(request, None) == request.text
