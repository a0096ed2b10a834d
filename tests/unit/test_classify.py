"""What becomes of a request, by its headers alone."""

from __future__ import annotations

import pytest

from extproc.classify import Candidate, Inspect, Pass, Request, check_size, plan, read_headers, status
from extproc.configsections import Limits
from extproc.errors import RequestError
from extproc.pb.envoy.config.core.v3 import base_pb2
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

PATHS = ("/v1/chat/completions", "/v1/completions")
CHAT = "/v1/chat/completions"
JSON = ("content-type", b"application/json")


def _read(
    *headers: tuple[str, bytes], method: str = "POST", path: str = CHAT, body: bool = True, field: str = "raw_value"
) -> Request:
    lines = [(":method", method.encode()), (":path", path.encode("latin-1")), *headers]
    message = ext_proc.HttpHeaders(end_of_stream=not body)
    for name, value in lines:
        header = base_pb2.HeaderValue(key=name)
        setattr(header, field, value if field == "raw_value" else value.decode())
        message.headers.headers.append(header)
    return read_headers(message)


def _plan(*headers: tuple[str, bytes], method: str = "POST", path: str = CHAT, body: bool = True) -> object:
    return plan(_read(*headers, method=method, path=path, body=body), PATHS)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("field", ["raw_value", "value"])
def test_values_are_read_from_either_field(field: str) -> None:
    request = _read(JSON, ("x-request-id", b"r-1"), path="/v1/completions?a=1", field=field)

    assert (request.method, request.path, request.route_path) == ("POST", "/v1/completions?a=1", "/v1/completions")
    assert (request.content_type, request.request_id, request.client_id) == ("application/json", b"r-1", "r-1")
    assert list(request.headers) == [
        (":method", b"POST"),
        (":path", b"/v1/completions?a=1"),
        JSON,
        ("x-request-id", b"r-1"),
    ]


def test_values_need_not_be_text() -> None:
    request = _read(("x-request-id", b"\xff\x00"), ("cookie", b"\xe9"), path="/caf\xe9")

    assert request.request_id == b"\xff\x00"
    assert request.client_id == "\xff\x00"
    assert request.path == "/caf\xe9"


def test_an_id_of_absurd_length_is_not_logged() -> None:
    assert _read(("x-request-id", b"a" * 256)).client_id == "a" * 256
    assert _read(("x-request-id", b"a" * 257)).client_id is None
    assert _read(("x-request-id", b"")).client_id is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([(":status", "200")], 200),
        ([("content-type", "x"), (":status", "503"), (":status", "200")], 503),
        ([], None),
        ([(":status", "")], None),
        ([(":status", "2xx")], None),
    ],
)
@pytest.mark.parametrize("field", ["raw_value", "value"])
def test_the_status_of_a_response(headers: list[tuple[str, str]], expected: int | None, field: str) -> None:
    message = ext_proc.HttpHeaders()
    for name, value in headers:
        header = message.headers.headers.add(key=name)
        setattr(header, field, value.encode() if field == "raw_value" else value)

    assert status(message) == expected


def test_headers_are_limited_in_number_and_size() -> None:
    message = ext_proc.HttpHeaders()
    for number in range(20):
        message.headers.headers.add(key=f"x-{number:02}", raw_value=b"v" * 96)  # 100 bytes each

    request = read_headers(message)
    check_size(request, Limits(headers=20, header_bytes=2000))
    for limits in (Limits(headers=19, header_bytes=2000), Limits(headers=20, header_bytes=1999)):
        with pytest.raises(RequestError) as refusal:
            check_size(request, limits)
        assert (refusal.value.status, refusal.value.code) == (431, "headers_too_large")


def test_of_repeated_headers_the_first_counts_as_it_does_for_engines() -> None:
    request = _read(("content-type", b"text/plain"), JSON, ("x-request-id", b"a"), ("x-request-id", b"b"))

    assert request.content_type == "text/plain"
    assert request.request_id == b"a"
    assert [value for name, value in request.headers if name == "x-request-id"] == [b"a", b"b"]


def test_names_and_the_content_type_are_compared_in_lower_case() -> None:
    request = _read(("Content-Type", b"Application/JSON; charset=UTF-8"), ("X-Gateway-Destination-Endpoint", b"h:1"))

    assert request.content_type == "application/json; charset=utf-8"
    assert request.spoofed == ("x-gateway-destination-endpoint",)


def test_a_request_without_headers_is_readable() -> None:
    request = read_headers(ext_proc.HttpHeaders(end_of_stream=True))

    assert (request.method, request.path, request.request_id, request.client_id) == ("", "", None, None)
    assert plan(request, PATHS) == Pass("method", no_body=True)


def test_steering_headers_of_a_client_are_named_once_each() -> None:
    request = _read(
        JSON,
        ("x-gateway-destination-endpoint", b"10.0.0.1:80"),
        ("x-gateway-destination-endpoint", b"10.0.0.2:80"),
        ("x-gateway-destination-endpoint-subset", b"10.0.0.1:80"),
        ("x-gateway-destination-endpoint-served", b"10.0.0.1:80"),
        ("x-data-parallel-rank", b"3"),
        ("x-extproc-anything", b"1"),
        ("x-request-id", b"mine"),
        ("authorization", b"Bearer k"),
    )

    assert request.spoofed == (
        "x-gateway-destination-endpoint",
        "x-gateway-destination-endpoint-subset",
        "x-gateway-destination-endpoint-served",
        "x-data-parallel-rank",
        "x-extproc-anything",
    )


# ── what is disaggregated ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", f"{CHAT}?x=1", "/v1/completions?api-version=1", f"{CHAT}?"])
@pytest.mark.parametrize(
    "content_type",
    [b"application/json", b"Application/JSON", b"application/json; charset=utf-8", b"application/json;x"],
)
def test_json_posted_to_the_configured_paths_is(path: str, content_type: bytes) -> None:
    assert _plan(("content-type", content_type), path=path) == Candidate()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/",
        "//v1/completions",
        "/v1//completions",
        "/v1/chat/completions/render",
        "/v1/chat/completions/batch",
        "/v1/chat%2Fcompletions",
        "/v1/chat/%63ompletions",
        "/V1/completions",
        "/v1/completions;x",
        "/chat/completions",
        "/v1/embeddings",
        "/tokenize",
        "/v1/rerank",
        "/pooling",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
        "/invocations",
        "/",
        "",
        "?/v1/completions",
    ],
)
def test_other_paths_are_not_but_their_bodies_are_looked_into(path: str) -> None:
    assert _plan(JSON, path=path) == Inspect("path")


def test_the_paths_are_the_configurations() -> None:
    request = _read(JSON, path="/v1/messages?beta=true")

    assert plan(request, ["/v1/messages"]) == Candidate()
    assert plan(request, []) == Inspect("path")


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "post", "TRACE"])
def test_only_post_is(method: str) -> None:
    assert _plan(JSON, method=method) == Inspect("method")
    assert _plan(JSON, method=method, body=False) == Pass("method", no_body=True)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("GET", "/health"), ("HEAD", "/v1/models"), ("OPTIONS", CHAT), ("DELETE", "/x")],
)
def test_requests_without_a_body_are_passed_on_at_once(method: str, path: str) -> None:
    assert _plan(("origin", b"http://o"), method=method, path=path, body=False) == Pass("method", no_body=True)


def test_a_post_without_a_body_is_passed_on_at_once() -> None:
    assert _plan(JSON, ("content-length", b"0"), body=False) == Pass("no_body", no_body=True)


@pytest.mark.parametrize(
    "content_type",
    [
        b"",
        b"text/plain",
        b"application/vnd.api+json",
        b"application/json ;charset=utf-8",
        b"application/json, text/plain",
        b"application/jsonl",
        b"text/json",
    ],
)
def test_a_content_type_that_engines_refuse_is_left_to_the_decoder(content_type: bytes) -> None:
    assert _plan(("content-type", content_type)) == Inspect("content_type")


def test_so_is_none_at_all() -> None:
    assert _plan() == Inspect("content_type")


@pytest.mark.parametrize(
    "content_type",
    [
        b"audio/wav",
        b"image/png",
        b"video/mp4",
        b"application/octet-stream",
        b"Application/Octet-Stream ; a=b",
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/audio/transcriptions"])
def test_bodies_that_are_not_json_are_not_held(content_type: bytes, path: str) -> None:
    assert _plan(("content-type", content_type), path=path) == Pass("content_type", no_body=False)
    assert _plan(("content-type", content_type), ("content-encoding", b"gzip"), path=path) == Pass(
        "content_type", no_body=False
    )


@pytest.mark.parametrize("content_type", [b"application/octet-stream+json", b"application/octet-streams", b"xaudio/a"])
def test_what_only_begins_like_one_of_them_is_looked_into(content_type: bytes) -> None:
    """FastAPI reads JSON in a body of type ``application/…+json``."""
    assert _plan(("content-type", content_type)) == Inspect("content_type")


def test_of_two_content_types_an_engine_may_read_either() -> None:
    request = _read(("content-type", b"image/png"), JSON)

    assert request.typed_twice
    assert plan(request, PATHS) == Inspect("content_type")
    assert not _read(("content-type", b"image/png")).typed_twice


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data; boundary=x",
        b"Multipart/Mixed",
        b"multipart/form-data; charset=utf-8; boundary=x",
        b'multipart/form-data; boundary=x; charset="UTF-8"',
        b"application/x-www-form-urlencoded",
        b"application/x-www-form-urlencoded; charset=iso-8859-1",
    ],
)
def test_forms_are_looked_into(content_type: bytes) -> None:
    assert _plan(("content-type", content_type), path="/v1/audio/transcriptions") == Inspect("path")
    assert _plan(("content-type", content_type)) == Inspect("content_type")
    assert _read(("content-type", content_type)).is_form
    assert _read(("content-type", content_type)).is_urlencoded == content_type.startswith(b"application")
    assert not _read(JSON).is_form


@pytest.mark.parametrize(
    "charset", [b"utf-16", b"utf-7", b"ibm037", b'"utf-16"', b"utf-8-sig", b"utf-8; charset=utf-7"]
)
def test_a_form_that_hides_its_text_is_refused(charset: bytes) -> None:
    with pytest.raises(RequestError) as refusal:
        _plan(("content-type", b"multipart/form-data; boundary=x; charset=" + charset))

    assert (refusal.value.status, refusal.value.code) == (415, "unsupported_charset")


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"zstd", b"deflate", b"gzip, identity", b"GZIP"])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
def test_a_compressed_body_is_refused(encoding: bytes, path: str) -> None:
    with pytest.raises(RequestError) as refusal:
        _plan(JSON, ("content-encoding", encoding), path=path)

    assert (refusal.value.status, refusal.value.code) == (415, "unsupported_content_encoding")
    assert refusal.value.type == "invalid_request_error"


@pytest.mark.parametrize("encoding", [b"", b"identity", b"Identity"])
def test_the_identity_encoding_is_none(encoding: bytes) -> None:
    assert _plan(JSON, ("content-encoding", encoding)) == Candidate()


# ── upgrades ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "headers", "body"),
    [
        ("GET", (("connection", b"Upgrade"), ("upgrade", b"websocket")), False),
        ("GET", (("connection", b"Upgrade"), ("upgrade", b"websocket")), True),
        ("POST", (JSON, ("connection", b"Upgrade"), ("upgrade", b"h2c")), True),
        ("CONNECT", (), True),
        ("CONNECT", ((":protocol", b"websocket"),), True),
    ],
)
def test_upgrades_are_answered_at_the_headers(method: str, headers: tuple[tuple[str, bytes], ...], body: bool) -> None:
    assert _plan(*headers, method=method, path="/v1/realtime", body=body) == Pass("upgrade", no_body=not body)
    assert _plan(*headers, ("content-encoding", b"gzip"), method=method, body=body) == Pass("upgrade", no_body=not body)


def test_the_unseen_body_of_an_upgrade_cannot_pass_for_json() -> None:
    """An engine may ignore the upgrade, and would act on connector params in a body that nobody has looked into."""
    upgrade = (("connection", b"Upgrade"), ("upgrade", b"h2c"))

    assert _read(JSON, *upgrade, ("x-data-parallel-rank", b"1")).spoofed == ("x-data-parallel-rank", "content-type")
    assert _read(*upgrade).spoofed == ()
    assert _read(JSON, *upgrade, method="GET").spoofed == ()
    assert _read(JSON).spoofed == ()
