"""Dockerfiles and the Kubernetes example against what the package really takes."""

from __future__ import annotations

import json
import re
from importlib.metadata import entry_points, metadata
from pathlib import Path

import pytest
import yaml

from portable_dit.catalog import load_recipe
from portable_dit.server.settings import KEYS_VARIABLE, Settings

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


INSTRUCTIONS = {
    *("ARG", "FROM", "RUN", "COPY", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"),
    *("CMD", "ENV"),
}


def instructions_of(path: Path) -> list[tuple[str, str]]:
    """(instruction, the rest) of each line that is no comment, continued lines as one."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in whole if line.strip()]  # type: ignore[misc]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_names_what_there_is(path):
    """Instructions, extras, folders, the port and the probe's own program."""
    found = instructions_of(path)
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert found[0] == ("ARG", found[0][1])
    assert found[1] == ("FROM", "${BASE}")
    text = path.read_text()
    (extras,) = re.findall(r'"/src\[([a-z0-9,]+)\]"', text)
    assert set(extras.split(",")) <= set(metadata("portable-dit").get_all("Provides-Extra"))
    for folder in re.findall(r"/src/(\S+)", text):
        assert (ROOT / folder / "pyproject.toml").is_file(), folder
    assert dict(found)["EXPOSE"] == str(Settings().port)
    (command,) = json.loads(dict(found)["ENTRYPOINT"])
    assert command in entry_points(group="console_scripts").names
    program = json.loads(dict(found)["HEALTHCHECK"].partition("CMD ")[2])
    compile(program[2], str(path), "exec")
    assert f":{Settings().port}/health" in program[2]


def test_every_variable_of_an_example_is_one_that_is_read():
    """Names of ours; others are of libraries, which are named here."""
    known = {KEYS_VARIABLE, "HF_HOME", "PATH"}
    for document in yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text()):
        for container in document["spec"].get("template", {"spec": {}})["spec"].get("containers", []):
            assert {entry["name"] for entry in container["env"]} <= known
    for path in DOCKERFILES:
        for name, rest in instructions_of(path):
            assert name != "ENV" or rest.partition("=")[0] in known, path


def test_the_kubernetes_example_probes_and_drains(cli):
    workload, service = yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text())
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    require_known(cli, container["args"])
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    deadline = next(float(arg.split("=")[1]) for arg in container["args"] if arg.startswith("--deadline"))
    assert pod["terminationGracePeriodSeconds"] > deadline
    (port,) = container["ports"]
    assert port["containerPort"] == Settings().port
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    claimed = {claim["metadata"]["name"] for claim in workload["spec"]["volumeClaimTemplates"]}
    assert mounted == claimed | {volume["name"] for volume in pod["volumes"]}
    assert workload["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == workload["spec"]["template"]["metadata"]["labels"]
