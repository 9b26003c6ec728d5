"""Recorded signatures of vendors' functions, and functions made from them.

backends/<name>/signatures/<library>-<version>.json, one file for each library and version:

    {"library": "aiter", "version": "2026-08", "source": "ROCm/aiter, aiter/ops/mha.py", "date": "2026-11-30",
     "functions": {"aiter.flash_attn_func": "(q, k, v, dropout_p=0.0, softmax_scale=None, ...)"},
     "operators": {"npu::npu_swiglu": "npu_swiglu(Tensor self, int dim=-1) -> Tensor"},
     "places": {"aiter.flash_attn_func": "aiter/ops/mha.py:flash_attn_func"}}

`functions` are Python's, as inspect.signature writes them; `operators` are torch schemas; `places` are where
refresh.py reads them again. Only what the backend calls is recorded.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

CALLS = "MOCK_VENDOR_CALLS"  # the file that a mocked process writes its vendor calls to


@dataclass(frozen=True)
class Recorded:
    """What one version of one library offers."""

    library: str
    version: str
    source: str
    date: str
    functions: Mapping[str, str] = field(default_factory=dict)
    operators: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    def binds(self, name: str, positional: int, keywords: Sequence[str]) -> str | None:
        """Why a call with that many positional arguments and those keywords fails, None when it does not."""
        try:
            if name in self.operators:
                return _schema_refuses(self.operators[name], positional, keywords)
            signature = inspect.signature(build(self.functions[name], lambda given: None))
            signature.bind(*[None] * positional, **dict.fromkeys(keywords))
        except (TypeError, RuntimeError) as error:
            return f"{self.library} {self.version}, {name}: {error}"
        return None


def load(folder: Path) -> list[Recorded]:
    """Every record in a folder, in order of file name."""
    return [Recorded(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


def recorded(folder: Path, library: str, version: str | None = None) -> Recorded:
    """The record of that version; without one, of the library's last by date and name."""
    found = [r for r in load(folder) if r.library == library and version in (None, r.version)]
    assert found, f"no record of {library} {version or ''} in {folder}"
    return max(found, key=lambda r: (r.date, [int(p) if p.isdecimal() else 0 for p in r.version.split(".")]))


def build(signature: str, body: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A function that takes exactly what a recorded signature says and hands it all to body, by name."""
    names: dict[str, Any] = {"body": body}
    exec(f"def function{signature}:\n    return body(dict(locals()))", names)
    made: Callable[..., Any] = names["function"]
    return made


def install_functions(record: Recorded, bodies: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
    """Modules in sys.modules with the functions that have a body here; a missing parent is made."""
    for name, body in bodies.items():
        module, _, function = name.rpartition(".")
        setattr(add_module(module), function, logged(name, build(record.functions[name], body)))


def define_operators(record: Recorded, bodies: Mapping[str, Callable[..., Any]]) -> None:
    """torch.ops.<namespace>.<name> by recorded schema; bodies get and give host tensors."""
    for name, body in bodies.items():
        namespace, _, operator = name.partition("::")
        library = _library(namespace)
        library.define(record.operators[name])
        library.impl(operator, body, "CompositeExplicitAutograd")


def log_call(name: str, positional: int, keywords: Sequence[str]) -> None:
    """Notes a vendor call for the test that binds it to every recorded version."""
    _CALLS.add((name, positional, tuple(sorted(keywords))))


def logged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose calls are noted under the vendor's name of it."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        log_call(name, len(args), list(kwargs))
        return function(*args, **kwargs)

    noted.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return noted


def as_recorded(record: Recorded, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, noted too, which refuses arguments that the recorded signature does not have."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        log_call(name, len(args), list(kwargs))
        refusal = record.binds(name, len(args), list(kwargs))
        if refusal is not None:
            raise TypeError(refusal)
        return function(*args, **kwargs)

    return checked


def add_module(name: str) -> ModuleType:
    """The module of that name in sys.modules, which importlib finds too; it and its parents are made."""
    if name not in sys.modules:
        parent, _, last = name.rpartition(".")
        made = ModuleType(name)
        made.__path__ = []  # so that its submodules are found in sys.modules
        made.__spec__ = ModuleSpec(name, None)
        if parent:
            setattr(add_module(parent), last, made)
        sys.modules[name] = made
    return sys.modules[name]


_CALLS: set[tuple[str, int, tuple[str, ...]]] = set()
_LIBRARIES: dict[str, torch.library.Library] = {}


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _LIBRARIES:
        _LIBRARIES[namespace] = torch.library.Library(namespace, "DEF")
    return _LIBRARIES[namespace]


def _schema_refuses(schema: str, positional: int, keywords: Sequence[str]) -> str | None:
    arguments = torch._C.parse_schema(schema).arguments
    places = [a.name for a in arguments if not a.kwarg_only]
    if positional > len(places):
        raise TypeError(f"takes {len(places)} positional arguments, {positional} were given")
    unknown = set(keywords) - {a.name for a in arguments}
    if unknown:
        raise TypeError(f"unknown keyword argument {sorted(unknown)[0]!r}")
    given = {*places[:positional], *keywords}
    missing = [a.name for a in arguments if a.name not in given and not a.has_default_value()]
    if missing:
        raise TypeError(f"missing argument {missing[0]!r}")
    return None


def _write_calls() -> None:
    if os.environ.get(CALLS) and _CALLS:
        with Path(os.environ[CALLS]).open("a") as file:  # several processes of one run append
            file.writelines(json.dumps(call) + "\n" for call in sorted(_CALLS))


atexit.register(_write_calls)
