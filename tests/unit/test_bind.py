"""Binding kernels to seams."""

from __future__ import annotations

import pytest
import torch
from h3_tiny import DIT
from torch import nn

from portable_dit import cpu, ops
from portable_dit.backend import FusedOp
from portable_dit.bind import bind
from portable_dit.cpu import CpuBackend, Int8Linear
from portable_dit.errors import BackendError
from portable_dit.formats import QuantizedRows, format_named, quantize_blocks
from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.models.h3_image.spec import PRODUCERS
from portable_dit.quantize import QuantizedLinear, quantize


def model() -> nn.Module:
    return nn.ModuleDict(
        {
            "attention": ops.Attention(4, 8),
            "inner": nn.ModuleList([ops.Attention(4, 8), ops.ModulatedNorm(8, 1e-6), ops.SwiGLU()]),
        }
    )


def test_every_seam_of_a_chosen_op_gets_the_kernel_and_the_others_stay_plain() -> None:
    net = model()
    chosen = {
        "attention": "sdpa_math",
        "swiglu": "plain",
        "linear:int8_row": "int8_matmul",
        "rms_norm": "one_pass",
    }
    assert bind(net, CpuBackend(), chosen) == {"attention": 2, "rms_norm": 0}
    runs = [seam.run for seam in net.modules() if isinstance(seam, ops.Attention)]
    assert len(runs) == 2
    assert all(run.__self__.id == "sdpa_math" for run in runs)
    assert net["inner"][1].run is ops.norm_modulate
    assert net["inner"][2].run is ops.swiglu
    bind(net, CpuBackend(), {"swiglu": "in_place"})
    assert net["inner"][2].run is cpu.swiglu


def test_an_unknown_kernel_names_the_near_one() -> None:
    with pytest.raises(BackendError, match=r"attention kernel 'sdpa_flas'.*Did you mean 'sdpa_flash'"):
        bind(model(), CpuBackend(), {"attention": "sdpa_flas"})
    with pytest.raises(BackendError, match=r"swiglu kernel 'x' does not exist.*in_place"):
        bind(model(), CpuBackend(), {"swiglu": "x"})


class Counted(Int8Linear):
    """int8 products that say how often their input came quantised."""

    takes_quantized = True
    handed_over = 0

    def apply_quantized(self, values, scales, packed, bias, dtype):
        Counted.handed_over += 1
        sums = torch._int_mm(values, packed["values"].t()).float()
        return (sums * scales * packed["scales"].t()).to(dtype)

    def apply(self, x, packed, bias):
        values, scales = quantize_blocks(x.float(), self.format, (1, 0))
        out = self.apply_quantized(values, scales, packed, bias, x.dtype)
        Counted.handed_over -= 1
        return out


def quantized(plain):
    """The function with its result in int8 rows."""

    def run(*arguments):
        out = plain(*arguments)
        form = format_named("int8_row")
        values, scales = quantize_blocks(out.flatten(0, -2).float(), form, (1, 0))
        return QuantizedRows(form, values, scales, tuple(out.shape), out.dtype)

    return {"int8_row": run}


class HandsOver(CpuBackend):
    def linear_kernels(self):
        return {"int8_row": [Counted("int8_row")]}

    def fused_ops(self):
        ops_ = (("norm_modulate", ops.norm_modulate), ("swiglu", ops.swiglu))
        return {op: [FusedOp(op, "makes_int8", f, quantized=quantized(f))] for op, f in ops_}


def test_a_seam_with_a_part_of_what_devices_round_together_hands_over_a_tensor() -> None:
    for agree in (None, lambda largest: largest):
        net = H3Transformer(DIT)
        backend = HandsOver()
        quantize(net, format="int8_row", keep=(), backend=backend, kernel_id="int8_matmul", only=("blocks",))
        for block in net.blocks:
            block.mlp.fc2.agree = agree
        bind(net, backend, {"norm_modulate": "makes_int8", "swiglu": "makes_int8"}, producers=PRODUCERS)
        kept = [block.mlp.act.run is ops.swiglu for block in net.blocks]
        assert kept == [agree is not None] * len(net.blocks)
        assert not any(block.norm1.run is ops.norm_modulate for block in net.blocks)


def test_a_seam_makes_the_8_bit_input_of_the_layer_that_alone_reads_it() -> None:
    """The picture is the same bit for bit, since both round the same numbers."""
    config = DIT
    pictures, backend = [], HandsOver()
    for producers in ((), PRODUCERS):
        net = H3Transformer(config)
        for name, weight in sorted(net.named_parameters()):
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1
        kept = {name: layer.weight for name, layer in net.named_modules() if isinstance(layer, nn.Linear)}
        only = ("blocks.0.attn.qkv_proj", "blocks.*.mlp")
        quantize(net, format="int8_row", keep=(), backend=backend, kernel_id="int8_matmul", only=only)
        for name, layer in net.named_modules():
            if isinstance(layer, QuantizedLinear):
                layer.accept_weight(kept[name])
        Counted.handed_over = 0
        bind(net, backend, {"norm_modulate": "makes_int8", "swiglu": "makes_int8"}, producers=producers)
        with torch.no_grad():
            x = torch.randn(1, 5, config.hidden_size, generator=torch.Generator().manual_seed(0))
            table = torch.randn(2, 6, config.hidden_size, generator=torch.Generator().manual_seed(1))
            modulation = ops.Modulation(table, torch.tensor([[0, 1, 0, 1, 1]]))
            rotary = net.rotary(torch.arange(15).view(1, 5, 3))
            for block in net.blocks:
                x = block(x, modulation, rotary)
        pictures.append(x)
        # Block 1's qkv_proj is not quantised, so its norm gives it a tensor.
        assert Counted.handed_over == (5 if producers else 0)
    assert torch.equal(*pictures)
