"""portable-dit: Diffusion Transformers on any accelerator.

    import portable_dit
    portable_dit.generate("a red apple on a blue background").save("apple.png")

Importing this package costs nothing: each name is loaded when it is first used, and torch with the first that
draws.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as type checkers know it; typing itself takes longer than the rest of this file
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

DEFAULT_RECIPE = "cpu/h3-mini"  # the built-in model, which draws on any machine

if TYPE_CHECKING:
    from portable_dit.catalog import load_recipe
    from portable_dit.engine import Engine, generate
    from portable_dit.errors import PortableDitError
    from portable_dit.plan import Plan, make_plan
    from portable_dit.recipe import Recipe
    from portable_dit.request import Request
    from portable_dit.result import Picture, Result
    from portable_dit.setup import set_up

__all__ = [
    "generate",
    "Engine",
    "Request",
    "Result",
    "Picture",
    "Recipe",
    "load_recipe",
    "Plan",
    "make_plan",
    "set_up",
    "PortableDitError",
    "__version__",
]

_HOMES = {
    "generate": "engine",
    "Engine": "engine",
    "Request": "request",
    "Result": "result",
    "Picture": "result",
    "Recipe": "recipe",
    "load_recipe": "catalog",
    "Plan": "plan",
    "make_plan": "plan",
    "set_up": "setup",
    "PortableDitError": "errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"portable_dit.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'portable_dit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
