"""The matrix of a workflow, from ci/lanes.toml: `python ci/matrix.py "cuda xpu"` prints it as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from lane import lanes


def matrix(wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Name, image and runner of each lane that is wanted. Raises SystemExit for a name that no lane has."""
    known = lanes()
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"lanes: {', '.join(unknown)} not among {', '.join(known)}")
    return [{"lane": name, "image": known[name]["image"], "runner": known[name]["runner"]} for name in wanted]


if __name__ == "__main__":
    print(json.dumps(matrix(" ".join(sys.argv[1:]).split())))
