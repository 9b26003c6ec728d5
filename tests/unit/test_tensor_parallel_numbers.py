"""8-bit layers over 1, 2 and 4 devices: the same weights to the bit, and sums that differ in order alone.

Inputs that are quantised too are in test_input_scales.py. Ranks are made one after the other in this process,
by the code that real ranks run; what they would send each other is put together here.
"""

from dataclasses import replace

import pytest
import torch

from portable_dit.backend import LinearKernel
from portable_dit.formats import Encoded, decode
from portable_dit.models.hunyuan_image_3.dit import HunyuanTransformer
from portable_dit.models.hunyuan_image_3.random_checkpoint import TINY
from portable_dit.models.hunyuan_image_3.spec import make_spec
from portable_dit.parallel.collectives import Group, Pulse
from portable_dit.parallel.tensor import shares_of, shrink
from portable_dit.quantize import QuantizedLinear
from portable_dit.shares import Share

# Widths that 32 divides four times, so that mxfp8's blocks end where the parts do.
CONFIG = replace(
    TINY,
    dit=replace(
        TINY.dit,
        hidden_size=128,
        num_hidden_layers=1,
        attention_head_dim=32,
        moe_intermediate_size=128,
        num_experts=2,
    ),
)
SPLITS = make_spec("hunyuan-image-3", CONFIG).tensor_plan
FORMATS = ("fp8_row", "fp8_tensor", "int8_row", "mxfp8")
ROWS = 24
UNIT = 2.0**-24  # half a unit in the last place of float32, relative


def all_of(weight: torch.Tensor) -> Share:
    return Share(0, len(weight), ((0, len(weight)),))


def ranks(degree: int, format: str) -> list[dict[str, Share]]:
    """What each rank reads of every weight [N, K] that is divided."""
    found = []
    for index in range(degree):
        group = Group("tensor", size=degree, index=index, handle=None, pulse=Pulse())
        with torch.device("meta"):
            model = HunyuanTransformer(CONFIG.dit, CONFIG.vae.latent_channels)
        shrink(model, SPLITS, group)
        names = [split.pattern.replace("*", "0") for split in SPLITS]
        found.append(shares_of(model, SPLITS, group, dict.fromkeys(names, format)))
    return [{name: share for name, share in shares.items() if name.endswith(".weight")} for shares in found]


def whole_weights() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = HunyuanTransformer(CONFIG.dit, CONFIG.vae.latent_channels)
    generator, weights = torch.Generator().manual_seed(0), {}
    for split in SPLITS:
        name = split.pattern.replace("*", "0")
        layer = model.get_submodule(name)
        for expert in range(split.experts or 1):
            weight = torch.randn(layer.out_features, layer.in_features, generator=generator)
            weight[:, -3] *= 20  # the largest of a row lies in the last part
            weights[f"{name}.{expert}.weight" if split.experts else f"{name}.weight"] = weight
    return weights


def encoded_parts(weight: torch.Tensor, shares: list[Share], format: str) -> list[Encoded]:
    """What the ranks hold of a weight, each through the layer that takes it from the loader."""
    largest: list[torch.Tensor] = []

    def told(amax: torch.Tensor) -> torch.Tensor:
        largest.append(amax.clone())
        return amax

    def take(share: Share, agree) -> Encoded:
        part = share.cut(weight)
        layer = QuantizedLinear(
            torch.nn.Linear(*part.shape[::-1], bias=False, device="meta"), Keeping(format)
        )
        layer.accept_weight(part, agree=agree)
        return layer.kernel.kept

    if shares[0].agree is not None:  # every rank says its largest, then each gets the largest of all
        for share in shares:
            take(share, told)
    agreed = torch.stack(largest).amax(dim=0) if largest else None
    return [take(share, None if agreed is None else lambda amax: agreed) for share in shares]


class Keeping(LinearKernel):
    """The plain kernel, which keeps the weight that it is given to pack."""

    def pack(self, weight, dtype):
        self.kept = weight
        return super().pack(weight, dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("degree", [2, 4])
def test_the_parts_of_every_divided_weight_are_those_of_the_whole_to_the_bit(format, degree):
    shares, weights = ranks(degree, format), whole_weights()
    assert weights.keys() == shares[0].keys()
    for name, weight in weights.items():
        alone = decode(encoded_parts(weight, [all_of(weight)], format)[0])
        mine = [rank[name] for rank in shares]
        for share, part in zip(mine, encoded_parts(weight, mine, format), strict=True):
            assert torch.equal(decode(part), share.cut(alone)), name


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("degree", [2, 4])
def test_results_differ_from_one_device_in_the_order_of_sums_alone(format, degree):
    """A sum of K products in float32 is off by K units of the sum of their magnitudes in any order (Higham,
    Accuracy and Stability of Numerical Algorithms, 3.1), so two orders differ by twice that at most.
    """
    generator = torch.Generator().manual_seed(1)
    shares, kernel = ranks(degree, format), LinearKernel(format)
    for name, weight in whole_weights().items():
        mine = [rank[name] for rank in shares]
        whole = encoded_parts(weight, [all_of(weight)], format)[0]
        x = torch.randn(ROWS, weight.shape[1], generator=generator)
        wanted = kernel.apply(x, kernel.pack(whole, x.dtype), None)
        results = []
        for share, part in zip(mine, encoded_parts(weight, mine, format), strict=True):
            seen = x if share.dim == 0 else share.cut(x)
            results.append(kernel.apply(seen, kernel.pack(part, x.dtype), None))
        if mine[0].dim == 0:
            order = torch.cat([torch.cat([torch.arange(*r) for r in share.ranges]) for share in mine])
            got = torch.empty_like(wanted)
            got[:, order] = torch.cat(results, dim=1)
        else:
            got = torch.stack(results).sum(dim=0)
        magnitude = x.abs() @ decode(whole).abs().T
        bound = 2 * weight.shape[1] * UNIT * magnitude
        assert ((got - wanted).abs() <= bound).all(), name
        assert bound.max() < 1e-3 * wanted.abs().max(), "a bound that any result would keep"
