"""Reads recorded signatures anew from a vendor's wheel or source archive, without importing any of it.

    PYTHONPATH=tests python -m mock_vendor.refresh backends/xpu/signatures/torch-2.13.0.json torch-2.14.1.whl

A record's `places` say where each signature stands: "torch/cuda/graphs.py:graph.__init__" for Python, or
"torch_npu/csrc/aten/npu_native_functions.yaml:npu_rms_norm" for a list of torch schemas ("func: NAME(...)").
What changed is printed as a diff; `--write NEW.json --version 2.14.1 --date 2026-11-30` writes a new record.
Exit status 1 when something changed or is gone.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Read = Callable[[str], str]


def signature_at(read: Read, place: str) -> str | None:
    """The signature at a place of a wheel; None when it is gone. read: a file's text by its path."""
    path, _, name = place.partition(":")
    try:
        text = read(path)
    except (KeyError, FileNotFoundError):
        return None
    return _from_schemas(text, name) if path.endswith((".yaml", ".yml")) else _from_python(text, name)


def _from_python(text: str, name: str) -> str | None:
    node: Any = ast.parse(text)
    for part in name.split("."):
        found = [
            n
            for n in ast.walk(node)
            if isinstance(n, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and n.name == part
        ]
        if not found:
            return None
        node = found[-1]  # the last definition is the one that counts
    return _written(node.args, is_method="." in name)


def _written(arguments: ast.arguments, *, is_method: bool) -> str:
    """Arguments with their defaults and without annotations, as inspect.signature writes them."""
    places = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(places) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [_argument(a, d) for a, d in zip(places, defaults, strict=True)]
    if arguments.posonlyargs:
        parts.insert(len(arguments.posonlyargs), "/")
    if is_method:
        parts = parts[1:]
    if arguments.vararg:
        parts.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [_argument(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        parts.append(f"**{arguments.kwarg.arg}")
    return f"({', '.join(parts)})"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    """A default that is a name of the vendor's module has no value here, and is written as None."""
    if default is None:
        return argument.arg
    try:
        return f"{argument.arg}={ast.literal_eval(default)!r}"
    except ValueError:
        return f"{argument.arg}=None"


def _from_schemas(text: str, name: str) -> str | None:
    found = re.search(rf"func:\s*({re.escape(name)}\(.*?\)\s*->\s*[^\n]+)", text)
    return found.group(1).strip().strip('"') if found else None


def reader(archive: Path) -> Read:
    """Reads files of a wheel, a source archive, or a folder."""
    if archive.is_dir():
        return lambda path: (archive / path).read_text()
    if zipfile.is_zipfile(archive):
        wheel = zipfile.ZipFile(archive)
        return lambda path: wheel.read(path).decode()
    source = tarfile.open(archive)  # noqa: SIM115
    root = source.getnames()[0].split("/")[0]

    def read(path: str) -> str:
        file = source.extractfile(f"{root}/{path}")
        assert file is not None
        return file.read().decode()

    return read


def refreshed(record: dict[str, Any], read: Read) -> dict[str, Any]:
    """The record with every signature as it stands in the archive; what is gone is left out."""
    found = dict(record)
    for kind in ("functions", "operators"):
        fresh = {
            name: signature
            for name in record.get(kind, {})
            if (signature := signature_at(read, record["places"][name])) is not None
        }
        if kind in record:
            found[kind] = fresh
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Reads recorded signatures anew.")
    parser.add_argument("record", type=Path)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--version")
    parser.add_argument("--date")
    given = parser.parse_args()
    before = json.loads(given.record.read_text())
    after = refreshed(before, reader(given.archive))
    if given.write:
        stamped = after | {k: v for k, v in (("version", given.version), ("date", given.date)) if v}
        given.write.write_text(json.dumps(stamped, indent=1) + "\n")
    old, new = (json.dumps(r, indent=1).splitlines() for r in (before, after))
    lines = list(difflib.unified_diff(old, new, str(given.record), str(given.archive), lineterm="", n=1))
    print("\n".join(lines) if lines else "nothing changed")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
