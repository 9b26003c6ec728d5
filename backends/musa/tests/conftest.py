"""The packages on the path, and the fixtures that vendors' packages share."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "tests")]

from mock_vendor.fixtures import machine, mocked  # noqa: E402

__all__ = ["machine", "mocked"]
