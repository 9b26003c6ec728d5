"""The tokens before the image, for both templates and both branches."""

import json
from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

from portable_dit.errors import RequestError, WeightsError
from portable_dit.models.hunyuan_image_3.config import GenerationConfig, HunyuanConfig
from portable_dit.models.hunyuan_image_3.prompts import read_system_prompts
from portable_dit.models.hunyuan_image_3.random_checkpoint import TINY
from portable_dit.models.hunyuan_image_3.tokens import TextTokens, byte_tokenizer, prompt_problem

BASE = replace(TINY, generation=GenerationConfig(sequence_template="pretrain"))


def spelled(tokens: TextTokens, ids) -> list[str]:
    """Ids as the characters and marks they stand for; bytes write space and line end their way."""
    written = [tokens._tokenizer.id_to_token(id) for id in ids]
    return ["\n" if piece == "Ċ" else " " if piece == "Ġ" else piece for piece in written]


def render(config: HunyuanConfig, prompt: str, system: str | None = None) -> tuple[list[str], list[str]]:
    tokens = TextTokens.of(config)
    found = tokens.render(prompt, system)
    return spelled(tokens, found.conditional), spelled(tokens, found.unconditional)


def test_the_pretrain_template_is_start_and_prompt():
    """With `<boi>`, size and shape behind it, the time slot of "hello" is row 9, the image begins at 10."""
    with_prompt, without = render(BASE, "hello")
    assert with_prompt == ["<|startoftext|>", *"hello"]
    assert without == ["<|startoftext|>", *["<cfg>"] * 5]
    assert len(with_prompt) + 3 == 9


def test_the_instruct_template_has_roles_and_an_answer():
    """The time slot of "hello" is row 29 and the image begins at 30."""
    with_prompt, without = render(TINY, "hello")
    assert with_prompt == ["<|startoftext|>", *"User: ", *"hello", *"\n\n", *"Assistant: ", "<answer>"]
    assert without == ["<|startoftext|>", *"User: ", *["<cfg>"] * 5, *"\n\n", *"Assistant: ", "<answer>"]
    assert len(with_prompt) + 3 == 29


@pytest.mark.parametrize(("config", "separator"), [(BASE, ""), (TINY, "\n\n")], ids=["pretrain", "instruct"])
def test_a_system_prompt_stands_in_front_and_in_both_branches(config, separator):
    with_prompt, without = render(config, "x", "be kind")
    start = ["<|startoftext|>", *"be kind", *separator]
    assert with_prompt[: len(start)] == without[: len(start)] == start
    assert len(with_prompt) == len(without) == len(render(config, "x")[0]) + len(start) - 1


def test_a_mark_spelt_out_in_a_prompt_is_ordinary_characters():
    with_prompt, _ = render(BASE, "<cfg><boi>")
    assert with_prompt[1:] == [*"<cfg><boi>"]


def test_pieces_are_tokenised_apart_so_that_none_spans_a_border():
    """This vocabulary has words for ends and beginnings joined, which the whole string would use."""
    letters = sorted(ByteLevel.alphabet())
    vocab = {letter: place for place, letter in enumerate(letters)}
    vocab |= {":Ġ": len(vocab), "Ġh": len(vocab) + 1, "ĊĊ": len(vocab) + 2, "oĊ": len(vocab) + 3}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[(":", "Ġ"), ("Ġ", "h"), ("o", "Ċ"), ("Ċ", "Ċ")]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    known = byte_tokenizer(TINY).get_added_tokens_decoder().values()
    made.add_special_tokens([AddedToken(token.content, special=True) for token in known])
    tokens = TextTokens(made, replace(TINY, dit=replace(TINY.dit, vocab_size=1000)), where="test")
    pieces = [made.id_to_token(id) for id in tokens.render("hello").conditional]
    assert made.encode("User: hello\n\n", add_special_tokens=False).tokens != pieces[1:-2]
    assert pieces[1:12] == ["U", "s", "e", "r", ":Ġ", "h", "e", "l", "l", "o", "ĊĊ"]


def test_shape_tokens_are_found_by_name_wherever_their_ids_are():
    config = HunyuanConfig()
    names = ["<|startoftext|>", "<cfg>", "<answer>", "<boi>", "<img_size_1024>"]
    first, later = [f"<img_ratio_{k}>" for k in range(33)], [f"<img_ratio_{k}>" for k in range(33, 37)]
    made = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    made.add_special_tokens(
        [AddedToken(name, special=True) for name in (*names, *first, "<between>", *later)]
    )
    marks = TextTokens(made, config, where="test").marks
    assert len(marks.ratios) == 37
    assert marks.ratios[33] == marks.ratios[32] + 2
    assert made.id_to_token(marks.ratios[36]) == "<img_ratio_36>"


def test_a_tokenizer_without_the_marks_is_refused_with_their_names():
    made = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(WeightsError, match=r"no token <\|startoftext\|>, <cfg>, <boi>.* and others"):
        TextTokens(made, TINY, where="tokenizer.json")


def test_the_base_form_needs_no_shape_tokens_that_only_the_instruct_form_has():
    config = replace(HunyuanConfig(), generation=GenerationConfig(sequence_template="pretrain"))
    assert len(config.canvases) == 33


def test_a_tokenizer_larger_than_the_table_is_refused():
    small = replace(TINY, dit=replace(TINY.dit, vocab_size=299))
    with pytest.raises(WeightsError, match=r"tokens for a table of 299"):
        TextTokens(byte_tokenizer(TINY), small, where="tokenizer.json")


def test_a_prompt_beyond_the_model_is_refused_with_what_is_left():
    tokens = TextTokens.of(TINY)
    cells, marks, roles = 256, 3 + 1, 21
    most = TINY.dit.max_position_embeddings - cells - marks - roles
    assert len(tokens.render("x" * most).conditional) == most + roles
    with pytest.raises(RequestError, match=f"{most + 1:,} tokens.*takes at most {most:,}"):
        tokens.render("x" * (most + 1))


def test_a_prompt_is_checked_with_the_checkpoints_tokenizer_before_anything_is_loaded(tmp_path):
    byte_tokenizer(TINY).save(str(tmp_path / "tokenizer.json"))
    there = replace(TINY, folder=tmp_path)
    assert prompt_problem("a red apple", there) is None
    assert "takes at most" in prompt_problem("x" * 3000, there)
    assert prompt_problem("x" * 3000, TINY) is None  # random weights have no tokenizer to ask


def test_a_damaged_tokenizer_is_told_as_one(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(WeightsError, match="not readable as JSON"):
        TextTokens.of(replace(TINY, folder=tmp_path))


@pytest.mark.parametrize("content", ["{}", '{"model": {"type": "BPE"}}', '{"model": []}'])
def test_a_file_that_is_no_tokenizer_is_told_as_one(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(WeightsError, match="holds no byte pairs"):
        TextTokens.of(replace(TINY, folder=tmp_path))
    with pytest.raises(WeightsError, match="missing"):
        TextTokens.of(replace(TINY, folder=tmp_path / "elsewhere"))


def test_system_prompts_are_read_and_never_run(tmp_path):
    text = 'import os\nos.abort()\nunified_system_prompt_en = """\nOne.\n"""\n'
    text += 't2i_system_prompt_en_vanilla = "Two."\nother = {"a": [1]}\nlikeness = "Three."\n'
    (tmp_path / "system_prompt.py").write_text(text)
    assert read_system_prompts(tmp_path) == {"en_unified": "\nOne.\n", "en_vanilla": "Two."}
    assert read_system_prompts(tmp_path / "elsewhere") == {}
    for broken in ("def (", "\0", "-" * 100_000 + "1", "1+" * 100_000 + "1"):
        (tmp_path / "system_prompt.py").write_text(broken)
        with pytest.raises(WeightsError, match="not readable as Python"):
            read_system_prompts(tmp_path)


def test_the_made_up_tokenizer_is_of_the_real_kind():
    saved = json.loads(byte_tokenizer(TINY).to_str())
    assert saved["model"]["type"] == "BPE"
    assert saved["pre_tokenizer"]["type"] == "ByteLevel"
    names = {token["content"] for token in saved["added_tokens"]}
    assert {"<|startoftext|>", "<cfg>", "<boi>", "<img_size_256>", "<img_ratio_0>", "<timestep>"} <= names
