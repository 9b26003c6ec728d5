"""From a prompt to the tokens before the image, for both guidance branches. Torch-free.

Every piece of the text (system prompt, role, prompt, separator) is tokenised on its own and joined as ids, so
that no token spans a border. The branch without the prompt is the same sequence with `<cfg>` for each of the
prompt's tokens, so both branches have one length and the same positions. Marks are found by name, since
their ids differ between forms and are not all in a row; a mark spelt out in a prompt is ordinary characters.

Nothing behind the image can reach it, so the sequence ends with the image.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

from portable_dit.errors import RequestError, WeightsError
from portable_dit.models.config_json import read_json
from portable_dit.models.hunyuan_image_3.config import HunyuanConfig

TOKENIZER_FILE = "tokenizer.json"
START, EMPTY, ANSWER, IMAGE_START = "<|startoftext|>", "<cfg>", "<answer>", "<boi>"
USER, ASSISTANT, SEPARATOR = "User: ", "Assistant: ", "\n\n"
OTHER_MARKS = ("<|endoftext|>", "<eoi>", "<img>", "<pad>", "<timestep>", "</answer>")
DISTIL_MARKS = ("<guidance>", "<timestep_r>")


@dataclass(frozen=True)
class Marks:
    """Ids of the special tokens that a picture needs. ratios: of all canvases, in their order."""

    start: int
    empty: int
    answer: int
    image_start: int
    base_size: int
    ratios: tuple[int, ...]


@dataclass(frozen=True)
class Rendered:
    """Ids of the text, from the first token to the one before `<boi>`, with the prompt and without it."""

    conditional: tuple[int, ...]
    unconditional: tuple[int, ...]


class TextTokens:
    """Byte pairs of text, and the ids of marks."""

    def __init__(self, tokenizer: Tokenizer, config: HunyuanConfig, *, where: str) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self._config = config
        self.marks = _find_marks(tokenizer, config, where)

    @classmethod
    def of(cls, config: HunyuanConfig) -> TextTokens:
        """The tokenizer of a checkpoint, or for random weights one that knows single bytes."""
        if config.folder is None:
            return cls(byte_tokenizer(config), config, where="random weights")
        path = config.folder / TOKENIZER_FILE
        changed = path.stat().st_mtime_ns if path.is_file() else 0
        return cls(_tokenizer_at(path, changed), config, where=str(path))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def render(self, prompt: str, system_prompt: str | None = None) -> Rendered:
        """The text before the image. Raises RequestError when nothing is left of the prompt, or too much."""
        words = self.encode(prompt)
        if not words:
            raise RequestError(f"prompt {prompt!r}: holds no words. Say what to draw.")
        before, after = [self.marks.start], list[int]()
        instruct = self._config.generation.sequence_template == "instruct"
        if system_prompt:
            before += self.encode(system_prompt)
            before += self.encode(SEPARATOR) if instruct else []
        if instruct:
            before += self.encode(USER)
            after += [*self.encode(SEPARATOR), *self.encode(ASSISTANT), self.marks.answer]
        self._refuse_too_long(len(words), len(before) + len(after))
        empty = [self.marks.empty] * len(words)
        return Rendered((*before, *words, *after), (*before, *empty, *after))

    def _refuse_too_long(self, words: int, others: int) -> None:
        config = self._config
        cells = max(width * height for width, height in config.canvases) // config.vae.ffactor_spatial**2
        marks = 3 + config.dit.slots
        most = config.dit.max_position_embeddings - cells - marks - others
        if words > most:
            raise RequestError(
                f"prompt of {words:,} tokens: beside the picture and {others:,} tokens of system prompt and "
                f"roles this model takes at most {max(most, 0):,}. Shorten it."
            )


def prompt_problem(prompt: str, config: HunyuanConfig) -> str | None:
    """Why the model cannot take this prompt; None when it can, or its tokenizer is not here."""
    if config.folder is None:
        return None
    try:
        TextTokens.of(config).render(prompt)
    except RequestError as error:
        return str(error)
    return None


def byte_tokenizer(config: HunyuanConfig) -> Tokenizer:
    """A token for every byte and every mark, as far as the table goes: for made-up checkpoints."""
    letters = {letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}
    names = [START, EMPTY, ANSWER, IMAGE_START, *OTHER_MARKS]
    names += DISTIL_MARKS if config.dit.cfg_distilled else []
    names += [base_mark(config), *(ratio_mark(k) for k in range(len(config.canvases)))]
    marks = {name: len(letters) + place for place, name in enumerate(names)}
    if len(letters) + len(marks) > config.dit.vocab_size:
        raise WeightsError(
            f"vocab_size = {config.dit.vocab_size}: bytes and marks need {len(letters) + len(marks)}."
        )
    tokenizer = Tokenizer(models.BPE(vocab={**letters, **marks}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return tokenizer


def base_mark(config: HunyuanConfig) -> str:
    """The mark of the size class: the base, whatever the real size is."""
    return f"<img_size_{config.dit.image_base_size}>"


def ratio_mark(canvas: int) -> str:
    """The mark of the canvas of that number."""
    return f"<img_ratio_{canvas}>"


@lru_cache(maxsize=4)
def _tokenizer_at(path: Path, changed: int) -> Tokenizer:
    """The tokenizer of a file; reading one with 130,000 words takes a second."""
    model = read_json(path).get("model")  # looked at here, since the library has no error class of its own
    known = isinstance(model, dict) and model.get("type") == "BPE" and {"vocab", "merges"} <= model.keys()
    if not known:
        raise WeightsError(f"{path}: holds no byte pairs. Restore it from the checkpoint.")
    return Tokenizer.from_file(str(path))


def _find_marks(tokenizer: Tokenizer, config: HunyuanConfig, where: str) -> Marks:
    ratios = [ratio_mark(k) for k in range(len(config.canvases))]
    instruct = config.generation.sequence_template == "instruct"
    needed = [START, EMPTY, IMAGE_START, base_mark(config), *ratios, *([ANSWER] if instruct else [])]
    ids: dict[str, int | None] = {name: tokenizer.token_to_id(name) for name in needed}
    missing = [name for name, id in ids.items() if id is None]
    if missing:
        more = " and others" if len(missing) > 5 else ""
        raise WeightsError(
            f"{where}: has no token {', '.join(missing[:5])}{more}, which the "
            f"{config.generation.sequence_template} form of HunyuanImage-3.0 needs. Take config.json, "
            "generation_config.json and tokenizer.json from one and the same checkpoint."
        )
    found = {name: id for name, id in ids.items() if id is not None}
    size = tokenizer.get_vocab_size()
    if size > config.dit.vocab_size:
        raise WeightsError(
            f"{where}: {size} tokens for a table of {config.dit.vocab_size} in config.json. Take both files "
            "from one and the same checkpoint."
        )
    return Marks(
        start=found[START],
        empty=found[EMPTY],
        answer=found.get(ANSWER, 0),
        image_start=found[IMAGE_START],
        base_size=found[base_mark(config)],
        ratios=tuple(found[name] for name in ratios),
    )
