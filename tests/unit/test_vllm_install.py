"""Installing and starting real engines, as far as it goes without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.demo.vllm import install
from extproc.demo.vllm.install import Installation, find
from extproc.demo.vllm.launch import VllmEngine
from extproc.errors import ConfigError


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(python=tmp_path / "venv/bin/python", model=tmp_path / "model")


def complete(venv: Path) -> None:
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").touch()
    (venv / ".installed").write_text(install._contents())


def test_what_is_missing_is_said_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTPROC_VLLM_VENV", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"not installed in .*/nowhere: run `make vllm` \(3.9 GB of disk\)"):
        find()


def test_a_complete_installation_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTPROC_VLLM_VENV", str(tmp_path / "venv"))
    monkeypatch.setattr(install, "model_path", lambda: tmp_path / "model")
    complete(tmp_path / "venv")
    with pytest.raises(ConfigError):
        find()
    (tmp_path / "model").mkdir()
    assert find() == Installation(tmp_path / "venv/bin/python", tmp_path / "model")


@pytest.mark.parametrize("stamp", [None, "", "of other requirements"])
def test_an_interrupted_or_older_installation_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stamp: str | None
) -> None:
    monkeypatch.setenv("EXTPROC_VLLM_VENV", str(tmp_path / "venv"))
    complete(tmp_path / "venv")
    assert install._is_installed(tmp_path / "venv")
    if stamp is None:
        (tmp_path / "venv/.installed").unlink()
    else:
        (tmp_path / "venv/.installed").write_text(stamp)
    assert not install._is_installed(tmp_path / "venv")


def test_too_little_disk_is_said_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTPROC_VLLM_VENV", str(tmp_path / "venv"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000_000})())
    with pytest.raises(ConfigError, match=r"has 1.0 GB free, vLLM needs 3.9"):
        install.install()
    assert not (tmp_path / "venv").exists()


def kv_transfer_config(engine: VllmEngine) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(engine.command[engine.command.index("--kv-transfer-config") + 1])
    return config


def test_a_stock_prefiller(tmp_path: Path, installation: Installation) -> None:
    engine = VllmEngine("prefill", directory=tmp_path, lease_s=12, installation=installation)
    assert kv_transfer_config(engine) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": 12},
    }
    assert engine.command[:3] == [str(installation.python), "-m", "vllm.entrypoints.openai.api_server"]
    assert engine.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(engine.side_channel_port)
    assert engine.env["PYTHONPATH"] == str(install.HERE / "two_cores")
    assert engine.abort_port is None


def test_a_prefiller_with_the_plugin_sees_this_package_alone(tmp_path: Path, installation: Installation) -> None:
    engine = VllmEngine("prefill", directory=tmp_path, plugin=True, installation=installation)
    config = kv_transfer_config(engine)
    assert config["kv_connector"] == "AbortableNixlConnector"
    assert config["kv_connector_module_path"] == "extproc.vllm_plugin.nixl"
    assert config["kv_connector_extra_config"]["abort_port"] == engine.abort_port
    _, folder = engine.env["PYTHONPATH"].split(":")
    assert [path.name for path in Path(folder).iterdir()] == ["extproc"]
    assert (Path(folder) / "extproc/vllm_plugin/nixl.py").is_file()


def test_a_decoder_and_a_plain_engine(tmp_path: Path, installation: Installation) -> None:
    decode = VllmEngine("decode", directory=tmp_path, load_failure_policy="recompute", installation=installation)
    assert kv_transfer_config(decode)["kv_role"] == "kv_consumer"
    assert kv_transfer_config(decode)["kv_load_failure_policy"] == "recompute"
    plain = VllmEngine("plain", directory=tmp_path, installation=installation)
    assert "--kv-transfer-config" not in plain.command
    with pytest.raises(ValueError, match="the plugin is for prefillers, not for role 'decode'"):
        VllmEngine("decode", directory=tmp_path, plugin=True, installation=installation)
