"""A vendor's collectives, carried by gloo over the host memory behind the tensors."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mock_vendor.device import Kind


def gloo_as(name: str, kind: Kind, *, takes_device_id: bool = True) -> None:
    """torch.distributed knows a backend of that name; groups made with it run on gloo.

    takes_device_id: False for a library whose groups refuse the argument.
    """
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, _never, devices=[kind.name])
    for function in ("init_process_group", "new_group"):
        setattr(dist, function, _translated(getattr(dist, function), name, kind, takes_device_id))
    dist.batch_isend_irecv = _through_host_memory(dist.batch_isend_irecv)


def _translated(original: Any, name: str, kind: Kind, takes_device_id: bool) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_id") is not None:
            if not takes_device_id:
                raise RuntimeError(f"{name}: init_process_group does not support device_id")
            kwargs = {k: v for k, v in kwargs.items() if k != "device_id"}
        backend = args[0] if args and isinstance(args[0], str) else kwargs.get("backend")
        if backend == "gloo":
            raise RuntimeError(f"{name}: gloo was asked for on a machine whose tensors lie on {kind.name}")
        if backend in (name, f"{kind.name}:{name}", f"cpu:gloo,{kind.name}:{name}"):
            args, kwargs = args[1:] if args else args, kwargs | {"backend": "gloo"}
        return original(*args, **kwargs)

    return call


def _through_host_memory(original: Any) -> Any:
    """torch asks the group for a backend of the tensors' own device here; the numbers lie on the host."""

    def call(swaps: list[dist.P2POp]) -> Any:
        here = [
            dist.P2POp(swap.op, getattr(swap.tensor, "host", swap.tensor), swap.peer, swap.group, swap.tag)
            for swap in swaps
        ]
        return original(here)

    return call


def _never(*args: Any) -> Any:
    raise AssertionError("groups of this backend are made with gloo")
