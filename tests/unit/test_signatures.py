"""Recorded signatures of vendors' functions: what they hold, what binds, and how they are read anew."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from mock_vendor.refresh import refreshed, signature_at
from mock_vendor.signatures import Recorded, build, load

ROOT = Path(__file__).parents[2]
ENDED = {"intel_extension_for_pytorch"}  # there will be no release after the recorded one
FOLDERS = sorted(path for path in (ROOT / "backends").glob("*/signatures") if any(path.iterdir()))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.parent.name)
def test_every_library_is_recorded_at_two_versions_with_source_and_date(folder):
    versions: dict[str, set[str]] = {}
    for record in load(folder):
        assert record.source
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", record.date)
        assert record.functions or record.operators
        versions.setdefault(record.library, set()).add(record.version)
        for name, signature in record.functions.items():
            assert callable(build(signature, lambda given: None)), name
    assert {library for library, found in versions.items() if len(found) < 2} <= ENDED


RECORD = Recorded(
    "lib",
    "1.0",
    "its wheel",
    "2026-11-30",
    functions={"lib.attend": "(q, k, *, scale=None)"},
    operators={"ns::mul": "mul(Tensor x, Tensor y, *, float scale=1.0, int? dtype=None) -> Tensor"},
)


@pytest.mark.parametrize(
    ("name", "positional", "keywords", "why"),
    [
        ("lib.attend", 2, ["scale"], None),
        ("lib.attend", 3, [], "too many positional arguments"),
        ("lib.attend", 2, ["softmax_scale"], "unexpected keyword argument 'softmax_scale'"),
        ("ns::mul", 2, ["scale", "dtype"], None),
        ("ns::mul", 1, ["y"], None),
        ("ns::mul", 1, [], "missing argument 'y'"),
        ("ns::mul", 2, ["out_dtype"], "unknown keyword argument 'out_dtype'"),
        ("ns::mul", 3, [], "takes 2 positional arguments"),
    ],
)
def test_a_call_binds_or_the_reason_is_told(name, positional, keywords, why):
    found = RECORD.binds(name, positional, keywords)
    assert (found is None) if why is None else (why in found)


SOURCE = """
DEFAULT = 3

def attend(q: int, k, *, scale: float = 0.5, kind=DEFAULT): ...

class graph:
    def __init__(self, graph, pool=None, *args, mode: str = "global", **rest): ...
"""
YAML = "- func: npu_swiglu(Tensor self, int dim=-1) -> Tensor\n  dispatch: ...\n"


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "lib-2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("lib/ops.py", SOURCE)
        file.writestr("lib/functions.yaml", YAML)
    return path


@pytest.mark.parametrize(
    ("place", "signature"),
    [
        ("lib/ops.py:attend", "(q, k, *, scale=0.5, kind=None)"),
        ("lib/ops.py:graph.__init__", "(graph, pool=None, *args, mode='global', **rest)"),
        ("lib/functions.yaml:npu_swiglu", "npu_swiglu(Tensor self, int dim=-1) -> Tensor"),
        ("lib/ops.py:gone", None),
        ("lib/gone.py:attend", None),
    ],
)
def test_a_signature_is_read_from_its_place_without_importing(wheel, place, signature):
    from mock_vendor.refresh import reader

    assert signature_at(reader(wheel), place) == signature


def test_the_refresh_script_shows_what_changed_and_writes_the_new_record(wheel, tmp_path):
    before = {
        "library": "lib",
        "version": "1.0",
        "source": "its wheel",
        "date": "2026-01-01",
        "functions": {"lib.attend": "(q, k, *, scale=1.0)", "lib.gone": "(x)"},
        "places": {"lib.attend": "lib/ops.py:attend", "lib.gone": "lib/ops.py:gone"},
    }
    old, new = tmp_path / "lib-1.0.json", tmp_path / "lib-2.0.json"
    old.write_text(json.dumps(before))
    command = [sys.executable, "-m", "mock_vendor.refresh", old, wheel, "--write", new]
    stamp = ["--version", "2.0", "--date", "2026-11-30"]
    done = subprocess.run([*command, *stamp], cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert '-  "lib.attend": "(q, k, *, scale=1.0)"' in done.stdout
    written = json.loads(new.read_text())
    assert (written["version"], written["date"]) == ("2.0", "2026-11-30")
    assert written["functions"] == {"lib.attend": "(q, k, *, scale=0.5, kind=None)"}
    from mock_vendor.refresh import reader

    assert refreshed(written, reader(wheel)) == written
