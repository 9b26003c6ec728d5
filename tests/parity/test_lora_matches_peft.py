"""Adapters that PEFT makes and runs on diffusers' transformer, added to our weights: the same velocity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from h3_pairs import dit_pair
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from test_h3_dit_matches_diffusers import inputs, ours_forward, theirs_forward

from portable_dit.errors import WeightsError
from portable_dit.lora import OTHER_WAYS, add, read_adapter
from portable_dit.models.h3_image.checkpoint import tensor_map
from portable_dit.models.h3_image.config import H3Config
from portable_dit.models.h3_image.dialects import stored_rows
from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.safetensors_file import stored_tensors
from portable_dit.weights import load_component

CONFIGS = {
    "attention, alpha twice the rank": {
        "target_modules": ["to_q", "to_k", "to_v", "to_out.0"],
        "lora_alpha": 8,
    },
    "two of three fused projections": {"target_modules": ["to_q", "to_v"]},
    "gated halves and down": {"target_modules": ["net.0.proj", "net.2"]},
    "modulation and every kind of plain layer": {
        "target_modules": ["adaln_proj.linear", "context_embedder", "proj_in", "norm_out.linear", "linear_1"]
    },
    "by the root of the rank": {"target_modules": ["to_q"], "use_rslora": True},
    "other ranks and alphas for some": {
        "target_modules": ["to_q", "to_v"],
        "rank_pattern": {"to_v": 2},
        "alpha_pattern": {"transformer_blocks.1.attn.to_v": 16},
    },
}
# Keys of PEFT's config that our code reads, and those that say how to train, or what tensors show.
READ = {
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias",
    "init_lora_weights",
}  # fmt: skip
OF_TRAINING = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "velora_config", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip


def loaded(config, weights: Path, adapters) -> H3Transformer:
    """Ours, filled from diffusers' file with what the adapters add."""
    with torch.device("meta"):
        ours = H3Transformer(config).eval()
    stored = stored_tensors(weights)
    whole = H3Config(dit=config)
    shapes = {name: tuple(parameter.shape) for name, parameter in ours.named_parameters()}
    load_component(
        ours,
        stored,
        sources=tensor_map("dit", {n: t.shape for n, t in stored.items()}, whole).sources,
        device=lambda name: "cpu",
        unused=[name for name in stored if name.startswith("audio_")],
        changes=add(adapters, stored_rows(shapes, config), shapes).changes,
    )
    return ours


@pytest.fixture
def pair(tmp_path):
    theirs, ours = dit_pair()
    save_file(theirs.state_dict(), tmp_path / "base.safetensors")
    return theirs, ours.config, tmp_path / "base.safetensors"


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_velocity_is_that_of_pefts_own_layers(pair, kind, tmp_path):
    theirs, config, weights = pair
    given = inputs([(4, 8)])
    with torch.no_grad():
        plain = theirs_forward(theirs, *given, 0.25)
        torch.manual_seed(0)
        theirs.add_adapter(LoraConfig(r=4, init_lora_weights=False, **{"lora_alpha": 4, **CONFIGS[kind]}))
        theirs.save_lora_adapter(tmp_path / "adapter")
        wanted = theirs_forward(theirs, *given, 0.25)
        ours = loaded(config, weights, [read_adapter(tmp_path / "adapter", 1.0)])
        found = ours_forward(ours, *given, 0.25)
    change = (wanted - plain).abs().max()
    assert change > 1e-2 * plain.abs().max(), "or there is nothing to compare"
    assert (found - wanted).abs().max() < 1e-4 * change


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_scales_and_several_adapters_add_up_as_theirs_do(pair, tmp_path):
    theirs, config, weights = pair
    given = inputs([])
    with torch.no_grad():
        for name, targets in (("one", ["to_q"]), ("two", ["to_q", "net.2"])):
            torch.manual_seed(len(name + targets[-1]))
            theirs.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=targets), name)
            theirs.save_lora_adapter(tmp_path / name, adapter_name=name)
        theirs.set_adapters(["one", "two"], [0.5, -1.5])
        wanted = theirs_forward(theirs, *given, 0.5)
        adapters = [read_adapter(tmp_path / "one", 0.5), read_adapter(tmp_path / "two", -1.5)]
        found = ours_forward(loaded(config, weights, adapters), *given, 0.5)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_dora_is_refused_with_what_it_is(pair, tmp_path):
    theirs, _, _ = pair
    theirs.add_adapter(LoraConfig(r=2, use_dora=True, target_modules=["to_q"]))
    theirs.save_lora_adapter(tmp_path / "adapter")
    with pytest.raises(WeightsError, match="DoRA"):
        read_adapter(tmp_path / "adapter", 1.0)


def test_an_adapter_that_peft_saves_by_itself_has_its_config_beside_it(pair, tmp_path):
    theirs, config, weights = pair
    given = inputs([])
    wish = {
        "lora_alpha": 6,
        "rank_pattern": {"to_v": 2},
        "alpha_pattern": {"to_q": 1},
        "layers_to_transform": [1],
    }
    with torch.no_grad():
        torch.manual_seed(0)
        targets = LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False, **wish)
        wrapped = get_peft_model(theirs, targets)
        wrapped.save_pretrained(tmp_path / "adapter")
        wanted = theirs_forward(theirs, *given, 0.5)
        adapter = read_adapter(tmp_path / "adapter", 1.0)
        found = ours_forward(loaded(config, weights, [adapter]), *given, 0.5)
    assert all(layer.startswith("base_model.model.") and ".1." in layer for layer in adapter.layers)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_every_key_of_a_config_is_read_or_refused_or_of_the_training_alone():
    """A key that is new in PEFT is to be looked at: an adapter with it may be more than two matrices."""
    known = [*READ, *OF_TRAINING, *OTHER_WAYS]
    assert len(known) == len(set(known))
    assert LoraConfig().to_dict().keys() <= set(known)


@pytest.mark.parametrize("beginning", [True, "gaussian", "orthogonal", "mica", "pissa", "olora"])
def test_a_beginning_that_changes_the_base_is_refused_and_no_other(pair, beginning, tmp_path):
    theirs, _, _ = pair
    base = {name: value.clone() for name, value in theirs.state_dict().items()}
    config = LoraConfig(r=2, init_lora_weights=beginning, target_modules=["to_q"])
    theirs.add_adapter(config)
    now = {name.replace(".base_layer.", "."): value for name, value in theirs.state_dict().items()}
    changed = any(not torch.equal(value, now[name]) for name, value in base.items())
    theirs.save_lora_adapter(tmp_path / "adapter")
    if changed:
        with pytest.raises(WeightsError, match=f"init_lora_weights: {beginning}, which changes the base"):
            read_adapter(tmp_path / "adapter", 1.0)
    else:
        assert read_adapter(tmp_path / "adapter", 1.0).layers
    assert changed == (beginning in ("pissa", "olora"))
