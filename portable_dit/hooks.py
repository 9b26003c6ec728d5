"""The hooks through which other packages extend portable-dit, each documented where it is declared.

A package advertises a module (or any object) under the entry-point group `portable_dit.backends`:

    [project.entry-points."portable_dit.backends"]
    mydevice = "portable_dit_mydevice"

and marks its functions there with `portable_dit.hooks.hookimpl`. Advertise each backend under the backend's
own id, so that a user who names it is told why it could not be loaded. The module must import without its
device: heavy imports belong in `Backend.activate`. Every hook returns a list, and [] when it has nothing to
give here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from portable_dit.backend import AttentionKernel, Backend, FusedOp, LinearKernel
    from portable_dit.models.spec import Family

PROJECT = "portable_dit"
ENTRY_POINT_GROUP = "portable_dit.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def portable_dit_backends() -> Sequence[Backend]:  # type: ignore[empty-body]
    """Backends, as light objects. `devices()` of each is asked when no recipe names a backend."""


@hookspec
def portable_dit_attention_kernels(backend: str) -> Sequence[AttentionKernel]:  # type: ignore[empty-body]
    """Further attention kernels for that backend. They come after its own; a recipe may name one."""


@hookspec
def portable_dit_linear_kernels(backend: str) -> Sequence[LinearKernel]:  # type: ignore[empty-body]
    """Further kernels for quantised linear layers of the backend of that id, each for its own format."""


@hookspec
def portable_dit_fused_ops(backend: str) -> Sequence[FusedOp]:  # type: ignore[empty-body]
    """Further functions for seams of ops.py on the backend of that id."""


@hookspec
def portable_dit_model_families() -> Sequence[Family]:  # type: ignore[empty-body]
    """Model families (`portable_dit.models.spec.Family`), as light objects. A built-in model's name wins."""


@hookspec
def portable_dit_recipe_folders() -> Sequence[Path]:  # type: ignore[empty-body]
    """Folders of recipes; `<folder>/cpu/x.yaml` is then found as `cpu/x`."""
