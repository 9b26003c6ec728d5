"""What leaves the checkout: the wheel and the sdist, built offline and read back."""

import os
import stat
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

from portable_dit import __version__

ROOT = Path(__file__).parents[2]
MAX_WHEEL_BYTES = 30_000_000
CACHES = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    assert path.name == f"portable_dit-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as archive:
        yield archive


def files_under(folder: Path) -> set[str]:
    """Files as paths relative to the folder, caches left out."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not CACHES & set(path.parts) and path.suffix != ".pyc"}


def test_the_wheel_holds_the_package_recipes_machines_and_nothing_else(wheel):
    wanted = {f"portable_dit/{name}" for name in files_under(ROOT / "portable_dit")}
    wanted |= {f"portable_dit/recipes/{name}" for name in files_under(ROOT / "recipes")}
    wanted |= {f"portable_dit/machines/{name}" for name in files_under(ROOT / "tests" / "data" / "machines")}
    information = f"portable_dit-{__version__}.dist-info/"
    found = {name for name in wheel.namelist() if not name.startswith(information)}
    assert found == wanted
    assert {"portable_dit/py.typed", "portable_dit/recipes/cpu/h3-mini.yaml"} <= found
    builtin = "portable_dit/models/h3_mini"
    assert {f"{builtin}/manifest.json", f"{builtin}/text_encoder/vocab.txt"} <= found
    assert {f"{builtin}/{part}/model.safetensors" for part in ("transformer", "vae", "text_encoder")} <= found
    assert {f"{information}licenses/LICENSE", f"{information}licenses/NOTICE"} <= set(wheel.namelist())


def test_the_wheel_is_small_enough_to_ship_with_its_model(wheel):
    assert Path(wheel.filename).stat().st_size <= MAX_WHEEL_BYTES


BUILTIN_SUITE = """
import sys
import portable_dit
from portable_dit.evaluation.builtin.cases import CASES, load_cases
from portable_dit.evaluation.builtin.gates import evaluate_served
assert portable_dit.__file__.startswith(sys.argv[1])
print(len(load_cases(CASES).cases), "training" in sys.modules)
"""


def test_the_built_in_suite_needs_the_wheel_alone(wheel, tmp_path):
    wheel.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", BUILTIN_SUITE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    cases, trained = done.stdout.split()
    assert int(cases) > 150
    assert trained == "False"


def test_everybody_may_read_what_the_wheel_installs_and_nothing_is_a_link(wheel):
    for member in wheel.infolist():
        mode = member.external_attr >> 16
        assert stat.S_IFMT(mode) in (stat.S_IFREG, 0), member.filename
        assert stat.S_IMODE(mode) == 0o644, member.filename


def test_the_metadata_names_the_command_and_an_extra_for_each_package_in_backends(wheel):
    information = f"portable_dit-{__version__}.dist-info"
    metadata = Parser().parsestr(wheel.read(f"{information}/METADATA").decode())
    assert metadata["Requires-Python"] == "<3.14,>=3.10"
    assert (
        "portable-dit = portable_dit.__main__:main" in wheel.read(f"{information}/entry_points.txt").decode()
    )
    packages = {path.parent.name for path in (ROOT / "backends").glob("*/pyproject.toml")}
    requirements = metadata.get_all("Requires-Dist")
    vendors = {
        requirement.split(";")[0].removeprefix("portable-dit-").strip()
        for requirement in requirements
        if requirement.startswith("portable-dit-")
    }
    assert vendors == packages
    assert vendors <= set(metadata.get_all("Provides-Extra"))


def test_the_unpacked_wheel_finds_its_recipes_and_weights_far_from_the_checkout(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    wheel.extractall(site)
    elsewhere.mkdir()
    code = (
        "import pathlib, sys, portable_dit; from portable_dit import catalog, recipe; "
        "wish = catalog.load_recipe('cpu/h3-mini'); "
        "print(portable_dit.__file__, recipe.named_recipes()['cpu/h3-mini'], catalog.checkpoint_folder(wish))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    for place in answer.stdout.split():
        assert Path(place).is_relative_to(site), place
    verify = [sys.executable, "-m", "portable_dit", "weights", "verify", "builtin"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run(verify, cwd=elsewhere, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=120)


def test_the_sdist_is_the_source_without_what_was_built_or_installed_here(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    top = f"portable_dit-{__version__}"
    names = {PurePosixPath(member.name).relative_to(top).as_posix() for member in members}
    wanted = {"README.md", "LICENSE", "NOTICE", "Makefile", "conftest.py", "pyproject.toml"}
    wanted |= {"constraints-dev.txt"}
    wanted |= {f"portable_dit/{name}" for name in files_under(ROOT / "portable_dit")}
    wanted |= {f"recipes/{name}" for name in files_under(ROOT / "recipes")}
    wanted |= {f"tests/{name}" for name in files_under(ROOT / "tests")}
    assert wanted <= names
    folders = {"portable_dit", "recipes", "backends", "tests", "docs", "training", "ci", ".ci"}
    files = wanted | {"PKG-INFO", ".gitignore"}
    assert {name.partition("/")[0] for name in names} <= folders | files
    assert not [name for name in names if CACHES & set(name.split("/"))]
    assert not [member.name for member in members if not member.isfile()]
