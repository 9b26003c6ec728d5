"""What the tests share: the packages on the path, recorded machines, mocked machines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parents[2] / "tests"
sys.path[:0] = [str(HERE.parent), str(TESTS)]


@pytest.fixture
def machine() -> Callable[..., Any]:
    """Capabilities of a recorded machine by name, with these kernel libraries."""
    from portable_dit.machine_file import load_machine

    def load(name: str, **libraries: str) -> Any:
        found = load_machine(TESTS / "data" / "machines" / f"{name}.json")
        return replace(found, libraries={n.replace("_", "-"): v for n, v in libraries.items()})

    return load


@pytest.fixture(scope="session")
def mocked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The mocked machine of a variant, one for all tests of this process."""
    from mock_vendor.process import MockedMachine

    made: dict[str, Any] = {}

    def get(variant: str) -> Any:
        if variant not in made:
            made[variant] = MockedMachine(HERE.parent.name, variant, tmp_path_factory.mktemp("machine"))
        return made[variant]

    return get
