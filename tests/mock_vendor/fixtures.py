"""Fixtures for the tests of a backend package: recorded machines, and mocked ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mock_vendor.process import ROOT, MockedMachine
from portable_dit.capabilities import Capabilities
from portable_dit.machine_file import load_machine


@pytest.fixture
def machine() -> Callable[..., Capabilities]:
    """Capabilities of a recorded machine by name, with these kernel libraries."""

    def load(name: str, **libraries: str) -> Capabilities:
        found = load_machine(ROOT / "tests" / "data" / "machines" / f"{name}.json")
        return replace(found, libraries={n.replace("_", "-"): v for n, v in libraries.items()})

    return load


@pytest.fixture(scope="module")
def mocked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], MockedMachine]:
    """The mocked machine of a variant, for the package that the tests lie in; one for all of a file."""
    name = request.path.parents[1].name
    made: dict[str, MockedMachine] = {}

    def get(variant: str) -> MockedMachine:
        if variant not in made:
            made[variant] = MockedMachine(name, variant, tmp_path_factory.mktemp("machine"))
        return made[variant]

    return get
