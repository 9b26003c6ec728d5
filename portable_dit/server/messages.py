"""What the server and a worker process say to each other over their socket, as pickled frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portable_dit.recipe import Recipe
from portable_dit.request import ResolvedRequest

# Server to worker


@dataclass(frozen=True)
class Load:
    """The first message: what to load. profile: the file of a Chrome trace, None for none."""

    recipe: Recipe
    strict: bool = False
    profile: Path | None = None


@dataclass(frozen=True, eq=False)
class Order:
    """A request. preview_steps: after which steps a preview is wanted. quality: of JPEG and WebP."""

    id: str
    request: ResolvedRequest
    preview_steps: frozenset[int] = frozenset()
    quality: int = 92


@dataclass(frozen=True, eq=False)
class Draw:
    """Draw these next, side by side if they can be."""

    orders: tuple[Order, ...]


@dataclass(frozen=True)
class Cancel:
    """Stop that request at its next step."""

    id: str


@dataclass(frozen=True)
class Ping:
    """Say that you are there."""


# Worker to server


@dataclass(frozen=True)
class Loading:
    """A component is being loaded: so many bytes of so many are read."""

    component: str
    done: int
    total: int


@dataclass(frozen=True)
class Loaded:
    """The model can draw at so many places at once, and side by side at each so many pictures of one shape.

    facts: what /server_info tells, JSON-able.
    """

    seconds: float
    places: int
    batch: int
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class LoadFailed:
    """The recipe cannot be loaded, for a reason that will not go away by trying again."""

    message: str
    exit_code: int


@dataclass(frozen=True)
class Pong:
    """The worker is there. quiet_seconds: since its drawing last moved, 0 when it is idle.

    resident_bytes: of the process. device_bytes: (free, total), None where the device does not say.
    energy_joules: what the device has used so far, None where it does not say.
    """

    quiet_seconds: float
    resident_bytes: int
    device_bytes: tuple[int, int] | None
    energy_joules: float | None


@dataclass(frozen=True)
class Begun:
    """Work on a request has begun; until then it waits, be it for a replica that others have taken."""

    id: str


@dataclass(frozen=True)
class Stepped:
    """A step of an image is done. preview: a small PNG, when one was wanted after this step."""

    id: str
    image: int
    step: int
    steps: int
    preview: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Free:
    """A place has nothing to do, though files of these requests may still be in the making.

    whole: every one of them was drawn to its end.
    """

    ids: tuple[str, ...]
    whole: bool


@dataclass(frozen=True)
class PictureFile:
    """One picture as a file, with the seconds that each of its stages took. batch, wanted: see `Picture`."""

    data: bytes = field(repr=False)
    format: str
    width: int
    height: int
    seed: int
    seconds: Mapping[str, float]
    batch: int = 1
    wanted: int = 1


@dataclass(frozen=True)
class FileDone:
    id: str
    file: PictureFile


@dataclass(frozen=True)
class Summary:
    """What a whole request took. seconds: by stage, and "total". notes, changes: as in `Result`."""

    seconds: Mapping[str, float]
    peak_bytes: int | None
    notes: tuple[str, ...]
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """Everything of that request was sent. error: why there is no summary; fatal: the worker goes with it."""

    id: str
    summary: Summary | None = None
    error: BaseException | None = None
    fatal: bool = False


Message = Loading | Loaded | LoadFailed | Pong | Begun | Stepped | Free | FileDone | Ended
