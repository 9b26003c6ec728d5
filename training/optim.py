"""Muon and AdamW over one flat buffer, written so that a whole training step fits one CUDA graph.

All parameters live in one float32 buffer, their gradients in another, the running average (EMA) in a third.
A step is then a handful of kernels instead of thousands, gradients of several processes are summed with one
all-reduce, and saving or loading is one copy. Nothing here reads a value back to the host: learning rates,
step count and the gradient norm are tensors.

Muon: Jordan et al., https://kellerjordan.github.io/posts/muon; update RMS matching as in Moonlight (arXiv
2502.16982).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGN = 64  # elements: every parameter starts on a 256-byte border
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic coefficients of the Muon post


@dataclass(frozen=True)
class OptimSettings:
    """muon_rms: root mean square of a Muon update at learning rate 1. clip: largest gradient norm."""

    muon_rate: float = 2e-3
    adam_rate: float = 1e-3
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    muon_rms: float = 0.2
    clip: float = 1.0
    ema_decay: float = 0.999


@dataclass(frozen=True)
class MuonGroup:
    """Matrices of one shape, side by side in the flat buffer: elements start .. start + n * rows * cols."""

    start: int
    shape: tuple[int, int, int]  # n, rows, cols

    @property
    def stop(self) -> int:
        n, rows, cols = self.shape
        return self.start + n * rows * cols


def newton_schulz(matrices: Tensor, *, steps: int = 5) -> Tensor:
    """Matrices [n, rows, cols] with their singular values pushed towards 1, in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class FlatOptimizer:
    """Owns the flat buffers of some modules and turns gradients into updates.

    named: (name, parameter) pairs, in any order. is_matrix(name, parameter) chooses Muon. Parameters keep
    their identity; only their storage moves, so build this before anything is captured in a graph.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        is_matrix: Callable[[str, nn.Parameter], bool],
        settings: OptimSettings,
    ) -> None:
        self.settings = settings
        named = [(name, p) for name, p in named if p.requires_grad]
        by_shape: dict[tuple[int, int], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        rest: list[tuple[str, nn.Parameter]] = []
        for name, p in named:
            if is_matrix(name, p):
                by_shape[(p.shape[0], p[0].numel())].append((name, p))
            else:
                rest.append((name, p))
        device = named[0][1].device
        self.offsets: dict[str, tuple[int, torch.Size]] = {}
        self.groups: list[MuonGroup] = []
        cursor = 0
        for (rows, cols), members in by_shape.items():
            self.groups.append(MuonGroup(cursor, (len(members), rows, cols)))
            for name, p in members:
                self.offsets[name] = (cursor, p.shape)
                cursor += p.numel()
            cursor = -(-cursor // ALIGN) * ALIGN
        self.muon_size = cursor
        for name, p in rest:
            self.offsets[name] = (cursor, p.shape)
            cursor = -(-(cursor + p.numel()) // ALIGN) * ALIGN
        zeros = lambda n: torch.zeros(n, device=device)  # noqa: E731
        self.weight, self.grad, self.ema = zeros(cursor), zeros(cursor), zeros(cursor)
        self.momentum = zeros(self.muon_size)
        self.first, self.second = zeros(cursor - self.muon_size), zeros(cursor - self.muon_size)
        for name, p in named:
            view = self._view(self.weight, name)
            view.copy_(p.data)
            p.data = view
            p.grad = self._view(self.grad, name)
        self.parameters = dict(named)
        self.ema.copy_(self.weight)
        self.step_count = zeros(())
        self.rate_scale = torch.ones((), device=device)
        self.grad_norm = zeros(())
        self.skipped = zeros(())

    def _view(self, flat: Tensor, name: str) -> Tensor:
        start, shape = self.offsets[name]
        return flat[start : start + shape.numel()].view(shape)

    def set_rate(self, scale: float) -> None:
        """Learning rates are the settings' times `scale` from the next step on."""
        self.rate_scale.fill_(scale)

    def zero_grad(self) -> None:
        self.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """One update from `grad`.

        A gradient with NaN or infinity changes nothing and is counted in `skipped`.
        """
        s = self.settings
        norm = torch.linalg.vector_norm(self.grad)
        good = torch.isfinite(norm)
        self.grad_norm.copy_(norm)
        self.skipped.add_((~good).float())
        factor = torch.where(good, (s.clip / (norm + 1e-6)).clamp(max=1.0), torch.zeros_like(norm))
        torch.nan_to_num_(self.grad, nan=0.0, posinf=0.0, neginf=0.0)
        self.grad.mul_(factor)
        self.step_count.add_(1.0)
        if self.muon_size:
            self._muon(good)
        self._adamw(good)
        decay = torch.minimum(
            (1 + self.step_count) / (10 + self.step_count), self.step_count * 0 + s.ema_decay
        )
        self.ema.lerp_(self.weight, 1 - decay)

    def _muon(self, good: Tensor) -> None:
        s = self.settings
        grad = self.grad[: self.muon_size]
        self.momentum.lerp_(grad, 1 - s.momentum)
        ahead = torch.lerp(grad, self.momentum, s.momentum)  # Nesterov
        rate = self.rate_scale * (s.muon_rate * s.muon_rms) * good
        for group in self.groups:
            _, rows, cols = group.shape
            update = newton_schulz(ahead[group.start : group.stop].view(group.shape))
            weight = self.weight[group.start : group.stop].view(group.shape)
            weight.sub_(update.float() * (rate * max(rows, cols) ** 0.5))

    def _adamw(self, good: Tensor) -> None:
        s = self.settings
        grad, weight = self.grad[self.muon_size :], self.weight[self.muon_size :]
        self.first.lerp_(grad, 1 - s.betas[0])
        self.second.lerp_(grad.square(), 1 - s.betas[1])
        bias_first = 1 - torch.exp(self.step_count * math.log(s.betas[0]))
        bias_second = 1 - torch.exp(self.step_count * math.log(s.betas[1]))
        rate = self.rate_scale * s.adam_rate * good / bias_first
        weight.sub_(rate * self.first / ((self.second / bias_second).sqrt() + s.eps))

    def state_dict(self) -> dict[str, Tensor]:
        """Everything needed to go on exactly, as references to the live tensors."""
        names = ("weight", "ema", "momentum", "first", "second", "step_count")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, live in self.state_dict().items():
            live.copy_(state[name])

    def named_ema(self) -> dict[str, Tensor]:
        """The averaged weights by parameter name, as views."""
        return {name: self._view(self.ema, name) for name in self.offsets}

    def restart_ema(self) -> None:
        self.ema.copy_(self.weight)

    def swap_ema(self) -> None:
        """Exchange live and averaged weights in place, for an evaluation; call again to go back."""
        keep = self.weight.clone()
        self.weight.copy_(self.ema)
        self.ema.copy_(keep)
