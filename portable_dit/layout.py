"""Layout: how a model is spread over devices, and the rules that say which spreads exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from portable_dit.capabilities import AttentionRequest
from portable_dit.models.spec import (
    FORMAT_SCALES,
    LinearGroup,
    ModelSpec,
    TensorSplit,
    input_spans,
    rotated_together,
)


@dataclass(frozen=True)
class Layout:
    """Degrees of each way to split the work; 1 everywhere is one device.

    Meanings are those of `recipe.layout`.
    """

    tensor: int = 1
    ulysses: int = 1
    ring: int = 1
    guidance: int = 1
    expert: int = 1
    data: int = 1
    text_encoder_tensor: int = 1
    vae_tiles: int = 1

    @property
    def replica(self) -> int:
        """Devices of one replica.

        Experts, text encoder and VAE tiles use these devices again, they add none.
        """
        return self.tensor * self.ulysses * self.ring * self.guidance

    @property
    def exchanges_in_blocks(self) -> bool:
        """Whether devices exchange rows, heads or sums inside the blocks of the DiT."""
        return self.tensor * self.ulysses * self.ring * self.expert > 1

    @property
    def world(self) -> int:
        return self.replica * self.data


ONE_DEVICE = Layout()


def layout_problems(layout: Layout, spec: ModelSpec, *, devices: int | None) -> list[str]:
    """Every rule that a layout breaks, with the nearest legal degree. devices: None = as many as it needs."""
    problems = []
    for axis, degree in asdict(layout).items():
        if degree > 1:
            why = _axis_problem(axis, degree, layout, spec)
            problems += [f"layout.{axis}={degree}: {why}"] if why else []
    if not problems and devices not in (None, layout.world):
        problems.append(
            f"device.count={devices}: the layout uses {layout.world} ({_product(layout)}). "
            f"Say device.count={layout.world}, or change the layout."
        )
    return problems


def _axis_problem(axis: str, degree: int, layout: Layout, spec: ModelSpec) -> str | None:
    if axis not in spec.supported_layouts:
        others = ", ".join(spec.supported_layouts)
        can = f"it can be split by {others}" if others else "it runs on one device"
        return f"{spec.id} cannot be split this way in this version; {can}. Say layout.{axis}=1."
    match axis:
        case "tensor":
            return _must_divide(
                degree,
                {
                    "attention heads": spec.num_heads,
                    "key heads": spec.num_kv_heads,
                    "feed-forward width": spec.ffn_size,
                },
            )
        case "ulysses":
            heads = spec.num_heads // layout.tensor if spec.num_heads % layout.tensor == 0 else spec.num_heads
            return _must_divide(degree, {"attention heads of each tensor part": heads})
        case "guidance":
            if spec.guidance_branches == 1:
                return f"{spec.id} draws without guidance branches. Say layout.guidance=1."
            return None if degree == 2 else "guidance has two branches. Say layout.guidance=2 or 1."
        case "expert":
            if not spec.num_experts:
                return f"{spec.id} has no experts. Say layout.expert=1."
            # Devices that see the same rows; others would have to send their rows around.
            return _must_divide(
                degree, {"experts": spec.num_experts, "devices of layout.tensor": layout.tensor}
            )
        case "text_encoder_tensor":
            counts = {"heads of the text encoder": spec.num_text_heads, "its width": spec.text_ffn_size}
            return _must_divide(degree, {**counts, "devices of a replica": layout.replica})
        case "vae_tiles":
            return _must_divide(degree, {"devices of a replica": layout.replica})
        case _:
            return None


def split_attention(request: AttentionRequest, component: str, layout: Layout) -> AttentionRequest:
    """What one device is asked of an attention call: its heads, and with a ring the log-sum-exp too."""
    degree = {"dit": layout.tensor * layout.ulysses, "text_encoder": layout.text_encoder_tensor}.get(
        component, 1
    )
    return replace(
        request,
        num_heads=max(request.num_heads // degree, 1),
        num_kv_heads=max(request.num_kv_heads // degree, 1),
        return_lse=request.return_lse or (component == "dit" and layout.ring > 1),
    )


def split_shape(group: LinearGroup, spec: ModelSpec, layout: Layout) -> tuple[int, int]:
    """(in features, out features) of the part of a linear layer that one device holds."""
    shape, split = [group.in_features, group.out_features], _split_of(group, spec)
    if split is not None:
        shape[split.along == "out"] //= tensor_degree(group.component, layout)
    return shape[0], shape[1]


def sharers(group: LinearGroup, spec: ModelSpec, layout: Layout, format: str) -> tuple[int, ...]:
    """How many devices agree on the scales of a layer's input before it is quantised, once for each number.

    Those that hold its columns, where a scale spans them all, and those that hold its rows. Guidance branches
    on devices of their own are scaled on their own.
    """
    split = _split_of(group, spec)
    if split is None:
        return ()
    spans_rows, spans_columns = input_spans(format)
    columns = tensor_degree(group.component, layout) // (layout.expert if group.experts else 1)
    rows = layout.ulysses * layout.ring if group.component == "dit" else 1
    found = (columns if spans_columns and split.along == "in" else 1, rows if spans_rows else 1)
    return tuple(degree for degree in found if degree > 1)


def _split_of(group: LinearGroup, spec: ModelSpec) -> TensorSplit | None:
    """How tensor parallel divides these layers: those of the blocks, and no other."""
    wanted = group.component, group.pattern
    return next((s for s in spec.tensor_plan if (s.component, s.pattern) == wanted), None)


def tensor_degree(component: str, layout: Layout) -> int:
    """Over how many devices a component's layers are divided."""
    return {"dit": layout.tensor, "text_encoder": layout.text_encoder_tensor}.get(component, 1)


def split_problems(spec: ModelSpec, layout: Layout, formats: Mapping[str, str | None]) -> list[str]:
    """Layers whose parts would not end where the blocks of their format do, by component's format."""
    problems = []
    for split in spec.tensor_plan:
        degree, format = tensor_degree(split.component, layout), formats.get(split.component)
        if degree == 1 or format is None:
            continue
        _, rows, columns = FORMAT_SCALES[format]
        group = next(
            (g for g in spec.linears if (g.component, g.pattern) == (split.component, split.pattern)), None
        )
        if group is None:
            continue
        out = split.along == "out"
        block, widths = (
            (rows, split.parts or (group.out_features,)) if out else (columns, (group.in_features,))
        )
        key = "tensor" if split.component == "dit" else "text_encoder_tensor"
        if block > 1 and any(width // degree % block for width in widths):
            problems.append(
                f"layout.{key}={degree}: the parts of {split.pattern} must be whole blocks of {block} "
                f"{format} values, and {min(widths) // degree} is none. Say another degree, or "
                f"quantization.{split.component}=fp8_row."
            )
        turned, part = rotated_together(group.in_features), group.in_features // degree
        if not out and format.endswith("_rotated") and rotated_together(part) != turned:
            problems.append(
                f"layout.{key}={degree}: {format} turns {turned} neighbouring channels of {split.pattern} "
                f"together, and parts of {part} would cut them apart. Say another degree, or "
                f"quantization.{split.component}={format.removesuffix('_rotated')}."
            )
    return problems


def _must_divide(degree: int, counts: dict[str, int]) -> str | None:
    if all(count % degree == 0 for count in counts.values()):
        return None
    rule = " and ".join(f"the {count:,} {name}" for name, count in counts.items())
    legal = [n for n in range(1, min(counts.values()) + 1) if not any(c % n for c in counts.values())]
    nearest = min(legal, key=lambda n: (abs(n - degree), n))
    return f"must divide {rule}. Nearest: {nearest}."


def _product(layout: Layout) -> str:
    axes = ("tensor", "ulysses", "ring", "guidance", "data")
    return " x ".join(f"{axis} {getattr(layout, axis)}" for axis in axes)
