"""Generate the protobuf and gRPC stubs from protos/ into extproc/pb/ whenever the package is built or installed."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
PACKAGE = "extproc/pb"


def generate(root: Path = ROOT) -> list[Path]:
    """Compile every .proto below ``root/protos`` and return the files compiled.

    The import path maps ``extproc/pb`` onto ``protos``, so the generated modules import each other from inside our
    package and need no rewriting. The messages keep Envoy's full names, as the wire demands: a process that loads
    another copy of them into protobuf's default pool cannot load ours.
    """
    from grpc_tools import protoc

    sources = sorted((root / "protos").rglob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    # Made elsewhere and then put in place, so a mistake in a .proto leaves the working stubs alone.
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [
            "protoc",
            f"-I{PACKAGE}={root / 'protos'}",
            f"-I{well_known}",
            f"--python_out={scratch}",
            f"--pyi_out={scratch}",
            f"--grpc_python_out={scratch}",
            *(f"{PACKAGE}/{source.relative_to(root / 'protos').as_posix()}" for source in sources),
        ]
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc could not compile protos/; its messages are above")
        made = Path(scratch) / PACKAGE
        for folder in (made, *(path for path in made.rglob("*") if path.is_dir())):
            (folder / "__init__.py").touch()
        shutil.rmtree(root / PACKAGE, ignore_errors=True)
        shutil.copytree(made, root / PACKAGE)
    return sources


class StubsHook(BuildHookInterface[Any]):
    """Hatchling calls this before it collects files, for wheels and editable installs alike."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel":
            generate(Path(self.root))


if __name__ == "__main__":
    sys.stdout.write(f"{len(generate())} files compiled\n")
