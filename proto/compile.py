# a script beside the definitions, not a package
"""Compiles the protocol definitions of this directory into the Python package `sidecar.extproc.pb`.

Usage: python proto/compile.py [outdir]

The generated modules import each other below `sidecar.extproc.pb`, never a top-level package `envoy`: other
distributions install one. No gRPC stub is generated; the service is registered under its method's path.
"""

from __future__ import annotations

import re
import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]  # ships no stubs

SOURCES = Path(__file__).resolve().parent
PACKAGE = "sidecar.extproc.pb"
DEFAULT_OUTPUT = SOURCES.parent.joinpath(*PACKAGE.split("."))

_ENVOY_IMPORT = re.compile(r"^(from|import) envoy\b", re.MULTILINE)


def compile_protos(output: Path) -> list[Path]:
    """Compile every definition into `output` (modules and type stubs).

    Returns:
        The files written, relative to `output`, in sorted order.

    Raises:
        RuntimeError: protoc refused a definition; it has printed why.
    """
    protos = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.proto"))
    output.mkdir(parents=True, exist_ok=True)
    bundled = resources.files("grpc_tools") / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={SOURCES}",
            f"--proto_path={bundled}",
            f"--python_out={output}",
            f"--pyi_out={output}",
            *protos,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}")
    written = [
        Path(proto).with_name(f"{Path(proto).stem}_pb2{end}") for proto in protos for end in (".py", ".pyi")
    ]
    for path in written:
        _rehome(output / path)
    packages = {parent for path in written for parent in path.parents} | {Path()}
    for package in packages:
        init = package / "__init__.py"
        (output / init).write_text("")
        written.append(init)
    return sorted(written)


def _rehome(path: Path) -> None:
    """Point the imports of one generated file below `PACKAGE`."""
    text = path.read_text()
    path.write_text(_ENVOY_IMPORT.sub(rf"\1 {PACKAGE}.envoy", text))


if __name__ == "__main__":
    for generated in compile_protos(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_OUTPUT):
        print(generated)  # noqa: T201  # a command-line tool reports on standard output
