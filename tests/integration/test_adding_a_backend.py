"""docs/adding-a-backend.md, taken at its word: the package it builds passes the tests it gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-a-backend.md"


def files_of(page: Path) -> dict[str, str]:
    """The text of every block that names a file."""
    return dict(re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sixth")
    for name, text in files_of(PAGE).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "backends" / "gizmo"


def test_the_page_has_every_file_that_a_package_has():
    brought = {Path(name).relative_to("backends/gizmo").as_posix() for name in files_of(PAGE)}
    assert {"pyproject.toml", "signatures/gizmo-1.0.json", "tests/mock_gizmo.py"} <= brought
    assert len(brought) >= 6


def test_the_package_from_the_page_passes_its_own_tests(package):
    path = os.pathsep.join(str(folder) for folder in (ROOT / "tests", package, ROOT))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, package / "tests"],
        cwd=package,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "3 passed" in done.stdout


def test_the_package_from_the_page_is_written_as_the_house_wants_it(package):
    ruff = [sys.executable, "-m", "ruff", "check", "--config", ROOT / "pyproject.toml", package]
    done = subprocess.run(ruff, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
