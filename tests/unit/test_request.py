"""Requests: defaults filled in, and every problem told at once with the way out."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from portable_dit.errors import RequestError
from portable_dit.models.h3_image.config import CanvasConfig, H3Config, SchedulerConfig
from portable_dit.models.h3_image.spec import make_spec
from portable_dit.request import Request, parse_size, size_problem, validate_request

CANVAS = CanvasConfig(
    multiple=32,
    min_side=192,
    max_side=768,
    max_pixels=512 * 512,
    max_ratio=2.0,
    default_width=512,
    default_height=512,
    max_prompt_characters=300,
)
SCHEDULER = SchedulerConfig(reference_rule="fit", reference_pixels=512 * 512, max_references=3)
SPEC = make_spec("h3-mini", replace(H3Config(), canvas=CANVAS, scheduler=SCHEDULER))


def png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(out, "PNG")
    return out.getvalue()


def refused(request: Request, spec=SPEC) -> str:
    with pytest.raises(RequestError) as caught:
        validate_request(request, spec)
    return str(caught.value)


def test_a_bare_prompt_gets_the_models_defaults():
    request = validate_request(Request("a red apple"), SPEC)
    assert (request.width, request.height) == (512, 512)
    assert (request.steps, request.guidance_scale, request.seed, request.images) == (6, None, 0, 1)
    assert request.references == ()
    assert request.notes == ()


@pytest.mark.parametrize("prompt", ["", "   \n", "\t"])
def test_an_empty_prompt_is_refused(prompt):
    assert "prompt: empty. Say what to draw" in refused(Request(prompt))


def test_a_prompt_of_100_kilobytes_is_refused_with_the_limit():
    message = refused(Request("x" * 100_000))
    assert "100,000 characters" in message
    assert "at most 300" in message
    assert len(message) < 300


@pytest.mark.parametrize("prompt", ["nul \0 inside", "bad \udcff bytes"])
def test_a_prompt_that_is_not_text_is_refused(prompt):
    assert "UTF-8" in refused(Request(prompt))


@pytest.mark.parametrize(
    ("size", "rule", "nearest"),
    [
        ((0, 0), "positive", "192x192"),
        ((-512, 512), "positive", None),
        ((500, 512), "multiples of 32", "512x512"),
        ((64, 64), "at least 192", "192x192"),
        ((1024, 1024), "1,048,576 pixels are over this model's 262,144", "512x512"),
        ((100_000, 10_000), "at most 768", None),
        ((768, 192), "2:1 at most", None),
    ],
)
def test_an_illegal_size_names_the_rule_and_a_legal_neighbour(size, rule, nearest):
    message = refused(Request("x", size=size))
    assert message.startswith(f"size={size[0]}x{size[1]}: ")
    assert rule in message
    offered = message.rsplit(" ", 1)[1].rstrip(".")
    assert size_problem(*parse_size(offered), SPEC.sizes) is None
    assert nearest in (None, offered)


@pytest.mark.parametrize(
    ("ratio", "size"), [("1:1", (512, 512)), ("2:1", (704, 352)), ("16:9", (672, 384)), ("3:4", (448, 576))]
)
def test_an_aspect_ratio_keeps_the_models_area(ratio, size):
    request = validate_request(Request("x", aspect_ratio=ratio), SPEC)
    assert abs(request.width - size[0]) <= 32
    assert abs(request.height - size[1]) <= 32
    assert size_problem(request.width, request.height, SPEC.sizes) is None


@pytest.mark.parametrize("ratio", ["0:1", "wide", "1:0", "-1:2", "1", "nan:1"])
def test_an_aspect_ratio_that_is_none_is_refused(ratio):
    assert "as in 16:9" in refused(Request("x", aspect_ratio=ratio))


def test_an_extreme_aspect_ratio_names_the_limit():
    assert "2:1 at most. Try 2:1 or 1:2" in refused(Request("x", aspect_ratio="21:9"))


def test_size_and_aspect_ratio_together_are_refused():
    assert "Leave one out" in refused(Request("x", size=(512, 512), aspect_ratio="1:1"))


@pytest.mark.parametrize("steps", [5, 50, 0, -1])
def test_another_step_count_than_the_trained_one_is_refused(steps):
    assert f"steps={steps}: h3-mini was trained for 6 steps" in refused(Request("x", steps=steps))


def test_guidance_on_a_model_without_it_is_refused():
    assert "has no guidance. Leave it out" in refused(Request("x", guidance_scale=4.5))
    assert validate_request(Request("x", guidance_scale=1.0), SPEC).guidance_scale is None


@pytest.mark.parametrize("seed", [-1, 2**63, "7", 1.5, True])
def test_a_seed_outside_its_range_is_refused(seed):
    assert "a whole number from 0" in refused(Request("x", seed=seed))


@pytest.mark.parametrize("images", [0, -3, 129, "two"])
def test_an_image_count_outside_its_range_is_refused(images):
    assert "1 to 128 in one request" in refused(Request("x", images=images))


def test_an_unknown_format_names_the_near_one():
    assert "Did you mean 'jpeg'" in refused(Request("x", format="jpg"))


def test_every_problem_is_told_at_once():
    message = refused(Request("", size=(5, 5), steps=9, guidance_scale=3.0, seed=-1, references=("no.png",)))
    assert message.startswith("The request has 6 problems:")
    for word in ("prompt:", "size=5x5", "steps=9", "guidance_scale", "seed=-1", "no.png: no such file"):
        assert word in message


# References


def test_more_references_than_the_model_takes_are_refused():
    assert "4 were given and h3-mini takes at most 3" in refused(Request("x", references=(png(64, 64),) * 4))


def test_a_reference_is_brought_to_the_models_size_and_sets_the_canvas():
    request = validate_request(Request("x", references=(png(1000, 500), png(300, 300))), SPEC)
    assert [r.original_size for r in request.references] == [(1000, 500), (300, 300)]
    assert [r.size for r in request.references] == [
        SPEC.reference_size(1000, 500, canvas=(512, 512)),
        SPEC.reference_size(300, 300, canvas=(512, 512)),
    ]
    assert (request.width, request.height) == SPEC.sizes.nearest(*request.references[0].size)


def test_a_reference_outside_the_canvas_rules_gets_the_nearest_canvas_and_a_note():
    request = validate_request(Request("x", references=(png(900, 300),)), SPEC)
    assert size_problem(request.width, request.height, SPEC.sizes) is None
    assert "which this model does not draw" in request.notes[0]


def test_a_sliver_of_a_reference_is_refused():
    assert "4:1 at most. Crop it" in refused(Request("x", references=(png(1000, 10),)))


def test_references_come_as_paths_bytes_or_arrays(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png(64, 64))
    array = np.zeros((64, 64, 3), np.uint8)
    request = validate_request(Request("x", references=(str(path), path, png(64, 64), array)[1:]), SPEC)
    assert [r.name for r in request.references] == [str(path), "reference 2", "reference 3"]
    assert "uint8 RGB" in refused(Request("x", references=(array.astype(np.float32),)))


def test_every_bad_reference_is_named(tmp_path):
    message = refused(Request("x", references=(tmp_path, b"junk", png(64, 64))))
    assert f"{tmp_path}: a folder" in message
    assert "reference 2: not an image" in message
