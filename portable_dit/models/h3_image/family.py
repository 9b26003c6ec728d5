"""The door of the H3-Image family: what the engine asks of it. Imports torch only where it is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from portable_dit.models.spec import HubFiles, Model, ModelSpec, StoredRows, TensorMap

if TYPE_CHECKING:
    import torch


class H3Family:
    """See `models.spec.Family`."""

    name = "h3_image"
    models: Mapping[str, Path | None] = {
        "h3-mini": Path(__file__).parents[1] / "h3_mini",
        "h3-image": None,
    }

    def read_spec(
        self,
        model: str,
        checkpoint: Path | None,
        *,
        dialect: str = "auto",
        components: Mapping[str, Path] | None = None,
    ) -> ModelSpec:
        from portable_dit.models.h3_image.config import H3Config
        from portable_dit.models.h3_image.places import read_checkpoint
        from portable_dit.models.h3_image.qwen_config import QwenConfig
        from portable_dit.models.h3_image.spec import make_spec

        if checkpoint is not None:
            return make_spec(model, read_checkpoint(checkpoint, dialect=dialect, components=components))
        note = "the checkpoint's configs are not here, so the published sizes of the model are used"
        return make_spec(model, H3Config(text=QwenConfig()), notes=(note,))

    def build(self, spec: ModelSpec, dtypes: Mapping[str, torch.dtype]) -> Model:
        from portable_dit.models.h3_image.model import build
        from portable_dit.models.h3_image.spec import H3Spec

        assert isinstance(spec, H3Spec)
        return build(spec.config, dtypes, spec=spec)

    def places(self, component: str, spec: ModelSpec) -> tuple[Path, ...]:
        from portable_dit.models.h3_image.checkpoint import FOLDERS
        from portable_dit.models.h3_image.spec import H3Spec

        assert isinstance(spec, H3Spec)
        config = spec.config
        place = config.places.get(component, Path(FOLDERS[component]))
        return (place, config.heads) if component == "dit" and config.heads else (place,)

    def tensor_map(
        self,
        component: str,
        shapes: Mapping[str, tuple[int, ...]],
        spec: ModelSpec,
        *,
        texts: Mapping[str, bytes] | None = None,
    ) -> TensorMap:
        from portable_dit.models.h3_image.checkpoint import tensor_map
        from portable_dit.models.h3_image.spec import H3Spec

        assert isinstance(spec, H3Spec)
        return tensor_map(component, shapes, spec.config, texts=texts)

    def stored_rows(
        self, component: str, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec
    ) -> Mapping[str, Mapping[str, StoredRows]]:
        from portable_dit.models.h3_image.dialects import stored_rows
        from portable_dit.models.h3_image.spec import H3Spec

        assert isinstance(spec, H3Spec)
        return stored_rows(shapes, spec.config.dit) if component == "dit" else {}

    def hub_files(self, names: Sequence[str], *, dialect: str = "auto") -> HubFiles:
        from portable_dit.models.h3_image.places import hub_files

        return hub_files(names, dialect=dialect)
