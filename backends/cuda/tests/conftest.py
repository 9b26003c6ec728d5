"""What the tests share: the package on the path, recorded machines, stand-ins for vendor packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vendor_stand_ins import StandIns

HERE = Path(__file__).parent
MACHINES = HERE.parents[2] / "tests" / "data" / "machines"
sys.path.insert(0, str(HERE.parent))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    """The vendor packages' functions, by their recorded signatures."""
    from portable_dit_cuda.flash import library_function

    library_function.cache_clear()
    made = StandIns()
    made.install(monkeypatch)
    yield made
    library_function.cache_clear()


@pytest.fixture
def machine() -> Callable[..., Any]:
    """Capabilities of a recorded machine by name, with these kernel libraries."""
    from dataclasses import replace

    from portable_dit.machine_file import load_machine

    def load(name: str, **libraries: str) -> Any:
        found = load_machine(MACHINES / f"{name}.json")
        return replace(found, libraries={n.replace("_", "-"): v for n, v in libraries.items()})

    return load
