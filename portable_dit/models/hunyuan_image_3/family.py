"""The door of the HunyuanImage-3.0 family: what the engine asks of it. Imports torch only where needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from portable_dit.errors import RecipeError, WeightsError
from portable_dit.models.spec import HubFiles, Model, ModelSpec, StoredRows, TensorMap

if TYPE_CHECKING:
    import torch


class HunyuanFamily:
    """See `models.spec.Family`. Base, Instruct and Distil are one model, told apart by their configs."""

    name = "hunyuan_image_3"
    models: Mapping[str, Path | None] = {"hunyuan-image-3": None}

    def read_spec(
        self,
        model: str,
        checkpoint: Path | None,
        *,
        dialect: str = "auto",
        components: Mapping[str, Path] | None = None,
    ) -> ModelSpec:
        from portable_dit.models.hunyuan_image_3.config import HunyuanConfig
        from portable_dit.models.hunyuan_image_3.prompts import read_system_prompts
        from portable_dit.models.hunyuan_image_3.spec import make_spec

        if dialect not in ("auto", "original"):
            raise RecipeError(
                f"checkpoint_dialect: {dialect}: HunyuanImage-3.0 is read as its publishers store it. "
                "Leave the key out."
            )
        if components:
            raise RecipeError(
                f"components.{next(iter(components))}: the shards of HunyuanImage-3.0 hold all parts. "
                "Leave the key out."
            )
        if checkpoint is None:
            note = (
                "the checkpoint's configs are not here, so the published sizes of the Instruct form are used"
            )
            return make_spec(model, HunyuanConfig(), notes=(note,))
        if checkpoint.is_file():
            raise WeightsError(
                f"{checkpoint}: one file, and HunyuanImage-3.0 needs the whole folder: shards, config.json, "
                "tokenizer.json. Name the folder."
            )
        config = HunyuanConfig.from_folder(checkpoint, system_prompts=read_system_prompts(checkpoint))
        return make_spec(model, config)

    def build(self, spec: ModelSpec, dtypes: Mapping[str, torch.dtype]) -> Model:
        from portable_dit.models.hunyuan_image_3.model import build
        from portable_dit.models.hunyuan_image_3.spec import HunyuanSpec

        assert isinstance(spec, HunyuanSpec)
        return build(spec, dtypes)

    def places(self, component: str, spec: ModelSpec) -> tuple[Path, ...]:
        return (Path(),)

    def tensor_map(
        self,
        component: str,
        shapes: Mapping[str, tuple[int, ...]],
        spec: ModelSpec,
        *,
        texts: Mapping[str, bytes] | None = None,
    ) -> TensorMap:
        from portable_dit.models.hunyuan_image_3.checkpoint import tensor_map
        from portable_dit.models.hunyuan_image_3.spec import HunyuanSpec

        assert isinstance(spec, HunyuanSpec)
        return tensor_map(component, shapes, spec.config)

    def stored_rows(
        self, component: str, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec
    ) -> Mapping[str, Mapping[str, StoredRows]]:
        from portable_dit.models.hunyuan_image_3.checkpoint import stored_rows
        from portable_dit.models.hunyuan_image_3.spec import HunyuanSpec

        assert isinstance(spec, HunyuanSpec)
        return {"original": stored_rows(spec.config)} if component == "dit" else {}

    def hub_files(self, names: Sequence[str], *, dialect: str = "auto") -> HubFiles:
        shards = [name for name in names if "/" not in name and name.endswith(".safetensors")]
        if not shards or "config.json" not in names:
            raise WeightsError(
                "no shards beside a config.json in the repository. Name one that holds HunyuanImage-3.0."
            )
        texts = [name for name in names if "/" not in name and name.endswith((".json", "system_prompt.py"))]
        return HubFiles((*shards, *texts))
