"""Inputs that devices quantise together: the rows and scales of one device to the bit, whatever the layout.

Ranks are threads here, over torch's own process group for threads; what they run is what real ranks run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed import multi_threaded_pg

from portable_dit.backend import EmulatedLinear, ExpertKernel, LinearKernel, Packed
from portable_dit.conformance.divided import check_divided
from portable_dit.cpu import CpuBackend
from portable_dit.formats import (
    WHOLE,
    Agree,
    decode,
    dequantize_blocks,
    encode,
    format_named,
    largest_of_blocks,
    quantize_blocks,
)
from portable_dit.grouped_products import GroupedRowExperts
from portable_dit.models.h3_image import random_checkpoint as h3_image
from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.models.h3_image.spec import make_spec as h3_spec
from portable_dit.models.hunyuan_image_3 import random_checkpoint as hunyuan
from portable_dit.models.hunyuan_image_3.dit import HunyuanTransformer
from portable_dit.models.hunyuan_image_3.spec import make_spec as hunyuan_spec
from portable_dit.models.spec import ModelSpec
from portable_dit.ops import Dispatch
from portable_dit.parallel.collectives import Group, Pulse, split_evenly
from portable_dit.parallel.tensor import (
    share_input_scales,
    share_scales_of_rows,
    shares_of,
    shrink,
)
from portable_dit.quantize import QuantizedExpertLinear, QuantizedLinear, quantize, quantized_weights
from portable_dit.scaled_products import MatrixUnitLinear

WIDTH = 1024  # of what is divided: blocks of 128 and rotations of 256 end where four parts do
EXPERTS = 2
ROWS = 9  # that two ranks cannot share evenly
PARTS = (slice(0, 4), slice(4, ROWS))  # the rows of each expert
UNIT = 2.0**-24  # half a unit in the last place of float32, relative
TIMEOUT = 60
H3 = replace(
    h3_image.TINY,
    dit=replace(
        h3_image.TINY.dit,
        num_layers=1,
        token_refiner_num_layers=1,
        num_attention_heads=8,
        attention_head_dim=WIDTH // 8,
        ffn_hidden_size=WIDTH,
    ),
)
HUNYUAN = replace(
    hunyuan.TINY,
    dit=replace(
        hunyuan.TINY.dit,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        attention_head_dim=WIDTH // 8,
        moe_intermediate_size=WIDTH,
        num_experts=EXPERTS,
    ),
)
MODELS = {
    "h3-image": (lambda: H3Transformer(H3.dit), h3_spec("h3-image", H3), "blocks"),
    "hunyuan-image-3": (
        lambda: HunyuanTransformer(HUNYUAN.dit, HUNYUAN.vae.latent_channels),
        hunyuan_spec("hunyuan-image-3", HUNYUAN),
        "layers",
    ),
}
WHOLE_ROWS = ("fp8_row", "int8_row", "int8_row_rotated", "fp8_tensor")
FORMATS = (*WHOLE_ROWS, "fp8_block128", "mxfp8")


@dataclass
class Seen:
    """What one rank quantised, and what came out, by layer. name: of the layer whose turn it is."""

    name: str = ""
    values: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)
    results: dict[str, Tensor] = field(default_factory=dict)

    def take(self, values: Tensor, scales: Tensor) -> None:
        """Rows [M, K] in the order in which they come, each with its scales: bytes, so that all compare."""
        each = scales.expand(values.shape[0], -1)
        for kept, new in ((self.values, values), (self.scales, each)):
            rows = new.contiguous().view(torch.uint8)
            kept[self.name] = torch.cat([kept[self.name], rows]) if self.name in kept else rows


class Products(MatrixUnitLinear):
    """What a matrix unit computes, in float32. It keeps what it was given; so each rank has its own."""

    def __init__(self, format: str, seen: Seen) -> None:
        super().__init__(format, "products")
        self.seen = seen

    def apply_quantized(self, values, scales, packed, bias, dtype):
        assert self.format.activations is not None
        self.seen.take(values, scales)
        x = dequantize_blocks(values, scales, self.format, self.format.activations)
        weight = dequantize_blocks(packed["values"], packed["scales"], self.format, self.format.block)
        return (x @ weight.T).to(dtype)


class Grouped(GroupedRowExperts):
    """All experts at once, with inputs quantised before rows are dealt out."""

    def multiply(self, values, scales, packed, dispatch, dtype):
        self._rows.seen.take(values, scales)
        x = values.float() * scales
        weight = packed["values"].float() * packed["scales"][..., None]
        return torch.cat([x[part] @ weight[expert].T for expert, part in dispatch.parts()]).to(dtype)


class Watched(CpuBackend):
    """The host with kernels that tell what they quantise. kind: which."""

    def __init__(self, kind: str) -> None:
        self.kind, self.seen = kind, Seen()

    def linear_kernels(self):
        made = EmulatedLinear if self.kind == "emulated" else lambda name: Products(name, self.seen)
        return {name: [made(name)] for name in FORMATS}

    def expert_kernels(self):
        grouped = Grouped(Products("fp8_row", self.seen), "grouped")
        return {"fp8_row": [grouped]} if self.kind == "grouped" else {}


@dataclass(frozen=True)
class Ranks:
    """A tensor group, the ranks that hold the same experts, and those that hold other rows."""

    tensor: Group
    alike: Group
    sequence: Group


def in_threads(tensor: int, sequence: int, work: Callable[[Ranks], Seen], *, expert: int = 1) -> list[Seen]:
    """What each rank saw, tensor innermost."""
    world = tensor * sequence
    store, found, raised = dist.HashStore(), [Seen()] * world, []

    def parts(degree: int, stride: int) -> list[list[int]]:
        starts = [r for r in range(world) if r // stride % degree == 0]
        return [[first + step * stride for step in range(degree)] for first in starts]

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)

            def group(axis: str, degree: int, stride: int) -> Group:
                mine: Group | None = None
                for ranks in parts(degree, stride):
                    handle = dist.new_group(ranks)
                    if rank in ranks:
                        mine = Group(axis, size=degree, index=ranks.index(rank), handle=handle, pulse=Pulse())
                assert mine is not None
                return mine

            alike = group("experts_alike", tensor // expert, expert)
            found[rank] = work(Ranks(group("tensor", tensor, 1), alike, group("sequence", sequence, tensor)))
        except Exception as error:  # noqa: BLE001 (told to the thread that asked)
            raised.append(error)

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    multi_threaded_pg.ProcessLocalGroup.reset()
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive(), "a rank waits for others"
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    assert not raised, raised
    return found


def weight_of(name: str, shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + sum(name.encode())))


def input_of(name: str, columns: int) -> Tensor:
    """Rows of unlike size whose largest lies in the last part, and one of zeros."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    x = torch.randn(ROWS, columns, generator=generator) * torch.rand(ROWS, 1, generator=generator) * 4
    x[:, -3] *= 20
    x[2] = 0
    return x


def dispatch_of(rows: slice) -> Dispatch:
    """Some of the rows in order, each part for its expert."""
    first = max(0, min(rows.stop, PARTS[0].stop) - rows.start)
    return Dispatch(None, torch.tensor([first, rows.stop - rows.start], dtype=torch.int32))


def built(model: str, format: str, kind: str, ranks: Ranks, expert: int) -> tuple[nn.Module, Watched]:
    """One rank's part of the quantised model, as the loader makes it, up to what ranks agree on."""
    make, spec, _ = MODELS[model]
    splits = [split for split in spec.tensor_plan if split.component == "dit"]
    with torch.device("meta"):
        net = make()
    shrink(net, splits, ranks.tensor, expert=expert)
    backend = Watched(kind)
    experts = backend.kernel_lists().experts[format][0].id
    quantize(
        net,
        format=format,
        keep=(),
        only=[split.pattern for split in splits],
        backend=backend,
        kernel_id=backend.linear_kernels()[format][0].id,
        expert_kernel_id=experts,
    )
    names = [
        name
        for name, layer in net.named_modules()
        if isinstance(layer, QuantizedLinear | QuantizedExpertLinear)
    ]
    shares = shares_of(
        net, splits, ranks.tensor, dict.fromkeys(names, format), expert=expert, experts_alike=ranks.alike
    )
    for name, (layer, number) in quantized_weights(net).items():
        share = shares[name]
        shape = [layer.out_features, layer.in_features]
        shape[share.dim] = share.whole
        part = encode(share.cut(weight_of(name, tuple(shape))), format, agree=share.agree)
        if isinstance(layer, QuantizedLinear):
            layer.accept_encoded(part)
        else:
            layer.accept_encoded(number, part)
    return net, backend


def divided_layers(net: nn.Module, spec: ModelSpec, along: str | None) -> list[tuple[str, nn.Module]]:
    """The layers of the tensor plan, by name; along: of one kind of split."""
    names = [
        split.pattern.replace("*", "0")
        for split in spec.tensor_plan
        if split.component == "dit" and along in (None, split.along)
    ]
    return [(name, net.get_submodule(name)) for name in names]


def try_layers(
    model: str,
    format: str,
    kind: str = "products",
    *,
    tensor: int = 1,
    sequence: int = 1,
    expert: int = 1,
    agree: bool = True,
    along: str | None = "in",
) -> list[Seen]:
    """Every layer on each rank, with the rank's part of an input's rows and, where it is divided, columns."""
    _, spec, blocks = MODELS[model]
    splits = [split for split in spec.tensor_plan if split.component == "dit"]

    def work(ranks: Ranks) -> Seen:
        net, backend = built(model, format, kind, ranks, expert)
        if agree and tensor > 1:
            share_input_scales(net, splits, ranks.tensor, experts_alike=ranks.alike)
        if agree and sequence > 1:
            share_scales_of_rows(net.get_submodule(blocks), ranks.sequence)
        lengths = split_evenly(ROWS, sequence)
        start = sum(lengths[: ranks.sequence.index])
        rows = slice(start, start + lengths[ranks.sequence.index])
        inward = {name for name, _ in divided_layers(net, spec, "in")}
        for name, layer in divided_layers(net, spec, along):
            backend.seen.name = name
            mixture = isinstance(layer, QuantizedExpertLinear)
            inside = ranks.alike if mixture else ranks.tensor
            place, count = (inside.index, inside.size) if name in inward else (0, 1)
            x = input_of(name, layer.in_features * count)[rows].chunk(count, dim=1)[place].contiguous()
            if mixture and layer.num_experts < EXPERTS:
                x = x[PARTS[layer.first]]
                out = layer(x, Dispatch(None, torch.tensor([len(x)], dtype=torch.int32)))
            else:
                out = layer(x, dispatch_of(rows)) if mixture else layer(x)
            backend.seen.results[name] = inside.all_reduce(out) if name in inward else out
        return backend.seen

    return in_threads(tensor, sequence, work, expert=expert)


def one_of(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What all say alike; nothing of it where they differ."""
    return {
        name: first for name, first in parts[0].items() if all(torch.equal(first, p[name]) for p in parts)
    }


def side_by_side(parts: list[dict[str, Tensor]], dim: int) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts], dim=dim) for name in parts[0]}


def differing(alone: dict[str, Tensor], together: dict[str, Tensor]) -> list[str]:
    """Layers of which the ranks did not quantise just what one device does."""
    return [
        name for name, rows in alone.items() if name not in together or not torch.equal(rows, together[name])
    ]


def differing_columns(format: str, alone: Seen, ranks: list[Seen]) -> list[str]:
    scales = [rank.scales for rank in ranks]
    form = format_named(format)
    assert form.activations is not None
    all_scales = one_of(scales) if form.activations[1] == WHOLE else side_by_side(scales, 1)
    values = side_by_side([rank.values for rank in ranks], 1)
    return differing(alone.values, values) + differing(alone.scales, all_scales)


def only(seen: Seen, name: str, rows: slice) -> Seen:
    """Some rows of one layer."""
    return Seen(values={name: seen.values[name][rows]}, scales={name: seen.scales[name][rows]})


def order_of_sums(model: str, format: str, seen: Seen) -> dict[str, Tensor]:
    """How far two orders of the sums of a layer's results may be apart: [M, N].

    A sum of K products in float32 is off by K units of the sum of their magnitudes in any order (Higham,
    Accuracy and Stability of Numerical Algorithms, 3.1), so two orders differ by twice that at most.
    """
    form, found = format_named(format), {}
    for group in MODELS[model][1].linears:
        name = group.pattern.replace("*", "0")
        if name not in seen.results:
            continue
        x = input_of(name, group.in_features)
        bounds = []
        for expert, rows in enumerate(PARTS if group.experts else (slice(0, ROWS),)):
            key = f"{name}.{expert}.weight" if group.experts else f"{name}.weight"
            weight = decode(encode(weight_of(key, (group.out_features, group.in_features)), format))
            exact = x[rows]
            if form.activations is not None:
                exact = dequantize_blocks(
                    *quantize_blocks(exact, form, form.activations), form, form.activations
                )
            bounds.append(2 * group.in_features * UNIT * exact.abs() @ weight.abs().T)
        found[name] = torch.cat(bounds)
    return found


CASES = [
    *((model, format, kind) for model in MODELS for format in FORMATS for kind in ("products", "emulated")),
    ("hunyuan-image-3", "fp8_row", "grouped"),
]


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(("model", "format", "kind"), CASES)
def test_rows_that_are_quantised_in_parts_are_those_of_one_device_to_the_bit(model, format, kind, degree):
    (alone,), ranks = try_layers(model, format, kind), try_layers(model, format, kind, tensor=degree)
    assert len(alone.results) >= 2
    if kind != "emulated":  # which tells nothing
        assert alone.values.keys() == alone.results.keys()
        assert not differing_columns(format, alone, ranks)
    bounds = order_of_sums(model, format, alone)
    for name, wanted in alone.results.items():
        for rank in ranks:
            assert ((rank.results[name] - wanted).abs() <= bounds[name]).all(), name
        assert bounds[name].max() < 1e-3 * wanted.abs().max(), "a bound that any result would keep"


@pytest.mark.parametrize("format", ["fp8_row", "fp8_tensor"])
def test_ranks_that_hold_the_same_experts_agree_among_themselves(format):
    (alone,) = try_layers("hunyuan-image-3", format)
    ranks = try_layers("hunyuan-image-3", format, tensor=4, expert=2)
    mine = "layers.0.mlp.experts.down_proj"
    for expert, rows in enumerate(PARTS):
        pair = [only(ranks[place], mine, slice(None)) for place in (expert, expert + 2)]
        assert not differing_columns(format, only(alone, mine, rows), pair)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_one_scale_for_all_rows_is_that_of_one_device_where_ranks_share_the_rows(model, tensor):
    (alone,) = try_layers(model, "fp8_tensor", along=None)
    ranks = try_layers(model, "fp8_tensor", along=None, tensor=tensor, sequence=2)
    assert len(alone.results) >= 4
    assert not differing(alone.scales, side_by_side([rank.scales for rank in ranks[::tensor]], 0))
    assert not differing(alone.scales, side_by_side([rank.scales for rank in ranks[tensor - 1 :: tensor]], 0))


@pytest.mark.parametrize(("model", "format", "kind"), [case for case in CASES if case[2] != "emulated"])
def test_without_the_agreement_scales_are_those_of_the_parts(model, format, kind):
    """What the tests above would miss if they could not fail; blocks that end inside a part need none."""
    (alone,), ranks = try_layers(model, format, kind), try_layers(model, format, kind, tensor=2, agree=False)
    form = format_named(format)
    assert form.activations is not None
    missed = differing_columns(format, alone, ranks)
    assert {*missed} == ({*alone.results} if form.activations[1] == WHOLE else set())
    if form.activations[0] == WHOLE:
        apart = try_layers(model, format, kind, sequence=2, agree=False)
        assert differing(alone.scales, side_by_side([rank.scales for rank in apart], 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("format", WHOLE_ROWS)
def test_a_part_is_rounded_to_the_bit_as_in_float32_whatever_its_dtype(format, dtype):
    x, kernel = input_of(format, 256).to(dtype), MatrixUnitLinear(format, "any")
    form = kernel.format
    assert form.activations is not None
    for larger in (1.0, 3.0):
        told = quantize_blocks(x.float(), form, form.activations, agree=lambda largest, n=larger: largest * n)
        made = kernel.quantize_divided(x, lambda largest, n=larger: largest * n)
        for ours, theirs in zip(made, told, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


class DoesNotAsk(EmulatedLinear):
    def apply_divided(self, x: Tensor, packed: Packed, bias: Tensor | None, agree: Agree) -> Tensor:
        return self.apply(x, packed, bias)


class AsksInVain(EmulatedLinear):
    def apply_divided(self, x: Tensor, packed: Packed, bias: Tensor | None, agree: Agree) -> Tensor:
        agree(largest_of_blocks(x, self.format))
        return self.apply(x, packed, bias)


@pytest.mark.parametrize("format", ["fp8_row", "fp8_tensor", "int8_row", "int8_row_rotated"])
@pytest.mark.parametrize("wrap", [lambda kernel: kernel, ExpertKernel], ids=["linear", "experts"])
def test_a_kernel_that_rounds_a_part_of_an_input_by_itself_is_caught(format: str, wrap: Any) -> None:
    backend = CpuBackend()
    device = backend.devices()[0]

    def status(kernel: LinearKernel) -> list[str]:
        return [
            o.status for o in check_divided(wrap(kernel), device, backend.capabilities(device), "float32")
        ]

    assert status(EmulatedLinear(format)) == ["pass"]
    assert status(AsksInVain(format, "wrong")) == ["fail"]
    if wrap is not ExpertKernel:  # which asks once for all its experts
        assert status(DoesNotAsk(format, "wrong")) == ["fail"]
    assert status(LinearKernel(format)) == []
