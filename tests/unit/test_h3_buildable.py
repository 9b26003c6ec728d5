"""Configs whose values are sound alone and do not fit together: told at once, before anything is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from h3_tiny import CONFIG, DIT, TEXT, VAE, WORDS

from portable_dit.errors import WeightsError
from portable_dit.models.h3_image.buildable import require_buildable
from portable_dit.models.h3_image.config import H3Config
from portable_dit.models.h3_image.qwen_config import TINY_QWEN, QwenConfig
from portable_dit.models.h3_image.qwen_files import byte_tokenizer, write_qwen_files
from portable_dit.models.h3_image.tokens import QwenTokenizer, WordPiece, piece_ids, present


def test_the_published_and_the_tiny_configs_are_buildable() -> None:
    for config in (CONFIG, H3Config(text=QwenConfig())):
        require_buildable(config)


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("dit", {"rope_inv_freq_len": 3}, "turns 18 of a head's 16 channels"),
        ("dit", {"timestep_input_dim": 7}, "timestep_input_dim = 7: must be even"),
        ("dit", {"text_dim": 13}, "states of width 12 .hidden_size., the transformer takes 13"),
        ("dit", {"latents_dim": 7}, "24 latent channels .latent_channels., the transformer takes 7"),
        ("dit", {"pdd_heads": 5}, "5 output heads .* for 6 steps"),
        ("vae", {"norm_num_groups": 3}, "multiples of norm_num_groups = 3"),
        ("vae", {"downsample_stages": 5}, "downsample_stages = 5 of 4 block_out_channels"),
        ("vae", {"tile_size": 65}, "tile_size = 65 .* multiples of 16"),
        ("vae", {"tile_overlap": 64}, "tile_overlap = 64: must be less than tile_size = 64"),
        ("vae", {"rope_axes": 1}, "rope_axes = 1"),
        ("vae", {"rope_ratio": 2.0}, "rope_ratio = 2: .* pairs of a head's 8 channels"),
        ("scheduler", {"base_schedule": (1.0, 0.5, 0.0)}, "3 noise levels for 6 steps"),
        (
            "scheduler",
            {"base_schedule": (1.0, 0.9, 0.9, 0.7, 0.6, 0.5, 0.0)},
            "must fall from at most 1 to 0",
        ),
        ("canvas", {"multiple": 16}, "multiple = 16: must be a multiple of 32"),
    ],
)
def test_a_rule_between_values_is_told_when_it_is_broken(part: str, change: dict, said: str) -> None:
    config = replace(CONFIG, **{part: replace(getattr(CONFIG, part), **change)})
    with pytest.raises(WeightsError, match=said):
        require_buildable(config)


def test_all_broken_rules_are_told_together() -> None:
    config = replace(CONFIG, dit=replace(DIT, text_dim=13), vae=replace(VAE, norm_num_groups=3))
    with pytest.raises(WeightsError, match=r"norm_num_groups(.|\n)*states of width 12"):
        require_buildable(config)


def test_a_word_list_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "zebra"]))
    words = WordPiece.from_folder(tmp_path)
    assert piece_ids("a red cat", 0, words, TEXT) == [2, 3, 5]
    with pytest.raises(WeightsError, match=r"a token 8, the text encoder's table 8 rows"):
        piece_ids("a red zebra", 0, words, TEXT)


@pytest.mark.parametrize("text", ["{}", '{"version": "1.0", "model": 7}', '{"model": {"type": "Unheard"}}'])
def test_a_tokenizer_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    write_qwen_files(tmp_path, TINY_QWEN)
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(text)
    with pytest.raises(WeightsError, match=r"tokenizer\.json: not a tokenizer"):
        QwenTokenizer.from_checkpoint(tmp_path)


def test_a_tokenizer_and_marks_beyond_the_table_are_refused() -> None:
    tokenizer = QwenTokenizer(byte_tokenizer(TINY_QWEN))
    with pytest.raises(WeightsError, match="table 32 rows"):
        present("a red cat", [], tokenizer, replace(TINY_QWEN, vocab_size=32))
    with pytest.raises(WeightsError, match=r"image_token_id = 600.*must be below vocab_size = 512"):
        QwenConfig.from_dict({**TINY_QWEN.to_dict(), "image_token_id": 600})
