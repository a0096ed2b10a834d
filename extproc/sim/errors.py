"""Error answers in vLLM 0.32's shape."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """Becomes ``{"error": {"message", "type", "param", "code"}}`` with the status as ``code``."""

    def __init__(self, status: int, message: str, *, type: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}}


def bad_request(message: str) -> ApiError:
    return ApiError(400, message, type="BadRequestError")


def invalid_parameter(parameter: str, message: str, value: Any = None) -> ApiError:
    """vLLM names the parameter, and the value where it has one, at the end of the message too."""
    told = f"parameter={parameter}" if value is None else f"parameter={parameter}, value={value}"
    return ApiError(400, f"{message} ({told})", type="BadRequestError", param=parameter)


def internal_error(message: str) -> ApiError:
    return ApiError(500, message, type="InternalServerError")


def unknown_model(name: str | None, served: list[str]) -> ApiError:
    message = f"The model `{name}` does not exist. Valid aliases: {', '.join(served)}."
    return ApiError(404, message, type="NotFoundError", param="model")
