"""The service's configuration: one YAML file, each key overridable from the environment.

``EXTPROC_SECTION__KEY=value`` wins over the file; a value that is not a plain string is written as JSON
(``EXTPROC_FLEET__DECODE='[{"url": "http://10.0.0.8:8000"}]'``). Unknown keys and bad values are errors that name
the key.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from extproc import configenv, configtext
from extproc.configsections import (
    Admin,
    EngineLists,
    Envoy,
    Fleet,
    Grpc,
    Life,
    Limits,
    Log,
    Prefill,
    Release,
    Routing,
    Tracing,
)
from extproc.configtext import parse_yaml
from extproc.errors import ConfigError


class Config(BaseSettings):
    """The whole file. Build one with :func:`load`, or from keyword arguments in tests."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=configenv.PREFIX,
        env_nested_delimiter=configenv.NESTING,
        env_ignore_empty=True,  # EXTPROC_FLEET__API_KEY= is how compose files and charts write "none"
        env_parse_none_str="null",
        nested_model_default_partial_update=True,
    )

    grpc: Grpc = Grpc()
    admin: Admin = Admin()
    fleet: Fleet
    prefill: Prefill = Prefill()
    routing: Routing = Routing()
    limits: Limits = Limits()
    release: Release = Release()
    life: Life = Life()
    log: Log = Log()
    tracing: Tracing = Tracing()
    envoy: Envoy = Envoy()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings


def load(path: Path | str) -> Config:
    """Read and validate a configuration file. Raises ConfigError, whose text names each key at fault."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        values = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return build(values, source=str(path))


def build(values: dict[str, Any], *, source: str = "configuration") -> Config:
    """Validate already parsed values (environment still wins). Raises ConfigError."""
    values = {key: value for key, value in values.items() if value is not None}  # a section of comments only
    problems = list(configenv.unknown(os.environ, Config))
    try:
        config = Config(**values)
    except ValidationError as error:
        problems += [configenv.line(os.environ, source, *fault) for fault in configtext.faults(error, Config)]
    except SettingsError as error:
        problems += configenv.unparsable(os.environ, Config, error)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def explain(error: ValidationError) -> list[str]:
    """One line for each key at fault in a watched fleet file. Values are not shown: they may be secrets."""
    return configtext.explain(error, EngineLists)
