"""Word pieces and text states of the small conditioner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from h3_tiny import TEXT, WORDS, randomize

from portable_dit.errors import RequestError, WeightsError
from portable_dit.models.h3_image.config import TextConfig
from portable_dit.models.h3_image.text import Conditioner, MiniTextEncoder
from portable_dit.models.h3_image.tokens import WordPiece, piece_ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    return tmp_path


def conditioner(folder: Path, config: TextConfig = TEXT) -> Conditioner:
    encoder = MiniTextEncoder(config).eval()
    randomize(encoder)
    return Conditioner(encoder, WordPiece.from_folder(folder))


def test_words_are_lower_cased_and_split_and_nothing_is_added(folder: Path) -> None:
    assert WordPiece.from_folder(folder).encode("A RED cats") == [2, 3, 5, 7]


def test_states_and_tags_have_a_row_for_every_token(folder: Path) -> None:
    out = conditioner(folder)("a red cat")
    assert out.states.shape == (3, TEXT.hidden_size)
    assert out.tags.tolist() == [1, 1, 1]


def test_words_after_a_token_do_not_change_its_state(folder: Path) -> None:
    encode = conditioner(folder)
    assert torch.allclose(encode("a red").states, encode("a red dog").states[:2], atol=1e-6)
    assert not torch.allclose(encode("a red").states[1], encode("a blue").states[1], atol=1e-3)


def test_the_order_of_words_matters(folder: Path) -> None:
    encode = conditioner(folder)
    assert not torch.allclose(encode("red blue cat").states[2], encode("blue red cat").states[2], atol=1e-4)


def test_a_prompt_of_the_longest_length_passes_and_one_more_token_is_refused(folder: Path) -> None:
    encode = conditioner(folder)
    assert len(encode("a cat " * 3).tags) == 6
    with pytest.raises(RequestError, match=r"7 tokens .* at most 6\. Shorten it"):
        encode("a cat " * 3 + "dog")


@pytest.mark.parametrize("prompt", ["", "   ", "\n\t"])
def test_a_prompt_without_words_is_refused(folder: Path, prompt: str) -> None:
    with pytest.raises(RequestError, match="no words"):
        conditioner(folder)(prompt)


def test_picture_labels_come_first_and_never_join_the_prompt(folder: Path) -> None:
    labelled = replace(TEXT, picture_labels=True, max_tokens=64)
    words = WordPiece.from_folder(folder)
    expected = words.encode("<Picture 1>: ") + words.encode("<Picture 2>: ") + words.encode("a cat")
    assert piece_ids("a cat", 2, words, labelled) == expected
    assert piece_ids("a cat", 2, words, TEXT) == words.encode("a cat")


def test_a_missing_word_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"vocab\.txt: missing"):
        WordPiece.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"a\nb\n", b"[UNK]\n\xff\xfe"])
def test_a_word_list_that_cannot_serve_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(WeightsError, match=r"vocab\.txt: .*Restore it"):
        WordPiece.from_folder(tmp_path)
