"""Scaling: how long a step and a request take under each layout of a machine, from declared figures alone.

What a machine declares is its dense arithmetic by format, the bandwidth of its memory and that of its links.
What kernels reach of that was measured once, on one H200 (`docs/benchmarks/h200.md`), and is assumed to hold
elsewhere: `docs/scaling.md` compares the result with what others published, and says where it does not hold.

    step = matrix products + attention + what is read and written between them + exchanges, none hidden
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from portable_dit import fitting
from portable_dit.capabilities import Capabilities
from portable_dit.errors import RecipeError
from portable_dit.footprint import Footprint, Offload, measure_footprint
from portable_dit.kernel_choice import quantizes_likely
from portable_dit.layout import Layout, layout_problems, split_shape
from portable_dit.models.spec import DTYPE_BYTES, ModelSpec, Numbers, Workload
from portable_dit.traffic import KINDS, agreements, bytes_sent_in_a_step, sums_in_a_block

EXCHANGE_SECONDS = 15e-6  # until an exchange moves its first byte; assumed
# Values that a block reads and writes between its products, for each row and unit of width.
BETWEEN = {"hidden": 10, "inner": 4, "ffn": 3}
PNG_SECONDS_PER_PIXEL = 9e-9  # 0.15 s for 4096 x 4096 on one core (docs/benchmarks/png.md)


@dataclass(frozen=True)
class Reached:
    """Which share of the declared rates software reaches.

    products, eight_bits: of matrix products in 16 bits and in formats of 8. attention: of the 16-bit rate.
    memory, link: of the bandwidths. decode: of the 16-bit rate, over the whole decoder. All but that of
    links, which is assumed, are this engine's in whole pictures of H3-Image on one H200.
    """

    products: float = 0.73
    eight_bits: float = 0.70
    attention: float = 0.63
    memory: float = 0.50
    link: float = 0.75
    decode: float = 0.36


OURS = Reached()


@dataclass(frozen=True)
class Prediction:
    """One layout. parts: seconds of a step by what takes them. bytes: the peak of one device.

    devices: of one replica; `images_per_hour` counts all replicas that the machine has room for.
    """

    layout: Layout
    step_seconds: float
    request_seconds: float
    parts: Mapping[str, float]
    bytes: int
    fits: bool
    images_per_hour: float

    @property
    def exchange_share(self) -> float:
        return self.parts["exchanges"] / self.step_seconds


def rank_layouts(
    spec: ModelSpec,
    capabilities: Capabilities,
    workload: Workload,
    *,
    numbers: Mapping[str, Numbers],
    offload: Offload,
    steps: int,
    branches: int = 1,
    devices: int | None = None,
    device_limit: int = 0,
    keep_what_fits: bool = False,
) -> list[Prediction]:
    """Every legal layout of up to `devices` devices, those that fit first, the quickest request first.

    device_limit: bytes of each device to plan with, 0 takes what it has. keep_what_fits: with layerwise
    offload, each layout keeps as many blocks on the device as fit it. Raises RecipeError when the machine
    declares too little.
    """
    count = devices or capabilities.count
    found = [
        predict(
            spec,
            capabilities,
            workload,
            layout,
            numbers=numbers,
            offload=offload,
            steps=steps,
            branches=branches,
            devices=count,
            device_limit=device_limit,
            keep_what_fits=keep_what_fits,
        )
        for layout in legal_layouts(spec, count)
        if layout.guidance <= branches
    ]
    return sorted(found, key=lambda p: (not p.fits, p.request_seconds, p.layout.replica))


def legal_layouts(spec: ModelSpec, devices: int) -> Iterator[Layout]:
    """Layouts of one replica on at most so many devices; text encoder and tiles take all that they can."""
    degrees = [n for n in range(1, devices + 1) if devices % n == 0]
    for tensor, ulysses, ring, guidance in product(degrees, degrees, degrees, (1, 2)):
        size = tensor * ulysses * ring * guidance
        if size > devices or devices % size:
            continue
        layout = Layout(tensor=tensor, ulysses=ulysses, ring=ring, guidance=guidance)
        if layout_problems(layout, spec, devices=None):
            continue
        yield _with_the_rest(layout, spec)


def _with_the_rest(layout: Layout, spec: ModelSpec) -> Layout:
    """The layout with experts, text encoder and tiles over as many of its devices as the rules allow."""
    for axis, degree in (
        ("expert", layout.tensor),
        ("text_encoder_tensor", layout.replica),
        ("vae_tiles", layout.replica if spec.tiling == "always" else 1),
    ):
        wider: Layout = replace(layout, **{axis: degree})
        if degree > 1 and not layout_problems(wider, spec, devices=None):
            layout = wider
    return layout


def predict(
    spec: ModelSpec,
    capabilities: Capabilities,
    workload: Workload,
    layout: Layout,
    *,
    numbers: Mapping[str, Numbers],
    offload: Offload,
    steps: int,
    branches: int = 1,
    devices: int | None = None,
    device_limit: int = 0,
    keep_what_fits: bool = False,
    reached: Reached = OURS,
) -> Prediction:
    """Time and memory of one layout. steps, branches: of the request. The rest as in `rank_layouts`."""
    _require_figures(capabilities, layout)
    parts = _step(spec, capabilities, workload, layout, numbers["dit"], branches, reached)
    step = sum(parts.values())
    around = _text_seconds(spec, capabilities, workload, layout, numbers["text_encoder"], reached)
    decode = spec.decode_flops(workload.width, workload.height) / layout.vae_tiles
    around += decode / (_rate(capabilities, numbers["vae"].dtype) * reached.decode)
    request = around + steps * step + PNG_SECONDS_PER_PIXEL * workload.width * workload.height

    def measure(workload: Workload, offload: Offload) -> Footprint:
        return measure_footprint(
            spec,
            capabilities,
            workload,
            numbers=numbers,
            offload=offload,
            layout=layout,
            device_limit=device_limit,
        )

    if keep_what_fits and offload.dit == "layerwise":
        offload = fitting.keep_what_fits(spec, measure, offload)
    size = measure(workload, offload)
    replicas = (devices or capabilities.count) // layout.replica
    return Prediction(layout, step, request, parts, size.peak, size.fits, 3600 * replicas / request)


def _step(
    spec: ModelSpec,
    capabilities: Capabilities,
    workload: Workload,
    layout: Layout,
    held: Numbers,
    branches: int,
    reached: Reached,
) -> dict[str, float]:
    """Seconds of one denoise step on the busiest device, by what takes them."""
    whole = spec.rows(workload) // spec.guidance_branches
    mine = -(-whole // (layout.ulysses * layout.ring)) * (1 if layout.guidance > 1 else branches)
    weights = 0.0
    for group in spec.linears:
        if group.component == "dit" and group.count == spec.num_blocks:
            inputs, outputs = split_shape(group, spec, layout)
            used = spec.experts_per_row if group.experts else 1
            weights += group.count * used * inputs * outputs
    products = 2 * mine * weights / _product_rate(capabilities, held, reached)
    heads = spec.num_heads / layout.tensor
    scores = 4 * mine * whole * heads * spec.head_dim * spec.num_blocks
    attention = scores / (_rate(capabilities, held.dtype) * reached.attention)
    width = (
        BETWEEN["hidden"] * spec.hidden_size
        + (BETWEEN["inner"] * spec.num_heads * spec.head_dim + BETWEEN["ffn"] * _ffn(spec)) / layout.tensor
    )
    moved = mine * width * DTYPE_BYTES[held.dtype] * spec.num_blocks
    assert capabilities.memory_bandwidth is not None
    return {
        "products": products,
        "attention": attention,
        "between": moved / (capabilities.memory_bandwidth * reached.memory),
        "exchanges": _exchange_seconds(spec, capabilities, workload, layout, held, branches, reached),
    }


def _ffn(spec: ModelSpec) -> int:
    return spec.ffn_size * (1 + spec.experts_per_row if spec.num_experts else 1)


def _exchange_seconds(
    spec: ModelSpec,
    capabilities: Capabilities,
    workload: Workload,
    layout: Layout,
    held: Numbers,
    branches: int,
    reached: Reached,
) -> float:
    kinds = KINDS if quantizes_likely(held, capabilities) else ()
    by_kind = bytes_sent_in_a_step(spec, workload, layout, held, branches=branches, quantizing=kinds)
    sent = sum(by_kind.values())
    if not sent:
        return 0.0
    sums = sums_in_a_block(spec)
    calls = (
        spec.num_blocks * (4 * (layout.ulysses > 1) + (layout.ring - 1) + sums * (layout.tensor > 1))
        + (layout.ulysses * layout.ring > 1)
        + (layout.guidance > 1)
        + sum(agreement.count for agreement in agreements(spec, layout, held, kinds, 1))
    )
    assert capabilities.link_bandwidth is not None
    return sent / (capabilities.link_bandwidth * reached.link) + calls * EXCHANGE_SECONDS


def _text_seconds(
    spec: ModelSpec,
    capabilities: Capabilities,
    workload: Workload,
    layout: Layout,
    held: Numbers,
    reached: Reached,
) -> float:
    """The text encoder: products of few rows, but never quicker than its weights can be read."""
    weights = sum(
        group.count * group.in_features * group.out_features
        for group in spec.linears
        if group.component == "text_encoder"
    )
    weights //= layout.text_encoder_tensor
    assert capabilities.memory_bandwidth is not None
    read = weights * DTYPE_BYTES[held.dtype] / (capabilities.memory_bandwidth * reached.memory)
    return max(2 * workload.prompt_tokens * weights / _product_rate(capabilities, held, reached), read)


def _product_rate(capabilities: Capabilities, held: Numbers, reached: Reached) -> float:
    """Operations per second of a component's matrix products; weight-only formats compute in the dtype."""
    if not quantizes_likely(held, capabilities):
        return _rate(capabilities, held.dtype) * reached.products
    assert held.format is not None
    same = (held.format, "fp8_row", "fp8_tensor", "fp8_block128", "mxfp8")
    known = [capabilities.compute[name] for name in same if name in capabilities.compute]
    return known[0] * 1e12 * reached.eight_bits


def _rate(capabilities: Capabilities, dtype: str) -> float:
    """Declared operations per second; float32 runs on the matrix units at half the rate of 16 bits."""
    rate = capabilities.compute.get(dtype) or capabilities.compute["bfloat16"] / (
        2 if dtype == "float32" else 1
    )
    return rate * 1e12


def _require_figures(capabilities: Capabilities, layout: Layout) -> None:
    missing = [] if capabilities.compute.get("bfloat16") else ["compute.bfloat16"]
    missing += [] if capabilities.memory_bandwidth else ["memory_bandwidth"]
    missing += [] if capabilities.link_bandwidth or layout.replica == 1 else ["link_bandwidth"]
    if missing:
        way_out = "Name a machine file that does, with --machine"
        way_out += ", or rank one device alone, with --devices 1." if missing == ["link_bandwidth"] else "."
        raise RecipeError(
            f"{capabilities.device.name} does not declare {', '.join(missing)}, from which times are "
            f"predicted. {way_out}"
        )


def table(predictions: Sequence[Prediction], *, most: int) -> list[tuple[str, ...]]:
    """Rows for people: layout, step in ms, share of exchanges, request in s, peak in GiB, images an hour."""
    rows: list[tuple[str, ...]] = []
    for found in predictions[:most]:
        memory = f"{found.bytes / 2**30:.1f}" + ("" if found.fits else " too much")
        rows.append(
            (
                words(found.layout),
                f"{1000 * found.step_seconds:.1f}",
                f"{found.exchange_share:.0%}",
                f"{found.request_seconds:.2f}",
                memory,
                f"{found.images_per_hour:,.0f}",
            )
        )
    return rows


def words(layout: Layout) -> str:
    """What splits the DiT, as a recipe names it; text encoder, tiles and experts use the same devices."""
    axes = ("guidance", "ring", "ulysses", "tensor", *(["expert"] if layout.expert != layout.tensor else []))
    split = {axis: getattr(layout, axis) for axis in axes}
    return " ".join(f"{axis} {degree}" for axis, degree in split.items() if degree > 1) or "one device"
