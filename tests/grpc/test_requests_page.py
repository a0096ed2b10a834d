"""docs/requests.md lists every error that the service answers with, and the limits as they are."""

from __future__ import annotations

import re
from pathlib import Path

from extproc.configsections import Limits
from extproc.telemetry.labels import ERROR_CODES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "requests.md").read_text()


def test_every_error_is_listed_with_its_status() -> None:
    source = "\n".join(file.read_text() for file in (ROOT / "extproc").rglob("*.py") if "pb" not in file.parts)
    raised = {code: status for status, code in re.findall(r'RequestError\(\s*(\d+),\s*"(\w+)"', source)}
    listed = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGE, re.MULTILINE))
    assert listed == raised
    assert set(raised) == set(ERROR_CODES)
    assert list(listed.values()) == sorted(listed.values())


def test_the_limits_are_the_defaults() -> None:
    defaults = Limits()
    assert (defaults.body_bytes, defaults.header_bytes) == (32 * 1024 * 1024, 56 * 1024)
    assert "| `limits.body_bytes` | 32 MiB |" in PAGE
    assert f"| `limits.header_bytes`, `limits.headers` | 56 KiB, {defaults.headers} |" in PAGE
    for key in ("json_depth", "body_timeout_s", "exchange_s", "in_flight"):
        assert f"| `limits.{key}` | {getattr(defaults, key):,.0f} |" in PAGE
    for key in Limits.model_fields:
        assert f"`limits.{key}`" in PAGE
