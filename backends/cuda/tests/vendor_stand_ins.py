"""Stand-ins for vendor packages: their recorded signatures, and their semantics on the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent
SIGNATURES = {entry["name"]: entry for entry in json.loads((HERE / "data/signatures.json").read_text())}


def build(signature: str, body: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A function that takes exactly what a recorded signature says and hands it all to body."""
    names: dict[str, Any] = {"body": body, "torch": torch}
    exec(f"def function{signature}:\n    return body(dict(locals()))", names)
    return names["function"]


@dataclass
class StandIns:
    """Vendor functions with their real signatures and semantics, on the CPU. calls: what they were given."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bodies = {
            "fa3_fwd_interface.flash_attn_func": flash,
            "fa3_fwd_interface.flash_attn_varlen_func": flash_varlen,
            "flash_attn.cute.flash_attn_func": flash,
            "flash_attn.cute.flash_attn_varlen_func": flash_varlen,
            "sageattention.sageattn": sage,
            "flashinfer.mm_mxfp8": mm_mxfp8,
        }
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        for name, body in bodies.items():
            module, _, function = name.rpartition(".")
            if not isinstance(sys.modules.get(module), _StandIn):
                monkeypatch.setitem(sys.modules, module, _StandIn(module))
            vendor = build(SIGNATURES[name]["signature"], self._logged(name, body))
            monkeypatch.setattr(sys.modules[module], function, vendor, raising=False)

    def _logged(self, name: str, body: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
        def logged(arguments: dict[str, Any]) -> Any:
            self.calls.append((name, arguments))
            return body(arguments)

        return logged


class _StandIn(ModuleType):
    pass


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S, N, D] attention where seen [Sq, Sk] says; rows that see nothing give zeros. Float64 inside."""
    share = q.shape[2] // k.shape[2]
    heads = [
        (q[:, :, n].double(), k[:, :, n // share].double(), v[:, :, n // share].double())
        for n in range(q.shape[2])
    ]
    scores = torch.stack([a @ b.transpose(1, 2) * scale for a, b, _ in heads], dim=1)
    scores = scores.masked_fill(~seen, -torch.inf)  # [B, N, Sq, Sk]
    weights = scores.softmax(-1).nan_to_num(0.0)
    out = torch.stack([weights[:, n] @ heads[n][2] for n in range(len(heads))], dim=2)
    return out.to(torch.bfloat16 if v.dtype is torch.float8_e4m3fn else v.dtype), scores.logsumexp(-1)


def causal(rows_q: int, rows_k: int, *, at_last: bool) -> Tensor:
    shift = rows_k - rows_q if at_last else 0
    return torch.arange(rows_k)[None, :] <= torch.arange(rows_q)[:, None] + shift


def flash(given: dict[str, Any]) -> Any:
    q, k, v = (given[n] for n in "qkv")
    for tensor, scales in (
        (q, given.get("q_descale")),
        (k, given.get("k_descale")),
        (v, given.get("v_descale")),
    ):
        if tensor.dtype is torch.float8_e4m3fn:
            assert scales.shape == (k.shape[0], k.shape[2])
    if q.dtype is torch.float8_e4m3fn:
        share = q.shape[2] // k.shape[2]
        scales = [given[f"{n}_descale"][:, None, :, None] for n in "qkv"]
        q = (q.float() * scales[0].repeat_interleave(share, dim=2)).bfloat16()
        k, v = ((t.float() * s).bfloat16() for t, s in ((k, scales[1]), (v, scales[2])))
    rows = q.shape[1], k.shape[1]
    seen = causal(*rows, at_last=True) if given["causal"] else torch.ones(rows, dtype=torch.bool)
    out, lse = plain(q, k, v, given["softmax_scale"], seen)
    wants_lse = given.get("return_attn_probs") or given.get("return_lse")
    return (out, lse.float()) if wants_lse or "score_mod" in given else out


def flash_varlen(given: dict[str, Any]) -> Any:
    starts_q, starts_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
    assert starts_q.dtype == starts_k.dtype == given["seqused_k"].dtype == torch.int32
    parts = []
    for entry in range(len(starts_q) - 1):
        a, b = int(starts_q[entry]), int(starts_q[entry + 1])
        first = int(starts_k[entry])
        last = first + int(given["seqused_k"][entry])
        q, k, v = given["q"][None, a:b], given["k"][None, first:last], given["v"][None, first:last]
        seen = torch.ones(b - a, last - first, dtype=torch.bool)
        parts.append(plain(q, k, v, given["softmax_scale"], seen)[0][0])
    return torch.cat(parts)


def mm_mxfp8(given: dict[str, Any]) -> Tensor:
    """Strict as the library: scales are bytes, flat, in tiles of 128 x 4, and the weight is column-major."""
    a, b = given["a"], given["b"]
    (rows, depth), columns = a.shape, b.shape[1]
    assert a.dtype is b.dtype is torch.float8_e4m3fn
    assert b.stride(0) == 1, "column-major"
    assert min(depth, columns) >= 128
    assert not given["use_8x4_sf_layout"]
    factors = []
    for flat, size in ((given["a_descale"], rows), (given["b_descale"], columns)):
        assert flat.dtype is torch.uint8
        assert flat.shape == (-(-size // 128) * 128 * (-(-(depth // 32) // 4) * 4),)
        r, c = torch.arange(size)[:, None], torch.arange(depth // 32)[None, :]
        tiles = -(-(depth // 32) // 4)
        place = ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
        factors.append(torch.exp2(flat[place].double() - 127).repeat_interleave(32, dim=1))
    out = (a.double() * factors[0]) @ (b.t().double() * factors[1]).t()
    return out.to(given["out_dtype"])


def sage(given: dict[str, Any]) -> Any:
    assert given["tensor_layout"] == "NHD"
    assert all(given[n].is_contiguous() for n in "qkv")
    rows = given["q"].shape[1], given["k"].shape[1]
    seen = causal(*rows, at_last=False) if given["is_causal"] else torch.ones(rows, dtype=torch.bool)
    return plain(given["q"], given["k"], given["v"], given["sm_scale"], seen)[0]
