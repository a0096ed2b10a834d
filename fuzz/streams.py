"""Any messages in any order, to prefillers that answer in any way: each gets its reply, and nothing is left behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Final

import atheris
from atheris import FuzzedDataProvider as Data

with atheris.instrument_imports(include=["extproc"]):
    from tests.grpc import inner

from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

Message = ext_proc.ProcessingRequest

MODES: Final = (2, 4, 2, 4, 0, 1, 3, 5, 99)
METHODS: Final = ("POST", "POST", "POST", "GET", "CONNECT", "")
PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "", "/v1/completions?a")
TYPES: Final = ("application/json", "application/json", "audio/wav", "multipart/form-data; charset=utf-7", "")
NAMES: Final = ("x-request-id", "upgrade", "content-encoding", "x-gateway-destination-endpoint", "x-a", ":status")


def headers(data: Data) -> Message:
    message = Message()
    message.request_headers.end_of_stream = data.ConsumeProbability() < 0.2
    if data.ConsumeBool():
        message.protocol_config.request_body_mode = data.PickValueInList(list(MODES))
        message.protocol_config.response_body_mode = data.PickValueInList([0, 0, 0, 4, 5])
    lines = [
        (":method", data.PickValueInList(list(METHODS)).encode()),
        (":path", data.PickValueInList(list(PATHS)).encode()),
        ("content-type", data.PickValueInList(list(TYPES)).encode()),
    ]
    for _ in range(data.ConsumeIntInRange(0, 3)):
        lines.append((data.PickValueInList(list(NAMES)), data.ConsumeBytes(data.ConsumeIntInRange(0, 12))))
    for name, value in lines:
        message.request_headers.headers.headers.add(key=name, raw_value=value)
    if data.ConsumeProbability() < 0.1:
        key = "x-gateway-destination-endpoint-subset"
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({key: "10.0.1.1:8000"})
    message.observability_mode = data.ConsumeProbability() < 0.05
    return message


def body(data: Data) -> Message:
    size = data.ConsumeIntInRange(0, 64)
    text = data.ConsumeBytes(size) if data.ConsumeBool() else b'{"model":"m","prompt":"a"}'[:size]
    if data.ConsumeProbability() < 0.05:
        text = b'{"prompt":"%b"}' % (b"x" * 130_000)
    return Message(request_body=ext_proc.HttpBody(body=text, end_of_stream=data.ConsumeBool()))


def response(data: Data) -> Message:
    message = Message()
    message.response_headers.headers.headers.add(key=":status", raw_value=data.PickValueInList([b"200", b"503", b"x"]))
    if data.ConsumeBool():
        endpoint = data.PickValueInList(["10.0.1.1:8000", "10.0.1.2:8000", "", "x"])
        key = "x-gateway-destination-endpoint-served"
        message.metadata_context.filter_metadata["envoy.lb"].update({key: endpoint})
    return message


def others(data: Data) -> Message:
    some: Message = data.PickValueInList(
        [
            Message(),
            Message(request_trailers=ext_proc.HttpTrailers()),
            Message(response_trailers=ext_proc.HttpTrailers()),
            Message(response_body=ext_proc.HttpBody(body=b"data: {}\n\n")),
            Message(response_body=ext_proc.HttpBody(end_of_stream=True)),
        ]
    )
    return some


def anything(data: Data) -> Message:
    """Bytes as they come over the wire."""
    message = Message()
    try:
        message.ParseFromString(data.ConsumeBytes(data.ConsumeIntInRange(0, 200)))
    except Exception:  # noqa: BLE001 (protobuf's own word on what is no message; gRPC refuses it)
        return Message()
    return message


MAKERS: Final[tuple[Callable[[Data], Message], ...]] = (headers, body, response, others, anything)


class Target:
    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._inners = [self._runner.run(self._made(policy)) for policy in ("error", "decode")]

    async def _made(self, policy: str) -> inner.Inner:
        prefill = {"timeout_s": 0.003, "on_failure": policy, "fallback": {"max_concurrent": 1}}
        return inner.Inner.made(prefill=prefill, limits={"body_bytes": 200_000})

    def __call__(self, raw: bytes) -> None:
        data = Data(raw)
        service: inner.Inner = data.PickValueInList(self._inners)
        behaviours = [data.PickValueInList(list(inner.BEHAVIOURS)) for _ in range(data.ConsumeIntInRange(0, 2))]
        end: inner.End = "cancel" if data.ConsumeBool() else "half-close"
        pauses = data.ConsumeIntInRange(0, 2)
        cancel_after = data.ConsumeIntInRange(0, 20) if data.ConsumeProbability() < 0.3 else None
        messages = [headers(data), body(data)] if data.ConsumeBool() else []
        while data.remaining_bytes() and len(messages) < 12:
            messages.append(data.PickValueInList(list(MAKERS))(data))

        async def one() -> list[inner.Answered]:
            answered = await service.drive(messages, behaviours, end=end, pauses=pauses, cancel_after=cancel_after)
            await service.settled()
            return answered

        answered = self._runner.run(one())
        inner.check_replies(answered if cancel_after is None else answered[:-1])
        service.engines.prefills.clear()
        if len(service.engines.pinned) > 10_000:
            service.engines.pinned.clear()
            service.engines.released.clear()


def main() -> None:
    inner.raise_what_fails_inside()
    atheris.Setup(sys.argv, Target())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
