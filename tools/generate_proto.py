"""Generates engine_client/wire/ from proto/grammar/v1/, or checks that it is current.

Run it through ``make proto`` and ``make proto-check``: it needs grpcio-tools and mypy-protobuf in
the versions of constraints-proto.txt, which live in an environment of their own (.venv-proto).
That release of grpcio-tools is chosen for its output: the code carries no check of the protobuf
runtime's version, so that one generated file works beside whatever protobuf an engine pins.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
PROTO_PACKAGE = "grammar.v1"
TARGET_PACKAGE = "engine_client.wire"
TARGET = ROOT.joinpath(*TARGET_PACKAGE.split("."))
INIT = '"""Generated from proto/grammar/v1 by `make proto`; edit the protos instead."""\n'


def flatten(text: str) -> str:
    """Moves every mention of a generated module from the proto package to the target package."""
    package = re.escape(PROTO_PACKAGE)
    path = re.escape(PROTO_PACKAGE.replace(".", "/"))
    text = re.sub(
        rf"^from {package} import (\w+_pb2)\b",
        rf"from {TARGET_PACKAGE} import \1",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(rf"\b{package}\.(\w+_pb2)", rf"{TARGET_PACKAGE}.\1", text)
    return re.sub(rf"\b{path}/(\w+_pb2)", rf"{TARGET_PACKAGE.replace('.', '/')}/\1", text)


def generate() -> dict[str, str]:
    """Runs protoc and returns the text of each file that belongs in the target, by name."""
    protos = sorted((PROTO_ROOT / PROTO_PACKAGE.replace(".", "/")).glob("*.proto"))
    if not protos:
        raise SystemExit(f"no protos for {PROTO_PACKAGE} under {PROTO_ROOT}")
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    with tempfile.TemporaryDirectory() as out:
        command = [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO_ROOT)),
            *(f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"),
            *(f"--plugin=protoc-gen-mypy_grpc={plugin}", f"--mypy_grpc_out=quiet:{out}"),
            *(str(proto) for proto in protos),
        ]
        subprocess.run(command, check=True)
        files = {path.name: flatten(path.read_text("utf-8")) for path in Path(out).rglob("*.py*")}
    files["__init__.py"] = INIT
    return files


def present() -> dict[str, str]:
    """Returns the text of each file that the target has now, by name."""
    return {path.name: path.read_text("utf-8") for path in TARGET.glob("*.py*")}


def main() -> int:
    """Writes the files, or compares them; 1 when they differ from what is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    check = parser.parse_args().check

    wanted, found = generate(), present()
    names = wanted.keys() | found.keys()
    stale = sorted(name for name in names if wanted.get(name) != found.get(name))
    if check:
        for name in stale:
            print(f"stale: {(TARGET / name).relative_to(ROOT)}", file=sys.stderr)
        if stale:
            print("run `make proto` and commit the result", file=sys.stderr)
        return 1 if stale else 0

    TARGET.mkdir(parents=True, exist_ok=True)
    for name in stale:
        if name in wanted:
            (TARGET / name).write_text(wanted[name], "utf-8")
        else:
            (TARGET / name).unlink()
        print(f"{'wrote' if name in wanted else 'removed'} {(TARGET / name).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
