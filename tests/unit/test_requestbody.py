"""What a body that is no JSON object to us may name, whatever it costs a client to write it."""

from __future__ import annotations

import tracemalloc
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc import openai
from extproc.classify import Request
from extproc.errors import RequestError
from extproc.jsonobject import JsonObject
from extproc.requestbody import _unquoted, read
from tests.unit.test_classify import _read

FORM = ("content-type", b"application/x-www-form-urlencoded")
NAME = b"kv_transfer_params"
MIB = 1 << 20


def _spelled(byte: int) -> st.SearchStrategy[bytes]:
    return st.sampled_from([b"%c" % byte, b"%%%02x" % byte, b"%%%02X" % byte, b"\\u%04x" % byte, b"%%5Cu%04x" % byte])


_NAMES = st.tuples(*(_spelled(byte) for byte in NAME)).map(b"".join)
_NOISE = st.sampled_from(
    [b"%", b"%%", b"%2", b"%zz", b"=", b"==", b"%3D", b"\n", b"\r", b"%0A", b"+", b"&a=", b"%25", b""]
)
_FORMS = st.lists(st.one_of(_NOISE, _NAMES), max_size=6).map(b"".join)


@given(_FORMS)
def test_a_form_names_connector_params_where_urllib_reads_them(form: bytes) -> None:
    if openai.names_connector_params(unquote_to_bytes(form)):
        assert openai.names_connector_params(_unquoted(form))


@given(st.binary(max_size=40).filter(lambda text: not set(text) & set(b"%=\r\n")))
def test_any_bytes_come_back_from_a_form(text: bytes) -> None:
    assert _unquoted(b"".join(b"%%%02x" % byte for byte in text)) == text
    assert _unquoted(text) == text


@pytest.mark.parametrize("unit", [b"%", b"%25", b"%%5f", b"=", b"\r", b"%\n", b"a"])
def test_no_form_takes_much_more_memory_than_itself(unit: bytes) -> None:
    form, request = unit * (MIB // len(unit)), _read(FORM)
    tracemalloc.start()
    try:
        assert read(form, request, json_depth=256) is None
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def _members(count: int) -> bytes:
    return b"{" + b",".join(b'"%d":1' % number for number in range(count)) + b"}"


@pytest.mark.parametrize("place", [b"%s", b'{"vllm_xargs":%s}', b'{"sampling_params":{"extra_args":%s}}'])
def test_objects_with_thousands_of_members_are_refused(place: bytes) -> None:
    request: Request = _read(("content-type", b"application/json"))
    body = read(place % _members(4096), request, json_depth=256)
    assert isinstance(body, JsonObject)
    assert openai.decode_body(body, None) == place % _members(4096)
    with pytest.raises(RequestError, match="more than 4096 members") as refusal:
        read(place % _members(4097), request, json_depth=256)
    assert (refusal.value.status, refusal.value.code) == (400, "json_too_large")


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (b'"prompt":[%s[]]' % (b"[]," * 100_000), "several_prompts"),
        (b'"echo":{"a":[%s0]}' % (b"0," * 100_000), "prompt_logprobs"),
        (b'"n":[%s0]' % (b"0," * 100_000), "several_choices"),
        (b'"prompt":[[%s0]]' % (b"0," * 100_000), None),
    ],
)
def test_what_is_large_is_not_decoded_to_be_judged(member: bytes, reason: str | None) -> None:
    request = openai.parse(b'{"model":"m",%s}' % member)
    tracemalloc.start()
    try:
        assert openai.bypass_reason("/v1/completions", request) == reason
        assert tracemalloc.get_traced_memory()[1] < 2 * len(member)
    finally:
        tracemalloc.stop()
