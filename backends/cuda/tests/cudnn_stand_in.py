"""A stand-in for nvidia-cudnn-frontend: its recorded signatures, what it demands, and its numbers on the CPU.

It is strict where the library is: every step of building in its order, tensors as they were declared, results
of 8 bits alone (compute capability 9.0), numbers beyond the range cut at it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vendor_stand_ins import SIGNATURES, build, causal

E4M3, BFLOAT16, FLOAT = "e4m3", "bfloat16", "float"
DTYPES = {E4M3: torch.float8_e4m3fn, BFLOAT16: torch.bfloat16, FLOAT: torch.float32}
STEPS = ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")


class NotSupportedError(Exception):
    """The library's own error is no RuntimeError either."""


@dataclass(eq=False)
class Declared:
    """A tensor of a graph; its setters give it back, as the library's do."""

    dim: list[int]
    stride: list[int]
    data_type: str
    is_output: bool = False

    def set_output(self, value: bool) -> Declared:
        self.is_output = value
        return self

    def set_dim(self, dim: list[int]) -> Declared:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Declared:
        self.stride = stride
        return self

    def set_data_type(self, dtype: str) -> Declared:
        self.data_type = dtype
        return self

    def of(self, given: Tensor) -> Tensor:
        """The memory of a tensor as it was declared."""
        assert given.dtype is DTYPES[self.data_type], (given.dtype, self.data_type)
        reach = 1 + sum((n - 1) * s for n, s in zip(self.dim, self.stride, strict=True))
        assert given.is_contiguous(), "its memory is read by the declared strides"
        assert given.numel() == reach, (given.shape, self.dim, self.stride)
        return given.as_strided(self.dim, self.stride)


@dataclass
class Graph:
    """One operation, which is built step by step and executed over and over."""

    module: CudnnStandIn
    steps: list[str] = field(default_factory=list)
    node: dict[str, Any] = field(default_factory=dict)
    out: Declared | None = None

    def step(self, name: str) -> None:
        assert name == STEPS[len(self.steps)], f"{name} after {self.steps}"
        self.steps.append(name)
        if name == "create_execution_plans":
            assert self.out is not None
            if self.out.data_type != E4M3:
                raise NotSupportedError("HALF/BFLOAT16 output is only supported on Blackwell architecture")
            if self.out.dim[2] == 1:
                raise NotSupportedError("no engine proposed a plan for this graph")  # cuDNN 9.19 on an H200
        if name == "build_plans":
            self.module.planned.append(tuple(self.node["q"].dim))

    def sdpa_fp8(self, given: dict[str, Any]) -> list[Declared | None]:
        assert given["is_inference"] is True, "the log-sum-exp was not asked for"
        assert not given["use_causal_mask_bottom_right"], "not on compute capability 9.0"
        self.node = given
        self.out = Declared(list(given["q"].dim), [], E4M3)
        return [self.out, None, Declared([], [], FLOAT), Declared([], [], FLOAT)]

    def execute(self, given: dict[str, Any]) -> None:
        assert self.steps == list(STEPS), "executed before it was built"
        pack, node = next(iter(given.values())), self.node  # its name differs between versions
        assert given["workspace"].dtype is torch.uint8
        assert given["workspace"].numel() >= self.module.workspace
        names = ("q", "k", "v", "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        q, k, v, *scales = (node[name].of(pack[node[name]]).float() for name in names)
        descale_q, descale_k, descale_v, descale_s, scale_s, scale_o = (s.item() for s in scales)
        share = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(share, dim=1) for t in (k, v))
        scores = (q * descale_q) @ (k * descale_k).transpose(2, 3) * node["attn_scale"]  # [B, N, Sq, Sk]
        if node["use_causal_mask"]:
            scores = scores.masked_fill(~causal(*scores.shape[2:], at_last=False), -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        rounded = _cut(weights * scale_s).float() * descale_s
        result = rounded @ (v * descale_v) / weights.sum(-1, keepdim=True)
        assert self.out is not None
        result = _cut(result * scale_o)
        self.out.of(pack[self.out]).copy_(result)
        self.module.largest.append(result.float().abs().max().item())


def _cut(x: Tensor) -> Tensor:
    """e4m3, with 448 for whatever is above it."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


class CudnnStandIn(ModuleType):
    """The module `cudnn`, by one version's signatures.

    planned: sizes of the queries of each graph that was built, in order. largest: number of
    each result in 8 bits.
    """

    workspace = 48

    def __init__(self, recorded: str = "cudnn") -> None:
        super().__init__("cudnn")
        self.recorded = recorded
        self.planned: list[tuple[int, ...]] = []
        self.largest: list[float] = []
        self.data_type = SimpleNamespace(FP8_E4M3=E4M3, BFLOAT16=BFLOAT16, FLOAT=FLOAT)
        self.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
        self.cudnnGraphNotSupportedError = NotSupportedError
        self.pygraph = build(self._signature("pygraph"), self._graph)

    def _graph(self, given: dict[str, Any]) -> Any:
        assert given["intermediate_data_type"] == given["compute_data_type"] == FLOAT
        graph = Graph(self)
        methods = {
            "tensor": lambda g: Declared(list(g["dim"]), list(g["stride"]), g["data_type"]),
            "sdpa_fp8": graph.sdpa_fp8,
            "execute": graph.execute,
            "get_workspace_size": lambda g: self.workspace,
            **{name: lambda g, name=name: graph.step(name) for name in STEPS},
        }
        signatures = {name: self._signature(f"pygraph.{name}") for name in methods}
        return SimpleNamespace(**{name: build(signatures[name], methods[name]) for name in methods})

    def _signature(self, name: str) -> str:
        found: str = SIGNATURES[f"{self.recorded}.{name}"]["signature"]
        return found
