"""Layout: how a model is spread over devices, and the rules that say which spreads exist."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from portable_dit.models.spec import ModelSpec


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
    def world(self) -> int:
        return self.replica * self.data


def layout_problems(layout: Layout, spec: ModelSpec, *, devices: int) -> list[str]:
    """Every rule that a layout breaks, with the nearest legal degree."""
    problems = []
    for axis, degree in asdict(layout).items():
        if degree > 1:
            why = _axis_problem(axis, degree, layout, spec)
            problems += [f"layout.{axis}={degree}: {why}"] if why else []
    if not problems and layout.world != devices:
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
                degree, {"attention heads": spec.num_heads, "feed-forward width": spec.ffn_size}
            )
        case "ulysses":
            heads = spec.num_heads // layout.tensor if spec.num_heads % layout.tensor == 0 else spec.num_heads
            return _must_divide(degree, {"attention heads of each tensor part": heads})
        case "guidance":
            if not spec.has_guidance:
                return f"{spec.id} draws without guidance, so there is one branch. Say layout.guidance=1."
            return None if degree == 2 else "guidance has two branches. Say layout.guidance=2 or 1."
        case "expert":
            if not spec.num_experts:
                return f"{spec.id} has no experts. Say layout.expert=1."
            return _must_divide(degree, {"experts": spec.num_experts, "devices of a replica": layout.replica})
        case "text_encoder_tensor" | "vae_tiles":
            return _must_divide(degree, {"devices of a replica": layout.replica})
        case _:
            return None


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
