"""Swapping linear layers from outside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from portable_dit.cpu import CpuBackend
from portable_dit.errors import BackendError, WeightsError
from portable_dit.formats import QUANTIZED, decode, encode
from portable_dit.models.spec import matches
from portable_dit.quantize import QuantizedLinear, quantization_report, quantize

BACKEND = CpuBackend()
DEVICE = BACKEND.devices()[0]
PAIRS = [(name, k.id) for name in QUANTIZED for k in BACKEND.kernel_lists().linear[name]]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"up": nn.Linear(16, 32, dtype=dtype), "down": nn.Linear(32, 16, False, dtype=dtype)}
            )
            for _ in range(3)
        )
        self.norm = nn.LayerNorm(16)


def on_meta(dtype: torch.dtype = torch.float32) -> Net:
    with torch.device("meta"):
        return Net(dtype)


def quantized_names(net: nn.Module) -> set[str]:
    return {name for name, layer in net.named_modules() if isinstance(layer, QuantizedLinear)}


def test_keep_and_only_choose_layers_by_glob_over_whole_names_and_what_lies_inside() -> None:
    net = on_meta()
    quantize(
        net, format="fp8_row", keep=["embed", "blocks.1", "*.2.down"], backend=BACKEND, kernel_id="plain"
    )
    assert quantized_names(net) == {"blocks.0.up", "blocks.0.down", "blocks.2.up"}
    net = on_meta()
    quantize(net, format="fp8_row", keep=[], only=["blocks.*.up"], backend=BACKEND, kernel_id="plain")
    assert quantized_names(net) == {"blocks.0.up", "blocks.1.up", "blocks.2.up"}
    assert not matches("embedding", ["embed"])


@pytest.mark.parametrize(("format", "kernel"), PAIRS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 1, 4), (0,), (2, 0)])
def test_a_quantised_layer_takes_any_leading_dims(
    format: str, kernel: str, bias: bool, leading: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, vector = torch.randn(40, 70, generator=generator), torch.randn(40, generator=generator)
    net = nn.Sequential(nn.Linear(70, 40, bias))
    quantize(net, format=format, keep=[], backend=BACKEND, kernel_id=kernel)
    layer = net[0]
    assert isinstance(layer, QuantizedLinear)
    layer.accept_weight(weight)
    if bias:
        layer.bias = nn.Parameter(vector)
    x = torch.randn(*leading, 70, generator=generator)
    got = net(x)
    wanted = x.double() @ decode(encode(weight, format)).double().T + (vector if bias else 0.0)
    assert got.shape == (*leading, 40)
    assert got.dtype == x.dtype
    assert (got - wanted).abs().max().item() <= 0.12 * 70**0.5 if got.numel() else True


def test_the_report_counts_only_layers_that_hold_an_encoded_weight() -> None:
    net = on_meta()
    quantize(net, format="int8_row", keep=["embed"], backend=BACKEND, kernel_id="int8_matmul")
    assert quantization_report(net) == (0, 0, 0)
    net.blocks[0]["up"].accept_weight(torch.randn(32, 16))
    assert quantization_report(net) == (1, 32 * 16 + 32 * 4, 0)
    net.blocks[0]["up"].accept_weight(torch.randn(32, 16))
    assert quantization_report(net) == (1, 32 * 16 + 32 * 4, 0)


def test_the_high_precision_weight_is_gone_after_the_swap() -> None:
    net = on_meta()
    quantize(net, format="fp8_row", keep=[], backend=BACKEND, kernel_id="plain")
    assert not [name for name, _ in net.named_parameters() if name.endswith("weight") and "norm" not in name]
    assert {"embed.bias", "blocks.0.up.bias"} <= {name for name, _ in net.named_parameters()}


def test_a_format_that_reaches_no_layer_is_refused() -> None:
    with pytest.raises(BackendError, match=r"mxfp8 reaches none of the 7 linear layers"):
        quantize(on_meta(), format="mxfp8", keep=["*"], backend=BACKEND, kernel_id="plain")


def test_an_unknown_kernel_or_format_is_refused_before_anything_is_swapped() -> None:
    net = on_meta()
    with pytest.raises(BackendError, match=r"'int8_matmull'.*Did you mean 'int8_matmul'"):
        quantize(net, format="int8_row", keep=[], backend=BACKEND, kernel_id="int8_matmull")
    with pytest.raises(BackendError, match=r"'int8_raw'.*Did you mean 'int8_row'"):
        quantize(net, format="int8_raw", keep=[], backend=BACKEND, kernel_id="plain")
    assert not quantized_names(net)


def test_layers_that_the_kernel_does_not_serve_are_listed_and_nothing_is_swapped() -> None:
    with torch.device("meta"):
        net = nn.ModuleDict({"small": nn.Linear(16, 16), "huge": nn.Linear(200_000, 16)})
    capabilities = BACKEND.capabilities(DEVICE)
    with pytest.raises(BackendError, match=r"does not serve 1 layers: huge \[16, 200000\].*keep"):
        quantize(
            net,
            format="int8_row",
            keep=[],
            backend=BACKEND,
            kernel_id="int8_matmul",
            capabilities=capabilities,
        )
    assert not quantized_names(net)


def test_encoded_weights_are_taken_as_they_are_and_only_in_the_same_format() -> None:
    net = on_meta()
    quantize(net, format="mxfp8", keep=[], backend=BACKEND, kernel_id="plain")
    weight = encode(torch.randn(16, 8), "mxfp8")
    net.embed.accept_encoded(weight)
    assert torch.equal(net.embed.packed_values.float(), weight.values.float())
    with pytest.raises(WeightsError, match="never re-quantised"):
        net.embed.accept_encoded(encode(torch.randn(16, 8), "fp8_row"))
    with pytest.raises(WeightsError, match=r"\[8, 16\].*\[16, 8\]"):
        net.embed.accept_weight(torch.randn(8, 16))


def test_a_row_of_a_row_quantised_layer_does_not_depend_on_its_mates() -> None:
    weight, x = torch.randn(32, 64), torch.randn(4, 64)
    for format, kernel in PAIRS:
        if format == "fp8_tensor" and kernel == "emulated":
            continue  # one scale for the whole input, by definition of the format
        net = nn.Sequential(nn.Linear(64, 32, False))
        quantize(net, format=format, keep=[], backend=BACKEND, kernel_id=kernel)
        net[0].accept_weight(weight)
        louder = torch.cat([x, 1000 * torch.randn(3, 64)])
        torch.testing.assert_close(net(louder)[:4], net(x), rtol=1e-5, atol=1e-5)
