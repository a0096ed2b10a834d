"""What can go wrong, as types.

::

    ExtprocError
    ├── ConfigError       the configuration file or the environment is wrong; the text names the key
    └── RequestError      becomes an HTTP answer to the client (an ImmediateResponse)
"""

from __future__ import annotations

import json
from collections.abc import Mapping


class ExtprocError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(ExtprocError):
    """The configuration cannot be used. The text has one line for each key at fault."""


class RequestError(ExtprocError):
    """A request ends here with an OpenAI-style JSON body.

    ``status`` is the HTTP status; ``code`` a stable machine-readable word, also put into Envoy's access log
    (``response_code_details``); ``type`` is OpenAI's error type.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.type = type or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}``, as OpenAI clients parse it."""
        error = {"message": self.message, "type": self.type, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()
