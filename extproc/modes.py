"""The processing mode that Envoy says is in force for a stream, and which of them can be served."""

from __future__ import annotations

from typing import Final

from extproc.errors import RequestError
from extproc.pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.telemetry.logs import log

_FULL_DUPLEX: Final = ProcessingMode.FULL_DUPLEX_STREAMED
_REQUEST_MODES: Final = (ProcessingMode.BUFFERED, _FULL_DUPLEX)
_RESPONSE_MODES: Final = (
    ProcessingMode.NONE,
    ProcessingMode.STREAMED,
    ProcessingMode.BUFFERED,
    ProcessingMode.BUFFERED_PARTIAL,
    _FULL_DUPLEX,
)


class Modes:
    """The first message tells; an Envoy too old to say knows BUFFERED only, of the modes that are served."""

    __slots__ = ("_observing", "_request", "_response")

    def __init__(self) -> None:
        self._request: int = ProcessingMode.BUFFERED
        self._response: int = ProcessingMode.NONE
        self._observing = False

    def adopt(self, message: ext_proc.ProcessingRequest) -> None:
        self._observing = message.observability_mode
        if message.HasField("protocol_config"):
            self._request = message.protocol_config.request_body_mode
            self._response = message.protocol_config.response_body_mode

    @property
    def streamed(self) -> bool:
        """FULL_DUPLEX_STREAMED request bodies, the endpoint-picker protocol's mode."""
        return self._request == _FULL_DUPLEX

    def sends_back(self, phase: str) -> bool:
        """Whether a body of this phase (request_body, response_body) is dropped unless it is sent back."""
        return (self._request if phase == "request_body" else self._response) == _FULL_DUPLEX

    def check(self) -> None:
        """Raises RequestError (500), and logs, where requests cannot be served correctly as things are configured."""
        if self._request not in _REQUEST_MODES:
            raise unserved("request_body_mode", _name(self._request), "BUFFERED or FULL_DUPLEX_STREAMED")
        if self._response not in _RESPONSE_MODES:
            raise unserved("response_body_mode", _name(self._response), "NONE")
        if self._observing:
            raise unserved("observability_mode", "true", "false")


def unserved(setting: str, value: str, needed: str) -> RequestError:
    log.error("unsupported processing mode", setting=setting, value=value)
    text = f"This gateway's Envoy has {setting} {value} in its ext_proc filter; extproc needs {needed}."
    return RequestError(500, "unsupported_processing_mode", text)


def _name(mode: int) -> str:
    names = ProcessingMode.BodySendMode
    return names.Name(mode) if mode in names.values() else str(mode)
