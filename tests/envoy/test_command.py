"""`extproc serve` and `extproc demo` as a user starts them: what they say, and how they end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.envoy


def extproc(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("EXTPROC_")}
    command = [sys.executable, "-m", "extproc", *arguments]
    return subprocess.run(command, env=own | environment, capture_output=True, text=True, timeout=110, check=False)


def written(path: Path, **sections: object) -> str:
    values = {
        "grpc": {"listen": "127.0.0.1:0"},
        "admin": {"listen": "127.0.0.1:0"},
        "fleet": {"decode": [{"url": "http://127.0.0.1:1"}]},
    }
    (path / "extproc.yaml").write_text(yaml.safe_dump({**values, **sections}))
    return str(path / "extproc.yaml")


def test_a_bad_configuration_ends_with_2_and_names_the_keys(tmp_path: Path) -> None:
    file = written(tmp_path, prefil={"attempts": 2}, fleet={"decode": [{"url": "10.0.0.8:8000"}]})
    ended = extproc("serve", "--config", file)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == [
        f"{file}: fleet.decode[0].url: expected a URL like http://host:port",
        f"{file}: prefil: unknown key; did you mean 'prefill'?",
    ]


def test_a_port_in_use_ends_with_2_and_names_the_key(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = extproc("serve", "--config", written(tmp_path, grpc={"listen": address}))
    assert ended.returncode == 2
    *lines, last = ended.stderr.splitlines()
    assert last == f"grpc.listen: {address} cannot be bound: Address already in use"
    assert all("[info     ] engine added" in line for line in lines)  # and nothing of gRPC's own


def test_the_demo_shows_that_all_is_well() -> None:
    ended = extproc("demo", "--once")
    assert "✗" not in ended.stdout
    assert ended.stdout.count("✓") == 6
    assert ended.stdout.splitlines()[-1] == "all as it should be"
    assert (ended.returncode, ended.stderr) == (0, "")
