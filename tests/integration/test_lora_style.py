"""An adapter that means something: trained on the built-in model, it puts what it never saw on pink."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from portable_dit.engine import Engine
from portable_dit.request import Request

PINK = Path(__file__).parents[1] / "data" / "lora" / "pink.safetensors"  # made by training/style_lora.py
PROMPTS = ("a teapot", "a strawberry", "a dolphin")  # none of which it was trained with
SIZE = (256, 256)


def borders(keys: dict[str, object], prompts: tuple[str, ...] = PROMPTS) -> list[np.ndarray]:
    """The mean colour of each picture's outermost pixels."""
    with Engine.load("cpu/h3-mini", keys) as engine:
        results = [engine.generate(Request(prompt, size=SIZE, seed=3)) for prompt in prompts]
    edges = []
    for result in results:
        pixels = result.images[0].pixels.astype(float)
        edges.append(np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]).mean(axis=0))
    return edges


def is_pink(color: np.ndarray) -> bool:
    red, green, blue = color
    return red > 220 and 120 < green < 190 and 150 < blue < 220


@pytest.mark.parametrize("form", [None, "int8_row"])
def test_an_adapter_changes_what_is_drawn_and_leaves_what_is_asked_for(form):
    keys = {} if form is None else {"quantization.dit": form}
    assert not any(map(is_pink, borders(keys)))
    assert all(map(is_pink, borders({**keys, "lora": [str(PINK)]})))


def test_an_adapter_gives_way_to_words_that_say_otherwise():
    (color,) = borders({"lora": [str(PINK)]}, ("a violin on a teal background",))
    red, green, blue = color
    assert red < 80
    assert min(green, blue) > 110
