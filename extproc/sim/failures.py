"""Switches that make an engine fail in the ways a router must survive. Real engines have no such thing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

MODES = {
    "refuse": "the listening socket is closed",
    "reset": "connections are accepted and reset at once",
    "status": "answer with `status` (429 and 503 take `retry_after`)",
    "hang": "accept, read, never answer",
    "slow": "wait `delay_s` first",
    "null_params": "a prefill answers with kv_transfer_params: null and pins nothing",
    "no_params_key": "a prefill answers without the key and pins nothing",
    "broken_json": "a 200 whose body is cut in the middle",
    "close_without_answer": "read the request, close the connection",
    "die_before_first_token": "a stream's head goes out, then the connection is reset",
    "die_mid_stream": "the connection is reset after `tokens` tokens",
    "engine_death": "the engine core dies when the request arrives",
}
_CONNECTION = ("refuse", "reset")


@dataclass
class Failure:
    """An active failure. It applies ``count`` times (0: until it is cleared) to requests of ``leg`` (None: any)."""

    mode: str
    count: int = 0
    leg: str | None = None
    status: int = 500
    retry_after: int | None = None
    delay_s: float = 1.0
    tokens: int = 1

    def __post_init__(self) -> None:
        if self.mode.isdigit():
            self.status, self.mode = int(self.mode), "status"
        if self.mode not in MODES:
            raise ValueError(f"unknown mode {self.mode!r}; known: {', '.join(MODES)}, and a status like 503")
        if self.leg not in (None, "prefill", "decode", "plain"):
            raise ValueError("leg is one of prefill, decode, plain")

    @classmethod
    def of(cls, values: dict[str, Any]) -> Failure:
        """From JSON. Raises ValueError for unknown keys and values."""
        known = {field.name: field.type for field in fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown or "mode" not in values:
            raise ValueError(f"unknown keys {unknown}" if unknown else "mode is required")
        return cls(**{**values, "mode": str(values["mode"])})

    @classmethod
    def parse(cls, text: str) -> Failure:
        """From the command line: ``MODE`` or ``MODE:key=value,key=value``. Raises ValueError."""
        mode, _, rest = text.partition(":")
        values: dict[str, Any] = {"mode": mode}
        for pair in filter(None, rest.split(",")):
            key, _, value = pair.partition("=")
            values[key] = value if key == "leg" else float(value) if key == "delay_s" else int(value)
        return cls.of(values)


class Failures:
    def __init__(self) -> None:
        self._active: list[Failure] = []

    def add(self, failure: Failure) -> None:
        self._active.append(failure)

    def clear(self, mode: str | None = None) -> None:
        self._active = [failure for failure in self._active if mode is not None and failure.mode != mode]

    def has(self, mode: str) -> bool:
        return any(failure.mode == mode for failure in self._active)

    def take(self, leg: str) -> Failure | None:
        """The first failure that applies to a request of this leg, used up by one."""
        return self._take([f for f in self._active if f.mode not in _CONNECTION and f.leg in (None, leg)])

    def take_connection(self) -> Failure | None:
        """The reset that applies to a new connection."""
        return self._take([failure for failure in self._active if failure.mode == "reset"])

    def _take(self, matching: list[Failure]) -> Failure | None:
        if not matching:
            return None
        failure = matching[0]
        if failure.count:
            failure.count -= 1
            if failure.count == 0:
                self._active.remove(failure)
        return failure

    def state(self) -> list[dict[str, Any]]:
        return [asdict(failure) for failure in self._active]
