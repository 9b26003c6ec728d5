"""Mesh: which rank of a replica belongs to which groups.

The axes of a replica, outermost first, are guidance, ring, ulysses, tensor: what talks most has the nearest
neighbours, as ranks that follow each other are closest on most machines. Experts, the text encoder and VAE
tiles use the same ranks again, in groups of neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from portable_dit.layout import Layout
from portable_dit.parallel.collectives import Group, Pulse

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from portable_dit.backend import Backend
    from portable_dit.capabilities import Device

AXES = ("guidance", "ring", "ulysses", "tensor")
Partition = tuple[tuple[int, ...], ...]


def partitions(layout: Layout) -> Mapping[str, Partition]:
    """For each name of a group, how it parts the ranks 0 .. replica - 1; each part is in the group's order.

    sequence: ring and ulysses together, in the order of the rows. experts_alike: those of a tensor group that
    hold the same experts. replica: all.
    """
    size = layout.replica
    sizes = [getattr(layout, axis) for axis in AXES]
    strides = [1] * len(AXES)
    for place in range(len(AXES) - 2, -1, -1):
        strides[place] = strides[place + 1] * sizes[place + 1]
    found = {
        axis: _along(size, degree, stride) for axis, degree, stride in zip(AXES, sizes, strides, strict=True)
    }
    found["sequence"] = _along(size, layout.ring * layout.ulysses, layout.tensor)
    found["experts_alike"] = _along(size, layout.tensor // layout.expert, layout.expert)
    for name, degree in (
        ("expert", layout.expert),
        ("text", layout.text_encoder_tensor),
        ("tiles", layout.vae_tiles),
        ("replica", size),
    ):
        found[name] = _along(size, degree, 1)
    return found


def _along(size: int, degree: int, stride: int) -> Partition:
    """Parts of `degree` ranks that are `stride` apart."""
    first = [rank for rank in range(size) if rank // stride % degree == 0]
    return tuple(tuple(rank + step * stride for step in range(degree)) for rank in first)


class Mesh:
    """The groups of one rank.

    rank: its place in the replica. leads: it gives the pictures back. decodes: it takes VAE tiles.
    """

    def __init__(
        self,
        rank: int,
        groups: Mapping[str, Group],
        host: Group,
        pulse: Pulse,
        *,
        replica: int = 0,
        decodes: bool = True,
    ) -> None:
        self.rank = rank
        self.replica = replica
        self.leads = rank == 0
        self.decodes = decodes
        self.pulse = pulse
        self._groups = groups
        self._host = host

    def group(self, name: str) -> Group:
        """The group of that name that this rank is in; see `partitions`."""
        return self._groups[name]

    def agree(self, wish: bool) -> bool:
        """The leader's answer on every rank: what all must do, or none."""
        if self._host.size == 1:
            return wish
        return bool(self._host.broadcast(torch.tensor([wish], dtype=torch.int32)).item())

    def all_in_blocks(self, wish: bool, device: str) -> bool:
        """Whether all ranks that run the blocks of one guidance branch together say yes.

        Other branches have prompts of other lengths, and are not asked. device: where the ranks exchange.
        """
        no = torch.tensor([not wish], dtype=torch.int32, device=device)
        for name in ("tensor", "sequence"):
            self.group(name).largest(no)
        return not no.item()

    def all(self, wish: bool) -> bool:
        """Whether all ranks say yes."""
        if self._host.size == 1:
            return wish
        return not self._host.largest(torch.tensor([not wish], dtype=torch.int32)).item()


def join_mesh(
    layout: Layout,
    rank: int,
    backend: Backend,
    device: Device,
    *,
    timeout_seconds: float,
    pulse: Pulse,
    replicas: int = 1,
    store: Store | None = None,
) -> Mesh:
    """This rank's mesh, when all ranks have called this. Leave it with `leave_mesh`.

    rank: from 0, over all replicas that share a world. store: where the ranks find each other, which each
    start needs for itself; None = as the environment of the process says.
    """
    world, timeout = layout.replica * replicas, timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        rank=rank, world_size=world, timeout=timeout, store=store, **backend.process_group(device)
    )
    return make_mesh(layout, rank, pulse, timeout=timeout, replicas=replicas)


def make_mesh(
    layout: Layout, rank: int, pulse: Pulse, *, timeout: timedelta | None = None, replicas: int = 1
) -> Mesh:
    """The mesh of a rank over the process group of all, which is there."""
    size = layout.replica
    replica, place = divmod(rank, size)
    groups: dict[str, Group] = {}
    handles: dict[Partition, dist.ProcessGroup | None] = {}
    named = partitions(layout)
    for name, parts in named.items():
        mine = next(part for part in parts if place in part)
        if parts not in handles:  # two names for the same ranks share a group
            handles[parts] = _new_groups(parts, size, rank, timeout, replicas)
        groups[name] = Group(
            name, size=len(mine), index=mine.index(place), handle=handles[parts], pulse=pulse
        )
    everyone = (tuple(range(size)),)
    handle = _new_groups(everyone, size, rank, timeout, replicas, backend="gloo")
    host = Group("host", size=size, index=place, handle=handle, pulse=pulse)
    return Mesh(place, groups, host, pulse, replica=replica, decodes=place in named["tiles"][0])


def _new_groups(
    parts: Partition,
    size: int,
    rank: int,
    timeout: timedelta | None,
    replicas: int,
    *,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    """Makes a group for each part of each replica, as every rank must; gives the one this rank is in."""
    found = None
    for replica in range(replicas):
        for part in parts:
            ranks = [replica * size + place for place in part]
            if len(ranks) > 1:
                handle = dist.new_group(ranks, timeout=timeout, backend=backend)
                found = handle if rank in ranks else found
    return found


def open_store(host: str) -> tuple[Store, int]:
    """Where ranks find each other, and its port: a free one, which is taken from that moment on."""
    store = dist.TCPStore(host, 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    return store, int(store.port)


def find_store(host: str, port: int) -> Store:
    """The store that another process has opened there."""
    store: Store = dist.TCPStore(host, port, None, False)  # type: ignore[attr-defined]
    return store


def leave_mesh() -> None:
    """Takes the groups of this process apart."""
    if dist.is_initialized():
        dist.destroy_process_group()
