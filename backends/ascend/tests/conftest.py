"""The package and the mocked machines on the path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "tests"), str(HERE)]


@pytest.fixture(scope="session")
def ascend_machine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], object]:
    """A mocked machine by its variant, the same one for all tests."""
    from mock_vendor.process import MockedMachine

    made: dict[str, MockedMachine] = {}

    def machine(variant: str) -> MockedMachine:
        if variant not in made:
            made[variant] = MockedMachine("ascend", variant, tmp_path_factory.mktemp(f"ascend-{variant}"))
        return made[variant]

    return machine
