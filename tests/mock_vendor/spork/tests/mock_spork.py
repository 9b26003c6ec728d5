"""A device that nobody makes: its name is in no file of portable_dit, and torch knows it by PrivateUse1."""

from __future__ import annotations

from types import ModuleType

import torch
from mock_vendor.device import add_device, device_module, put_into
from mock_vendor.streams import stream_module


def install(variant: str) -> None:
    kind = add_device("spork", no_dtypes=frozenset({torch.float64}))
    module = ModuleType("torch.spork")
    put_into(module, device_module(kind) | stream_module())
    torch._register_device_module("spork", module)
