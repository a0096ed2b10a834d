"""Configuration from the environment: which variable is at fault. No text that comes out of here shows a value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic_settings.exceptions import SettingsError

PREFIX: Final = "EXTPROC_"
NESTING: Final = "__"


def unknown(environment: Mapping[str, str], model: type[BaseModel]) -> Iterator[str]:
    """One line for each variable that means a section which there is not."""
    # Kubernetes injects EXTPROC_SERVICE_HOST and the like for a Service of that name: only nested names are ours.
    for name, (section, *nested) in _paths(environment):
        if nested and section not in model.model_fields:
            yield f"environment variable {name}: there is no section {section!r}"


def unparsable(environment: Mapping[str, str], model: type[BaseModel], error: SettingsError) -> Iterator[str]:
    """One line for each list or section that is not JSON. The error names no more than the section."""
    at_fault = next((section for section in model.model_fields if f'"{section}"' in str(error)), "")
    for name, path in _paths(environment):
        if path[0] == at_fault and not _is_json(environment[name]):
            like = "" if path[1:] else ', like {"key": "value"}'
            if path[0] == "fleet" and path[1:]:
                like = ', like [{"url": "http://host:port"}]'
            yield f"environment variable {name}: expected JSON{like}"


def line(environment: Mapping[str, str], source: str, location: Sequence[int | str], problem: str) -> str:
    """The problem, said of the variable that it came from; or of the ``source``, where none had a part in it.

    ``location`` is of the value at fault, or where a key is missing of what it is missing in.
    """
    parts = [str(part).lower() for part in location]
    for name, path in sorted(_paths(environment), key=lambda entry: -len(entry[1])):
        if parts[: len(path)] == path and _holds(environment[name], location[len(path) :]):
            return f"environment variable {name}: {problem}"
    # Of a section as a whole: keys that do not go together, any of which may be the wrong one.
    inside = sorted(name for name, path in _paths(environment) if parts and path[: len(parts)] == parts)
    return f"{source}: {problem}" + (f" (with {', '.join(inside)} from the environment)" if inside else "")


def _paths(environment: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """(variable, the keys that lead to what it sets); empty ones set nothing."""
    for name, value in environment.items():
        if value and name.upper().startswith(PREFIX):
            yield name, name[len(PREFIX) :].lower().split(NESTING)


def _holds(text: str, rest: Sequence[int | str]) -> bool:
    """Whether a variable's value has a say in what is at ``rest`` inside it."""
    value = _json(text)
    for part in rest:
        match value, part:
            case dict(), _ if part in value:
                value = value[part]
            case list(), int() if part < len(value):
                value = value[part]
            case dict() | list(), _:
                return False
    return True


def _json(text: str) -> Any:
    return json.loads(text) if _is_json(text) else text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
