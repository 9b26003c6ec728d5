"""The door of the H3-Image family: what the engine asks of it. Imports torch only where it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from portable_dit.models.spec import Model, ModelSpec, TensorMap

if TYPE_CHECKING:
    import torch


class H3Family:
    """See `models.spec.Family`."""

    name = "h3_image"
    models: Mapping[str, Path | None] = {
        "h3-mini": Path(__file__).parents[1] / "h3_mini",
        "h3-image": None,
    }

    def read_spec(self, model: str, folder: Path | None) -> ModelSpec:
        from portable_dit.models.h3_image.config import H3Config
        from portable_dit.models.h3_image.counts import QWEN3_VL
        from portable_dit.models.h3_image.spec import make_spec

        if folder is not None:
            return make_spec(model, H3Config.from_folder(folder))
        published = H3Config()
        text = replace(published.text, kind="qwen3_vl", hidden_size=QWEN3_VL.hidden_size, picture_labels=True)
        note = "the checkpoint's configs are not here, so the published sizes of the model are used"
        return make_spec(model, replace(published, text=text), notes=(note,))

    def build(self, spec: ModelSpec, dtypes: Mapping[str, torch.dtype]) -> Model:
        from portable_dit.models.h3_image.model import build
        from portable_dit.models.h3_image.spec import H3Spec

        assert isinstance(spec, H3Spec)
        return build(spec.config, dtypes, spec=spec)

    def folder(self, component: str) -> str:
        from portable_dit.models.h3_image.checkpoint import FOLDERS

        return FOLDERS[component]

    def tensor_map(self, component: str, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> TensorMap:
        from portable_dit.models.h3_image.checkpoint import tensor_map
        from portable_dit.models.h3_image.spec import H3Spec

        assert isinstance(spec, H3Spec)
        return tensor_map(component, shapes, spec.config)
