"""The published peaks of HunyuanImage-3.0, item by item: what that server holds beside what the plan counts.

Its figure is what torch's allocator has reserved (`torch.cuda.max_memory_reserved`), so neither the driver
nor the buffers of collectives are in it, but blocks that the allocator keeps for later are. Those follow from
the order of calls, so its decoder is walked here on the meta device, and an allocator with torch's rules sees
every tensor that comes and goes. docs/hunyuan-image-3.md has the result as a table.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portable_dit.models import read_spec
from portable_dit.models.hunyuan_image_3.names import all_tensors
from portable_dit.models.spec import Numbers, Workload

SPEC = read_spec("hunyuan-image-3", "random")
DIT, VAE = SPEC.config.dit, SPEC.config.vae
SQUARE = Workload(1024, 1024, SPEC.prompt_tokens, tile_batch=0)
MIB, GB = 1 << 20, 1e9
PAGE = Path(__file__).parents[2] / "docs" / "hunyuan-image-3.md"


class Allocator:
    """torch's caching allocator with its default settings: blocks of segments that are never given back.

    Sizes are multiples of 512. Up to 1 MiB they come from segments of 2 MiB, below 10 MiB from ones of 20;
    larger ones get a segment of their own, in steps of 2 MiB. The smallest free block that is large enough is
    taken, and cut where the rest is worth keeping: 512 bytes of small ones, over 1 MiB of others. Source:
    torch 2.13, c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp.
    """

    def __init__(self) -> None:
        self.reserved = self.live = self.peak = 0
        self._segments: list[tuple[bool, list[Block]]] = []

    def take(self, nbytes: int) -> Callable[[], None]:
        """Takes memory; gives what gives it back."""
        size = max(-(-nbytes // 512) * 512, 512)
        small = size <= MIB
        free = [
            (block.size, number, place)
            for number, (kind, blocks) in enumerate(self._segments)
            for place, block in enumerate(blocks)
            if kind == small and block.free and block.size >= size
        ]
        if not free:
            fresh = 2 * MIB if small else (20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB)
            self.reserved += fresh
            self._segments.append((small, [Block(fresh)]))
            free = [(fresh, len(self._segments) - 1, 0)]
        _, number, place = min(free)
        blocks = self._segments[number][1]
        block = blocks[place]
        rest = block.size - size
        if rest >= 512 if small else rest > MIB:
            block.size = size
            blocks.insert(place + 1, Block(rest))
        block.free = False
        self.live += block.size
        self.peak = max(self.peak, self.live)
        return lambda: self._give_back(blocks, block)

    def _give_back(self, blocks: list[Block], block: Block) -> None:
        self.live -= block.size
        block.free = True
        place = next(n for n, one in enumerate(blocks) if one is block)
        for first in (place, place - 1):  # with its neighbours
            if 0 <= first < len(blocks) - 1 and blocks[first].free and blocks[first + 1].free:
                blocks[first].size += blocks.pop(first + 1).size


@dataclass
class Block:
    size: int
    free: bool = True


class Watched(TorchDispatchMode):
    """Tells an allocator of every storage that comes to be, and when it is gone."""

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self.allocator = allocator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage.nbytes():
                weakref.finalize(storage, self.allocator.take(storage.nbytes()))
        return out


class DecoderAsWritten:
    """The publishers' decoder for one frame: 3-D kernels with all taps, float16 convolutions by autocast.

    What autocast does not do in float16 is float32: norms, and the activation x * sigmoid(x) behind them; the
    plain path is a sum of both kinds, and so float32 too. copies: a convolution's library lays its input and
    output out with channels innermost, in memory of its own.
    """

    def __init__(self, allocator: Allocator, *, copies: bool = True) -> None:
        self.allocator = allocator
        self.copies = copies

    def run(self, width: int, height: int) -> None:
        cells = height // VAE.ffactor_spatial, width // VAE.ffactor_spatial
        with Watched(self.allocator), torch.device("meta"):
            z = torch.empty(1, VAE.latent_channels, 1, *cells)
            repeats = VAE.levels[0] // VAE.latent_channels
            x = self.conv(z, VAE.levels[0]) + z.repeat_interleave(repeats, dim=1)
            x = self.block(self.attention(self.block(x)))
            for level in range(len(VAE.levels)):
                for _ in range(VAE.layers_per_block + 1):
                    x = self.block(x)
                if 2**level < VAE.ffactor_spatial:
                    x = self.upsample(x, VAE.frames(level + 1) // VAE.frames(level), VAE.levels[level + 1])
            self.conv(self.activated(x), VAE.out_channels)

    def conv(self, x: Tensor, channels: int, kernel: int = 3) -> Tensor:
        half = x.half()
        weight = torch.empty(channels, x.shape[1], *(kernel,) * 3, dtype=torch.float16)
        made = half.new_empty(x.shape[0], channels, *x.shape[2:])
        if self.copies:
            self.allocator.take(half.nbytes + made.nbytes)()
        del weight
        return made

    def activated(self, x: Tensor) -> Tensor:
        normed = F.group_norm(x.float(), VAE.norm_num_groups)
        return normed * torch.sigmoid(normed)

    def block(self, x: Tensor) -> Tensor:
        out = self.conv(self.activated(x), x.shape[1])
        return x + self.conv(self.activated(out), x.shape[1])

    def attention(self, x: Tensor) -> Tensor:
        normed = F.group_norm(x.float(), VAE.norm_num_groups)
        seen = [self.conv(normed, x.shape[1], 1) for _ in ("q", "k", "v")]
        return x + self.conv(torch.empty_like(seen[0]), x.shape[1], 1)

    def upsample(self, x: Tensor, times: int, channels: int) -> Tensor:
        made = 4 * times * channels
        out = spread(self.conv(x, made), times)
        return out + spread(x.repeat_interleave(made // x.shape[1], dim=1), times)


def spread(x: Tensor, times: int) -> Tensor:
    """[B, times * 4 * C, T, h, w] -> [B, C, times * T, 2h, 2w]."""
    batch, _, frames, h, w = x.shape
    x = x.view(batch, times, 2, 2, -1, frames, h, w).permute(0, 4, 5, 1, 6, 2, 7, 3)
    return x.reshape(batch, -1, frames * times, 2 * h, 2 * w)


def step_blocks(allocator: Allocator, tensor: int, rows: int) -> None:
    """What a denoise step leaves in the allocator: its widest moment, in which experts have their rows.

    Residual, its norm, the shared MLP's result and the mixture's; rows in 8 bits, dealt out to experts, and
    what the experts' two layers give, in bfloat16.
    """
    width, chosen = DIT.hidden_size, rows * DIT.moe_topk
    hidden = DIT.moe_intermediate_size // tensor
    sizes = [2 * rows * width] * 4 + [rows * width]
    sizes += [2 * chosen * 2 * hidden, 2 * chosen * hidden, chosen * hidden, 2 * chosen * width]
    for give_back in [allocator.take(size) for size in sizes]:
        give_back()


def static_bytes(tensor: int) -> dict[str, float]:
    """What rests on each device, by item: linears in 8 bits, all else in bfloat16."""
    dit = SPEC.bytes_on_device("dit", SQUARE, Numbers("bfloat16", "fp8_row"))
    shapes = {name: math.prod(shape) for name, shape in all_tensors(SPEC.config).items()}

    def held(*prefixes: str) -> int:
        return 2 * sum(size for name, size in shapes.items() if name.startswith(prefixes))

    return {
        "layers and experts": dit.parts["layers"] / tensor,
        "rest of the DiT": dit.weights - dit.parts["layers"],
        "token table": held("model.wte") / tensor,
        "word head": held("lm_head", "model.ln_f"),
        "vision tower and aligner": held("vision_"),
        "autoencoder": held("vae."),
    }


@dataclass(frozen=True)
class Published:
    """A layout and its peak, in what is called GB there. rows: of its first step on each device."""

    name: str
    tensor: int
    rows: int
    peak: float


ROWS = SPEC.rows(SQUARE) + SPEC.guidance_branches * SPEC.prompt_tokens
FIGURES = (
    Published("TP=4", 4, ROWS, 47),
    Published("TP=2, Ulysses 2", 2, ROWS // 2, 66),
    Published("TP=2, CFG 2", 2, ROWS // 2, 66),
)


def arithmetic(figure: Published, *, copies: bool = True) -> dict[str, float]:
    """Bytes by item: weights, tensors of the decoder's widest moment, and what else the allocator keeps."""
    allocator = Allocator()
    step_blocks(allocator, figure.tensor, figure.rows)
    DecoderAsWritten(allocator, copies=copies).run(SQUARE.width, SQUARE.height)
    kept = allocator.reserved - allocator.peak
    return {**static_bytes(figure.tensor), "widest moment": allocator.peak, "kept free": kept}


@pytest.fixture(scope="module")
def items() -> dict[str, dict[str, float]]:
    return {figure.name: arithmetic(figure) for figure in FIGURES}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_what_that_server_holds_adds_up_to_the_published_peak(figure, items):
    assert sum(items[figure.name].values()) / GB == pytest.approx(figure.peak, rel=0.1)


def test_the_page_shows_this_arithmetic(items):
    """Each item of the table in docs/hunyuan-image-3.md is the one that is counted here, in GB."""
    table = PAGE.read_text().partition("| item |")[2].partition("| published |")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    by_item = {row[0]: row[1:3] for row in rows if row[0]}
    for item in items["TP=4"]:
        shown = [float(number) for number in by_item[item]]
        assert shown == [round(items[name][item] / GB, 2) for name in ("TP=4", "TP=2, CFG 2")], item
    sums = [round(sum(items[name].values()) / GB, 1) for name in ("TP=4", "TP=2, CFG 2")]
    assert [float(number.strip("*")) for number in by_item["**sum**"]] == sums
    assert items["TP=2, Ulysses 2"] == items["TP=2, CFG 2"]


def test_weights_are_the_whole_checkpoint_of_which_the_layers_are_in_8_bits():
    count = sum(math.prod(shape) for shape in all_tensors(SPEC.config).values())
    assert count == 83_009_199_459
    in_8_bits = sum(g.count * (g.experts or 1) * g.in_features * g.out_features for g in SPEC.linears)
    scales = 4 * sum(g.count * (g.experts or 1) * g.out_features for g in SPEC.linears)
    assert sum(static_bytes(1).values()) == 2 * (count - in_8_bits) + in_8_bits + scales


def test_what_is_assumed_of_that_server_and_how_much_hangs_on_it(items):
    """As the page says it: a float32 autoencoder, and convolutions without copies of their own."""
    autoencoder = items["TP=4"]["autoencoder"]
    for figure in FIGURES:
        total = sum(items[figure.name].values())
        assert (total + autoencoder) / GB == pytest.approx(figure.peak, rel=0.1)
        bare = sum(arithmetic(figure, copies=False).values())
        assert 2.0 < (total - bare) / GB < 3.0


def test_what_is_freed_stays_and_serves_again_where_it_is_large_enough():
    allocator = Allocator()
    first = allocator.take(100 * MIB)
    assert (allocator.reserved, allocator.live) == (100 * MIB, 100 * MIB)
    first()
    small, large = allocator.take(30 * MIB), allocator.take(60 * MIB)  # both in what was freed
    assert (allocator.reserved, allocator.live) == (100 * MIB, 90 * MIB)
    allocator.take(12 * MIB)  # of which 10 are left
    assert allocator.reserved == 112 * MIB
    small()
    large()
    whole = allocator.take(100 * MIB)  # neighbours that are free are one block again
    assert allocator.reserved == 112 * MIB
    whole()
    allocator.take(3 * MIB)
    assert (allocator.reserved, allocator.peak, allocator.live) == (112 * MIB, 112 * MIB, 15 * MIB)


def test_small_tensors_share_segments_and_the_walk_ends_with_nothing_held():
    allocator = Allocator()
    for give_back in [allocator.take(1000) for _ in range(4)]:
        give_back()
    assert (allocator.reserved, allocator.live, allocator.peak) == (2 * MIB, 0, 4 * 1024)
    DecoderAsWritten(allocator).run(64, 64)
    assert allocator.live == 0
