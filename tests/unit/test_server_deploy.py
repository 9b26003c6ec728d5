"""Dockerfiles and the Kubernetes example against what the package really takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from portable_dit.catalog import load_recipe

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
BACKENDS = {path.parent.name for path in (ROOT / "backends").glob("*/pyproject.toml")}


def command_of(path: Path) -> list[str]:
    return json.loads(re.findall(r"^CMD (\[.*\])$", path.read_text(), re.MULTILINE)[-1])


def require_known(cli, arguments: list[str]) -> None:
    """Every flag is one of serve's, and the recipe is one that ships."""
    assert arguments[0] == "serve"
    known = cli("serve", "--help").stdout
    pairs = dict(re.findall(r"(--[a-z-]+)[ =](\S+)", " ".join(arguments[1:])))
    for flag in pairs:
        assert re.search(rf"{flag}\b", known), flag
    load_recipe(pairs["--recipe"])


def test_every_backend_and_the_cpu_have_a_dockerfile():
    assert {path.name.removesuffix(".Dockerfile") for path in DOCKERFILES} == BACKENDS | {"cpu"}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_serves_as_a_user_without_rights_and_can_be_watched(path, cli):
    text, name = path.read_text(), path.name.removesuffix(".Dockerfile")
    require_known(cli, command_of(path))
    assert text.index("USER draw") > text.index("pip install")
    assert "/health" in text
    assert "STOPSIGNAL SIGTERM" in text
    assert "serve" in re.findall(r'"/src\[([a-z0-9,]+)\]"', text)[0].split(",")
    if name != "cpu":
        assert f"/src/backends/{name}" in text


def test_the_kubernetes_example_probes_and_drains(cli):
    workload, service = yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text())
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    require_known(cli, container["args"])
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    deadline = next(float(arg.split("=")[1]) for arg in container["args"] if arg.startswith("--deadline"))
    assert pod["terminationGracePeriodSeconds"] > deadline
    assert service["spec"]["selector"] == workload["spec"]["template"]["metadata"]["labels"]
