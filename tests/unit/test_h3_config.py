"""Configs of a checkpoint: two spellings, defaults that are admitted, and errors that name the file."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from h3_tiny import CONFIG, DIT, TEXT, VAE, write_checkpoint
from mini_configs import write_configs

from portable_dit.errors import WeightsError
from portable_dit.models.h3_image.config import DiTConfig, H3Config, SchedulerConfig, TextConfig, VAEConfig
from portable_dit.models.h3_image.qwen_config import TINY_QWEN, QwenConfig
from portable_dit.models.h3_image.spec import make_spec
from portable_dit.models.spec import COMPONENTS, Numbers, Workload
from portable_dit.request import size_problem

ORIGINAL = {
    "hidden_size": 5376, "num_layers": 50, "token_refiner_num_layers": 2, "num_attention_heads": 56,
    "attention_head_dim": 128, "ffn_hidden_size": 14336, "latents_dim": 24, "patch_size": [1, 2, 2],
    "text_dim": 5120, "timestep_input_dim": 256, "time_embed_hidden_size": 5376, "time_embed_dim": 2688,
    "adaln_out_features": 96768, "final_adaln_out_features": 10752, "rope_inv_freq_len": 16, "norm_eps": 1e-5,
}  # fmt: skip
DIFFUSERS = {
    "hidden_size": 5376, "num_layers": 50, "num_refiner_layers": 2, "num_attention_heads": 56,
    "attention_head_dim": 128, "ffn_dim": 14336, "in_channels": 24, "audio_in_channels": 32,
    "patch_size": [1, 2, 2], "text_dim": 5120, "freq_dim": 256, "time_embed_hidden_dim": 5376,
    "time_embed_dim": 2688, "rope_freq_dim": 16, "rope_theta": 10000.0,
}  # fmt: skip


def test_both_spellings_of_the_full_model_mean_one_config() -> None:
    assert DiTConfig.from_dict(ORIGINAL) == DiTConfig.from_dict(DIFFUSERS)
    assert DiTConfig.from_dict(ORIGINAL).num_tags == 3


def test_a_default_that_nobody_published_is_admitted() -> None:
    assert any("pdd_heads" in note and "6" in note for note in DiTConfig.from_dict(ORIGINAL).notes)
    assert DiTConfig.from_dict({**ORIGINAL, "pdd_heads": 6}).notes == ()
    notes = SchedulerConfig.from_dict({}).notes
    assert any("shift" in note and "12.0" in note for note in notes)


def test_a_vae_config_in_diffusers_spelling_gives_the_published_sizes() -> None:
    config = VAEConfig.from_dict(
        {
            "decoder_num_layers": 24,
            "decoder_num_attention_heads": 16,
            "spatial_downsample_factors": [2, 2, 2, 2, 1, 1],
            "decoder_rope_theta": 100.0,
            "decoder_rope_dim_ratio": 0.75,
        }
    )
    assert config.ratio == 16
    assert config.decoder_hidden_size == 1024
    assert config.rope_pairs == 24
    assert any("latents_mean" in note for note in config.notes)


def test_an_unknown_text_encoder_is_refused_with_the_known_ones() -> None:
    with pytest.raises(WeightsError, match=r"kind = 'qwen3_vll'.*qwen3_vl"):
        TextConfig.from_dict({"kind": "qwen3_vll"})


def test_the_big_text_encoder_is_known_by_its_model_type_and_comes_back_as_written(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "h3")
    (folder / "processor").mkdir()
    config = replace(TINY_QWEN, processor=replace(TINY_QWEN.processor, min_pixels=4096))
    (folder / "text_encoder" / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "processor" / "preprocessor_config.json").write_text(json.dumps(config.processor_dict()))
    with pytest.raises(WeightsError, match=r"gives states of width 16 .*the transformer takes 12"):
        H3Config.from_folder(folder)
    dit = replace(DIT, text_dim=16).to_dict()
    (folder / "transformer" / "config.json").write_text(json.dumps(dit))
    assert H3Config.from_folder(folder).text == config


def test_older_files_of_the_big_text_encoder_are_read_too() -> None:
    raw = QwenConfig().to_dict()
    rope = raw["text_config"].pop("rope_parameters")
    raw["text_config"] |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"mrope_section": [24, 20, 20]}}
    assert QwenConfig.from_dict(raw, QwenConfig().processor_dict()) == QwenConfig()


def test_an_encoder_with_too_few_layers_is_refused_since_its_last_state_is_normed() -> None:
    raw = TINY_QWEN.to_dict()
    raw["text_config"]["num_hidden_layers"] = 50
    with pytest.raises(WeightsError, match=r"50 layers.*must be more than 50"):
        QwenConfig.from_dict(raw)


def test_a_missing_image_processor_is_admitted() -> None:
    notes = QwenConfig.from_dict(TINY_QWEN.to_dict()).notes
    assert any("min_pixels" in note and "65536" in note for note in notes)


def test_a_value_of_the_wrong_kind_is_refused_by_name() -> None:
    with pytest.raises(WeightsError, match=r"transformer/config\.json: num_layers = 'fifty' must be a whole"):
        DiTConfig.from_dict({**ORIGINAL, "num_layers": "fifty"})


def test_latent_statistics_must_have_a_value_for_each_channel() -> None:
    with pytest.raises(WeightsError, match="24 values in latents_mean for 8 latent channels"):
        VAEConfig.from_dict({"latent_channels": 8})


def test_a_grid_that_is_not_a_list_is_refused() -> None:
    with pytest.raises(WeightsError, match="base_schedule = 'simple' must be a list"):
        SchedulerConfig.from_dict({"base_schedule": "simple"})


def test_a_written_checkpoint_reads_back_as_it_was(tmp_path: Path) -> None:
    config = H3Config.from_folder(write_checkpoint(tmp_path))
    assert config.text == TEXT
    assert config.vae.to_dict() == VAE.to_dict()
    assert config.dit.to_dict() == DIT.to_dict()
    assert config.scheduler.to_dict() == CONFIG.scheduler.to_dict()
    assert config.canvas == CONFIG.canvas
    assert config.notes == ()


def test_the_shift_may_come_from_the_private_block_of_the_index(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "scheduler" / "scheduler_config.json").unlink()
    private = {"_minimax_h3": {"sigma_shift_scales": {"video": 7.0}}}
    (folder / "model_index.json").write_text(json.dumps(private))
    assert H3Config.from_folder(folder).scheduler.shift == 7.0


@pytest.mark.parametrize("damage", [None, "{not json", "[]"])
def test_a_missing_or_broken_config_is_named(tmp_path: Path, damage: str | None) -> None:
    folder = write_checkpoint(tmp_path)
    path = folder / "vae" / "config.json"
    path.unlink() if damage is None else path.write_text(damage)
    with pytest.raises(WeightsError, match=r"vae/config\.json"):
        H3Config.from_folder(folder)


def test_text_states_of_the_wrong_width_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "text_encoder" / "config.json").write_text(json.dumps({**TEXT.to_dict(), "hidden_size": 16}))
    with pytest.raises(WeightsError, match=r"width 16 .*the transformer takes 12"):
        H3Config.from_folder(folder)


def test_an_unknown_rule_for_references_names_the_near_one() -> None:
    with pytest.raises(WeightsError, match=r"'canvass' is not a rule.*Did you mean 'canvas'"):
        SchedulerConfig.from_dict({"reference_rule": "canvass"})


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", -1), ("num_attention_heads", 0), ("norm_eps", float("nan"))]
)
def test_a_number_that_no_model_can_be_built_with_is_refused(key: str, value: float) -> None:
    with pytest.raises(WeightsError, match=f"{key} = .* must be above 0"):
        DiTConfig.from_dict({**ORIGINAL, key: value})


def test_parts_that_a_checkpoint_may_do_without_may_be_zero() -> None:
    assert DiTConfig.from_dict({**ORIGINAL, "pdd_heads": 0, "token_refiner_num_layers": 0}).pdd_heads == 0
    with pytest.raises(WeightsError, match="pdd_heads = -1 must be at least 0"):
        DiTConfig.from_dict({**ORIGINAL, "pdd_heads": -1})


@pytest.mark.parametrize("canvas", ['"x"', "[1]", '{"min_side": 0, "max_ratio": 0.0}'])
def test_a_canvas_block_that_is_no_canvas_is_refused(tmp_path: Path, canvas: str) -> None:
    write_checkpoint(tmp_path, CONFIG)
    (tmp_path / "model_index.json").write_text(f'{{"canvas": {canvas}}}')
    with pytest.raises(WeightsError, match="canvas"):
        H3Config.from_folder(tmp_path)


WRONG = (None, True, "x", -1, 0, 10**30, [], {}, [None], ["a", "b", "c"], [1, -2, 2], float("nan"))


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("transformer/config.json", "patch_size"),
        ("transformer/config.json", "adaln_out_features"),
        ("transformer/config.json", "hidden_size"),
        ("vae/config.json", "block_out_channels"),
        ("vae/config.json", "layers_per_block"),
        ("vae/config.json", "downsample_stages"),
        ("vae/config.json", "spatial_downsample_factors"),
        ("vae/config.json", "decoder_num_attention_heads"),
        ("vae/config.json", "latents_std"),
        ("scheduler/scheduler_config.json", "base_schedule"),
        ("model_index.json", "canvas"),
        ("model_index.json", "_minimax_h3"),
    ],
)
@pytest.mark.parametrize("value", WRONG, ids=str)
def test_a_config_with_values_of_the_wrong_kind_is_refused_or_makes_a_spec(
    tmp_path, file, key, value
) -> None:
    """Whatever stands there, it is one message or a model whose bytes can be counted, and soon."""
    write_configs(tmp_path, CONFIG)
    raw = json.loads((tmp_path / file).read_text())
    raw.pop("num_tags", None)
    (tmp_path / file).write_text(json.dumps({**raw, key: value}))
    with suppress(WeightsError):
        spec = make_spec("h3-image", H3Config.from_folder(tmp_path))
        for component in COMPONENTS:
            spec.bytes_on_device(component, Workload(512, 512, 8), Numbers("float32"))
        assert size_problem(*spec.sizes.nearest(1000, 10), spec.sizes) is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("patch_size", [1, 2], "3 values"),
        ("patch_size", [1, 2, 2.5], "must hold values like 1"),
        ("num_layers", 10**6, "at most 1000"),
        ("norm_eps", 10**400, "must be a number"),
        ("norm_eps", 1e30, "at most 1"),
        ("num_refiner_layers", 10**6, "at most 1000"),
        ("ffn_hidden_size", 2**40, "at most 2147483648"),
        ("adaln_out_features", 7, "must be 6 . hidden_size"),
    ],
)
def test_a_wrong_value_is_told_with_the_rule(key, value, said) -> None:
    raw = {**ORIGINAL, key: value}
    with pytest.raises(WeightsError, match=f"{key}.*{said}"):
        DiTConfig.from_dict(raw)


@pytest.mark.parametrize(
    "canvas",
    [
        {"multiple": 4096},
        {"min_side": 9000},
        {"default_width": 100},
        {"max_pixels": 1000},
        {"max_ratio": 0.5},
        {"multiple": 1, "default_width": 2047},
    ],
)
def test_a_canvas_block_without_a_size_that_can_be_drawn_is_refused(tmp_path: Path, canvas) -> None:
    write_configs(tmp_path, CONFIG)
    (tmp_path / "model_index.json").write_text(json.dumps({"canvas": canvas}))
    with pytest.raises(WeightsError, match="block canvas"):
        H3Config.from_folder(tmp_path)


def test_json_nested_too_deep_to_read_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    (tmp_path / "model_index.json").write_text("[" * 200_000)
    with pytest.raises(WeightsError, match="not readable as JSON"):
        H3Config.from_folder(tmp_path)
