"""Configuration as people write it: YAML read strictly, and validation errors as lines that name the key.

No text that comes out of here shows a value: values may be secrets.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from extproc.errors import ConfigError


class _StrictLoader(yaml.SafeLoader):
    """A key that stands twice in a mapping is an error: YAML would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a string", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is there twice", key_node.start_mark)
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def parse_yaml(text: str | bytes) -> dict[str, Any]:
    """The mapping at the top level of a YAML text; an empty text is an empty mapping. Raises ConfigError."""
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"not YAML: {where}{_problem(error)}") from None
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        kinds = {
            yaml.reader.ReaderError: "not text",
            UnicodeDecodeError: "not UTF-8",
            RecursionError: "nested too deeply",
        }
        raise ConfigError(f"not YAML: {kinds.get(type(error), 'a date or number that cannot be')}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"expected keys like `fleet:` at the top level, found a {type(values).__name__}")
    return values


def _problem(error: yaml.MarkedYAMLError) -> str:
    if isinstance(error, yaml.composer.ComposerError) and "document" not in str(error.problem):
        return "a value that begins with & or * needs quotes"
    if isinstance(error, yaml.constructor.ConstructorError) and "tag" in str(error.problem):
        return "a value that begins with ! needs quotes"
    return error.problem or error.context or "unreadable"


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line for each key at fault in the values of a ``model``."""
    return [problem for _, problem in faults(error, model)]


def faults(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[Sequence[int | str], str]]:
    """For each key at fault: where the value stands (of a missing one, what it is missing in), and the line."""
    for detail in error.errors(include_url=False, include_input=False):
        location, kind = detail["loc"], detail["type"]
        key = _dotted(location) or "file"
        if kind == "extra_forbidden":
            yield location, f"{key}: unknown key{_suggestion(location, model)}"
        elif kind == "missing":
            yield location[:-1], f"{key}: required"
        else:
            yield location, f"{key}: {detail['msg'].removeprefix('Value error, ')}"


def _dotted(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _suggestion(location: Sequence[int | str], model: type[BaseModel]) -> str:
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        inner = (annotation, *getattr(annotation, "__args__", ()))
        model = next(a for a in inner if isinstance(a, type) and issubclass(a, BaseModel))
    known = list(model.model_fields)
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
