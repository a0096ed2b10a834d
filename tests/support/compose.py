"""What docker-compose.yml and the Dockerfile say, read the way Docker reads them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def compose_command() -> list[str]:
    """Debian's ``docker-compose`` or Docker's plugin. Skips the test where there is none, except on CI."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    missing = "needs docker-compose (Debian: apt-get install docker-compose)"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


def compose_config(profile: str, values: Mapping[str, str] | None = None, env: str = "") -> dict[str, Any]:
    """``docker-compose config``, its services being those of the profile, all filled in.

    ``values`` is its whole environment, ``env`` the text of its .env file.
    """
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **(values or {})}
    with tempfile.NamedTemporaryFile("w", suffix=".env") as env_file:
        env_file.write(env)
        env_file.flush()
        command = [*compose_command(), "--env-file", env_file.name, "--profile", profile, "config"]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "variable is not set" not in result.stderr, result.stderr
    config = yaml.safe_load(result.stdout)
    assert isinstance(config, dict)
    # Version 1 prints the services of all profiles.
    services = config["services"].items()
    config["services"] = {name: one for name, one in services if profile in one.get("profiles", [profile])}
    return config


def dockerfile() -> dict[str, list[str]]:
    """Instructions of the Dockerfile's last stage by name, each with its arguments in order; COPY holds all stages'."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    last = max(number for number, (name, _) in enumerate(lines) if name == "FROM")
    instructions: dict[str, list[str]] = {}
    for number, (name, arguments) in enumerate(lines):
        if number >= last or name == "COPY":
            instructions.setdefault(name, []).append(arguments)
    return instructions


def exec_form(arguments: str) -> list[str]:
    """The JSON array of an instruction like ``CMD ["a", "b"]``, whatever stands before it."""
    values = json.loads(arguments[arguments.index("[") :])
    assert isinstance(values, list)
    return [str(value) for value in values]
