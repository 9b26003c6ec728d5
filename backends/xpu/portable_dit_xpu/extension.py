"""intel-extension-for-pytorch: at its end of life, recognised, never needed.

Its last release is 2.8 and each release works with the torch of the same number alone, so beside a torch that
this package accepts it is at best unused and at worst breaks `import torch`. Its norm serves only
where an installed one states the very version of torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from portable_dit.backend import FusedOp
from portable_dit.capabilities import Capabilities, FusionRequest, Reject, Request

NAME = "intel-extension-for-pytorch"


def installed() -> str | None:
    try:
        return version(NAME)
    except PackageNotFoundError:
        return None


def matches(extension: str, torch_build: str) -> bool:
    """Whether that release was made for that torch: "2.13.10+xpu" for "2.13.0+xpu"."""
    return extension.split(".")[:2] == torch_build.split(".")[:2]


def usable() -> str | None:
    """The installed release, if it was made for this torch."""
    found = installed()
    return found if found is not None and matches(found, torch.__version__) else None


def advice() -> str | None:
    """What a person should know of an installed one, None when there is none."""
    found = installed()
    if found is None:
        return None
    if matches(found, torch.__version__):
        return f"{NAME} {found} is installed and its norm is used; it is at its end of life"
    return (
        f"{NAME} {found} is installed, made for another torch than {torch.__version__} and at its end of "
        f"life. It is not used. Uninstall it: pip uninstall {NAME}"
    )


class ExtensionOp(FusedOp):
    """A fused function of the extension; refused where none is installed that matches."""

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        assert isinstance(request, FusionRequest)
        if NAME not in capabilities.libraries:
            return Reject("library", f"{NAME} is not installed for this torch, nor is it needed")
        return super().check(request, capabilities)


def _functional() -> Any:
    return import_module("intel_extension_for_pytorch").llm.functional


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """ops.rms_norm in one pass."""
    gain = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device) if weight is None else weight
    out: Tensor = _functional().rms_norm(x, gain, eps)
    return out


FUSED_OPS = (ExtensionOp("rms_norm", "ipex", rms_norm, dtypes=frozenset({"bfloat16", "float16"})),)
