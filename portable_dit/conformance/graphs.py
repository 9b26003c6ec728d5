"""Graphs: a captured call gives what the eager one gives, bit for bit, and its results stay the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from portable_dit.backend import Backend
from portable_dit.capabilities import Capabilities, Device
from portable_dit.conformance.outcome import Outcome, Promises

GRAPHS = 6  # captured one after the other, replayed in turn
Call = Callable[..., Tensor]


def check_graphs(backend: Backend, device: Device, capabilities: Capabilities) -> list[Outcome]:
    """What GraphLimits promise; nothing else is asked of graphs."""
    told = Promises("graphs", backend.id)
    limits = capabilities.graphs
    if not limits.supported:
        told.check("eager", lambda: _eager_trouble(backend, device))
        return told.outcomes
    told.check("replay_equals_eager", lambda: _replay_trouble(backend, device))
    told.check("results_are_kept", lambda: _kept_trouble(backend, device))
    told.check("inputs_are_kept", lambda: _inputs_trouble(backend, device))
    told.check("several_in_turn", lambda: _in_turn_trouble(backend, device, limits.max_live))
    told.check("memory_comes_back", lambda: _release_trouble(backend, device))
    if limits.concurrent_replay:
        told.check("replays_at_once", lambda: _at_once_trouble(backend, device))
    else:
        told.not_claimed("replays_at_once", "concurrent_replay is false: one replica, one thread")
    if limits.failure_is_fatal:
        told.not_claimed("refused_capture", "failure_is_fatal: it would end this process's use of the device")
    else:
        told.check("refused_capture", lambda: _refused_trouble(backend, device))
    return told.outcomes


def _layers(x: Tensor, weight: Tensor) -> Tensor:
    """Several kernels in a row, an intermediate that dies, and a view. x, weight [64, 64] -> [64, 64]."""
    wide = torch.cat([x @ weight, x * 2], dim=1)
    return torch.nn.functional.silu(wide[:, :64]) + wide[:, 64:].softmax(dim=-1)


def _pair(device: Device, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(2, 64, 64, generator=generator).to(device.torch_device)
    return x, weight


def _captured(backend: Backend, function: Call, inputs: Sequence[Tensor]) -> Call:
    call = backend.graph(function, inputs)
    assert call is not None, "graphs.supported, and graph() gives None for a few matrix products"
    return call


def _eager_trouble(backend: Backend, device: Device) -> str | None:
    call = backend.graph(_layers, _pair(device, 0))
    return None if call is None else "graph() captures, and capabilities say graphs.supported is false"


def _replay_trouble(backend: Backend, device: Device) -> str | None:
    call = _captured(backend, _layers, _pair(device, 0))
    for seed in (0, 1, 2):
        inputs = _pair(device, seed)
        if not _same(call(*inputs), _layers(*inputs)):
            return f"replay with inputs number {seed} differs from the eager call"
    return None


def _kept_trouble(backend: Backend, device: Device) -> str | None:
    call = _captured(backend, _layers, _pair(device, 0))
    first = call(*_pair(device, 1))
    before = first.clone()
    call(*_pair(device, 2))
    backend.synchronize(device)
    return None if _same(first, before) else "the next replay changed the result of the one before"


def _inputs_trouble(backend: Backend, device: Device) -> str | None:
    inputs = _pair(device, 0)
    before = [t.clone() for t in inputs]
    call = _captured(backend, _layers, inputs)
    call(*_pair(device, 1))
    backend.synchronize(device)
    kept = all(_same(a, b) for a, b in zip(inputs, before, strict=True))
    return None if kept else "a replay wrote into the inputs that the capture was shown"


def _in_turn_trouble(backend: Backend, device: Device, max_live: int | None) -> str | None:
    count = min(GRAPHS, max_live or GRAPHS)
    functions: list[Call] = [lambda x, w, n=n: _layers(x, w) * n for n in range(1, count + 1)]
    calls = [_captured(backend, function, _pair(device, 0)) for function in functions]
    for seed in range(2 * count):
        inputs, number = _pair(device, seed), seed * 5 % count
        if not _same(calls[number](*inputs), functions[number](*inputs)):
            return f"graph {number} of {count} is wrong when others were replayed in between"
    return None


def _release_trouble(backend: Backend, device: Device) -> str | None:
    """Captures of 32 MiB each, made and let go, must not pile up; nor in `graph_bytes`, where it counts."""

    def large(x: Tensor) -> Tensor:
        return (x * 2).exp() + x

    inputs = [torch.zeros(8 << 20, device=device.torch_device)]  # 32 MiB
    at_rest = backend.graph_bytes(device)
    for _ in range(2):
        call = _captured(backend, large, inputs)
        call(*inputs)
        told = backend.graph_bytes(device) - at_rest
        del call
        if 0 < told < inputs[0].nbytes:
            return f"graph_bytes says {told} of a graph whose input alone has {inputs[0].nbytes}"
        if backend.graph_bytes(device) > at_rest:
            return "graph_bytes counts a graph that nobody holds any more"
    backend.trim(device)
    before = backend.memory(device)
    for _ in range(4):
        _captured(backend, large, inputs)(*inputs)
    backend.synchronize(device)
    backend.trim(device)
    after = backend.memory(device)
    if before is None or after is None:
        return None
    lost = before[0] - after[0]
    return None if lost < 96 << 20 else f"four graphs came and went, and {lost} bytes went with them"


def _at_once_trouble(backend: Backend, device: Device) -> str | None:
    calls = [_captured(backend, _layers, _pair(device, 0)) for _ in range(2)]
    wanted = [_layers(*_pair(device, seed)) for seed in range(2)]

    def replay(number: int) -> bool:
        return all(_same(calls[number](*_pair(device, number)), wanted[number]) for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        right = list(pool.map(replay, range(2)))
    return None if all(right) else "two threads that replay at once get wrong numbers"


def _refused_trouble(backend: Backend, device: Device) -> str | None:
    """A call that waits for the device cannot be captured; the device goes on working."""

    def waits(x: Tensor, weight: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else weight

    call = backend.graph(waits, _pair(device, 0))
    if call is not None:
        return "a call that reads a number back from the device was captured, and its branch frozen"
    return _replay_trouble(backend, device)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu(), b.cpu())
