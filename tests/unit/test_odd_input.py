"""Input that nobody means and somebody gives: each is refused in one message, or done as it was asked.

Found by attack. The plain cases of bad input are in test_bad_input.
"""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from portable_dit import Engine, Request, load_recipe, set_up
from portable_dit.errors import OutputError, PortableDitError, RecipeError, RequestError
from portable_dit.image import read_image
from portable_dit.machine_file import load_machine
from portable_dit.manifest import verify
from portable_dit.paths import kind_of, read_at_most
from portable_dit.png import encode_png
from portable_dit.result import with_number
from portable_dit.safetensors_file import open_tensor_file

LONG = "x" * 5000


@pytest.fixture
def run(cli, tiny_recipe, tmp_path, monkeypatch):
    """Runs `run` in an empty folder; gives the result and the names of the files that are there then."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)

    def call(*arguments):
        result = cli("run", "--recipe", tiny_recipe, *arguments)
        assert "Traceback" not in result.stderr
        return result, sorted(path.name for path in place.iterdir())

    return call


@pytest.fixture
def refused(run):
    """Runs `run` and expects refusal, nothing written, and the words in the message."""

    def call(*arguments, words):
        result, files = run(*arguments)
        assert result.exit_code == 2, result.stderr
        assert result.stdout == ""
        assert files == []
        for word in words:
            assert word in result.stderr, result.stderr
        return result.stderr

    return call


def lines(path: Path, *texts: str) -> Path:
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


# Names


def test_names_that_cannot_be_paths_are_missing_and_devices_are_read_in_part():
    assert kind_of(LONG) == kind_of("a\0b") == "missing"
    assert kind_of("/dev/null") == "other"
    assert kind_of("/dev") == "folder"
    assert len(read_at_most("/dev/zero", 100)) == 101
    with pytest.raises(OSError, match="NUL"):
        read_at_most("a\0b", 100)


def test_a_name_that_is_too_long_is_refused_wherever_a_file_is_named(refused, cli, tmp_path):
    refused("-p", "a", "-o", LONG, words=("File name too long", "a shorter name"))
    refused("-p", "a", "-n", 2, "-o", "x" * 250 + ".png", words=("File name too long",))
    refused("-p", "a", "--image", LONG, words=("no such file",))
    refused("-p", "a", "--set", f"weights={LONG}", words=("there is no such folder",))
    refused("-p", f"@{LONG}", words=("File name too long",))
    for arguments in (("inspect", LONG), ("plan", "--recipe", LONG), ("plan", "--machine", LONG)):
        result = cli(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""


def test_a_name_with_nul_is_refused_wherever_a_file_is_named(refused, tmp_path, tiny_recipe):
    asked = lines(tmp_path / "a.jsonl", json.dumps({"prompt": "a", "output": "a\0b", "references": ["c\0d"]}))
    refused("--prompts", asked, words=("no such file",))
    asked = lines(tmp_path / "a.jsonl", json.dumps({"prompt": "a", "output": "a\0b"}))
    refused("--prompts", asked, words=("cannot hold NUL",))
    refused("-p", "@a\0b", words=("cannot hold NUL",))
    with Engine.load(tiny_recipe) as engine, pytest.raises(OutputError, match="NUL"):
        engine.generate("a").save("a\0b.png")


def test_a_long_name_of_wide_letters_is_written(run):
    name = "🍎" * 60 + ".png"
    result, files = run("-p", "a", "-o", name)
    assert result.exit_code == 0, result.stderr
    assert files == [name]


@pytest.mark.parametrize("output", ["/", ".", "..", "", "here"])
def test_a_folder_is_no_output_for_several_pictures_either(refused, output, tmp_path):
    (tmp_path / "here").mkdir()
    output = tmp_path / "here" if output == "here" else output
    refused("-p", "a", "-n", 2, "-o", output, words=("a folder, and -o names a file",))
    prompts = lines(tmp_path / "two.txt", "a", "b")
    refused("--prompts", prompts, "-o", output, words=("a folder, and -o names a file",))


def test_numbered_names_have_as_many_digits_as_the_last():
    assert with_number(Path("out.png"), 7, 12) == Path("out-07.png")


def test_stdout_is_no_output_for_pictures(refused, tmp_path):
    refused("-p", "a", "-o", "-", words=("written to files", "Name a file"))
    refused("-p", "a", "-o", "/dev/stdout", words=("-o /dev/stdout", "Name a file"))
    os.mkfifo(tmp_path / "pipe.png")
    refused("-p", "a", "-o", tmp_path / "pipe.png", words=("a device or pipe",))
    asked = lines(tmp_path / "a.jsonl", '{"prompt": "a", "output": "-"}')
    refused("--prompts", asked, words=("a.jsonl:1: -o -",))


def test_a_private_file_stays_private_when_it_is_replaced(run, tmp_path):
    target = tmp_path / "place" / "own.png"
    target.write_text("old")
    target.chmod(0o600)
    result, _ = run("-p", "a", "-o", "own.png")
    assert result.exit_code == 0
    assert target.stat().st_mode & 0o777 == 0o600


# Prompts


def test_every_faulty_line_is_told_with_its_place_whatever_the_fault(refused, tmp_path):
    asked = lines(
        tmp_path / "a.jsonl",
        '{"prompt": "a", "format": "gif"}',
        '{"prompt": "a", "size": "big"}',
        "not",
        '{"prompt": "a", "output": "x.bmp"}',
    )
    refused("--prompts", asked, words=[f"a.jsonl:{k}: " for k in (1, 2, 3, 4)])


def test_ten_thousand_faulty_lines_do_not_fill_the_terminal(refused, tmp_path):
    asked = lines(tmp_path / "many.txt", *["a"] * 10_000)
    message = refused("--prompts", asked, "--size", "33x33", words=("many.txt:20: ", "and 9,980 more"))
    assert len(message) < 5000


def test_a_key_said_twice_in_a_line_is_refused_instead_of_one_being_dropped(refused, tmp_path):
    asked = lines(
        tmp_path / "a.jsonl", '{"prompt": "a", "prompt": "b"}', '{"prompt": "a", "n": 2, "images": 1}'
    )
    refused("--prompts", asked, words=("1: prompt: said twice", "2: images: said twice"))


def test_json_that_is_nested_without_end_is_refused(refused, tmp_path):
    asked = lines(tmp_path / "a.jsonl", '{"prompt": ' + "[" * 100_000)
    refused("--prompts", asked, words=("a.jsonl:1: not JSON",))


def test_only_line_ends_end_a_line(run, tmp_path):
    asked = lines(tmp_path / "a.jsonl", '{"prompt": "a red\u2028apple"}', '{"prompt": "green\x85apple"}')
    result, files = run("--prompts", asked)
    assert result.exit_code == 0, result.stderr
    assert files == ["out-1.png", "out-2.png"]


def test_json_lines_are_known_by_their_name_in_any_case_and_a_json_file_is_not_taken_for_text(
    run, refused, tmp_path
):
    refused("--prompts", lines(tmp_path / "a.json", '[{"prompt": "a"}]'), words=("a.jsonl",))
    result, _ = run("--prompts", lines(tmp_path / "A.JSONL", '{"prompt": "a", "output": "b.png"}'))
    assert result.stdout == "b.png\n"


def test_two_lines_that_write_one_file_under_two_names_are_refused(refused, tmp_path):
    asked = lines(
        tmp_path / "a.jsonl",
        '{"prompt": "a", "output": "x.png"}',
        '{"prompt": "b", "output": "../place/x.png"}',
    )
    refused("--prompts", asked, words=("a.jsonl:2", "written by", "a.jsonl:1 too"))


def test_a_reference_that_the_same_run_writes_is_refused_since_it_would_be_the_old_one(run, tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "place" / "x.png")
    asked = lines(
        tmp_path / "a.jsonl",
        '{"prompt": "a", "output": "x.png"}',
        '{"prompt": "b", "output": "y.png", "references": ["x.png"]}',
    )
    result, files = run("--prompts", asked)
    assert result.exit_code == 2
    assert files == ["x.png"]
    assert "a.jsonl:2: x.png is written by" in result.stderr


def test_a_picture_may_replace_its_own_reference(run, tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "place" / "x.png")
    result, _ = run("-p", "make it green", "--image", "x.png", "-o", "x.png")
    assert result.exit_code == 0, result.stderr


def test_lines_with_references_draw_what_each_would_alone(run, tmp_path):
    """Their pixels are not kept while the other lines are checked."""
    for color in ("red", "blue"):
        Image.new("RGB", (64, 64), color).save(tmp_path / f"{color}.png")
    text = [
        json.dumps({"prompt": "make it green", "references": [str(tmp_path / f"{color}.png")]})
        for color in ("red", "blue")
    ]
    result, _ = run("--prompts", lines(tmp_path / "a.jsonl", *text), "-o", "both.png")
    assert result.exit_code == 0, result.stderr
    for number, color in enumerate(("red", "blue"), 1):
        run("-p", "make it green", "--image", tmp_path / f"{color}.png", "-o", "one.png")
        place = tmp_path / "place"
        assert (place / "one.png").read_bytes() == (place / f"both-{number}.png").read_bytes()


def test_an_address_is_no_reference_and_says_so(refused):
    refused("-p", "a", "--image", "https://example.org/a.png", words=("an address", "Save the image"))


# Recipes, plans, machines, weights


def test_an_endless_recipe_is_not_read_to_its_end(cli):
    result = cli("plan", "--recipe", "/dev/zero")
    assert result.exit_code == 2
    assert "over 262,144 bytes" in result.stderr
    with pytest.raises(PortableDitError, match="over 262,144 bytes"):
        load_machine("/dev/zero")


def test_a_value_that_cannot_be_read_is_one_mistake_and_many_are_cut_short(cli, tmp_path):
    recipe = lines(tmp_path / "a.yaml", "model: !!int x", "graphs: {dit: 'yes'}")
    message = cli("plan", "--recipe", recipe).stderr
    assert "2 mistakes" in message
    assert "is not one of 'auto', true, false" in message
    lines(tmp_path / "a.yaml", *(f"key{k}: 1" for k in range(100)))
    assert "and 81 more" in cli("plan", "--recipe", recipe).stderr


def test_a_billion_references_are_refused_before_they_are_planned_for(cli, tiny_recipe):
    result = cli("plan", "--recipe", tiny_recipe, "--image-count", 999_999_999)
    assert result.exit_code == 2
    assert "takes at most 3" in result.stderr


def test_a_plan_is_shown_however_narrow_the_terminal_says_it_is(cli, tiny_recipe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    assert "fits" in cli("plan", "--recipe", tiny_recipe).stdout


def test_an_empty_size_is_refused_by_plan_as_by_run(cli, tiny_recipe):
    assert cli("plan", "--recipe", tiny_recipe, "--size", "").exit_code == 2


def test_a_header_that_is_nested_without_end_and_a_pipe_are_no_weights(tmp_path):
    path = tmp_path / "a.safetensors"
    raw = b'{"a":' + b"[" * 200_000
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(PortableDitError, match="no JSON"):
        open_tensor_file(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(PortableDitError, match="a device or pipe"):
        verify(tmp_path)


def test_a_manifest_that_names_nothing_or_files_outside_verifies_nothing(tiny_checkpoint, tmp_path):
    weights = tmp_path / "vae"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes((tiny_checkpoint / "vae/model.safetensors").read_bytes())
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"version": 1, "files": {}}')
    with pytest.raises(PortableDitError, match=r"vae/model.safetensors: not in manifest.json"):
        verify(tmp_path)
    for name in ("../secret", "/etc/passwd"):
        manifest.write_text(json.dumps({"version": 1, "files": {name: {"sha256": "", "bytes": 1}}}))
        with pytest.raises(PortableDitError, match="outside the folder"):
            verify(tmp_path)


# Records of files from anybody


def record_file(path: Path, text: str) -> Path:
    info = PngImagePlugin.PngInfo()
    info.add_text("portable-dit", text)
    Image.new("RGB", (8, 8)).save(path, pnginfo=info)
    return path


def test_a_record_cannot_drive_the_terminal(cli, tmp_path):
    text = json.dumps({"version": "1", "prompt": "\x1b[2J\u202egnp \ud800 🍎\nnext"})
    shown = cli("inspect", record_file(tmp_path / "a.png", text)).stdout
    assert shown == "version: 1\nprompt: \\x1b[2J\\u202egnp \\ud800 🍎\nnext\n"


def test_a_message_cannot_drive_the_terminal(cli, tmp_path):
    result = cli("inspect", tmp_path / "\x1b[31m.png")
    assert result.exit_code == 2
    assert "\\x1b[31m.png" in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"version": 1, "a": NaN}', '{"version": 1, "a": 1e999}', "[1]"]
)
def test_a_record_that_is_no_json_object_is_none(cli, tmp_path, text):
    result = cli("inspect", record_file(tmp_path / "a.png", text), "--json")
    assert result.exit_code == 2
    assert "without a portable-dit record" in result.stderr


def test_a_record_nested_deeply_is_shown(cli, tmp_path):
    text = '{"version": 1, "a": ' + "[" * 900 + "]" * 900 + "}"
    assert cli("inspect", record_file(tmp_path / "a.png", text)).exit_code == 0


def test_a_transparent_grey_of_16_bits_is_laid_over_white(tmp_path):
    Image.fromarray(np.full((8, 8), 1000, np.uint16)).save(tmp_path / "a.png", transparency=1000)
    image = read_image(tmp_path / "a.png")
    assert (image.pixels == 255).all()
    assert any("over white" in note for note in image.notes)


# Python


def test_numbers_of_numpy_are_numbers(engine):
    odd = engine.generate(
        Request(
            "a", seed=np.int64(3), size=(np.int32(64), np.int64(96)), images=np.int8(1), steps=np.uint8(6)
        )
    )
    plain = engine.generate(Request("a", seed=3, size=(64, 96)))
    assert encode_png(odd.images[0].pixels) == encode_png(plain.images[0].pixels)
    assert odd.images[0].data() == plain.images[0].data()


ZEROS = np.zeros((64, 64, 3), np.uint8)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"size": 64}, "width, height"),
        ({"size": "64x64"}, "width, height"),
        ({"size": (64, 64, 3)}, "width, height"),
        ({"size": ()}, "width, height"),
        ({"size": (64.0, 64.0)}, "width, height"),
        ({"format": 1}, "not one that is written"),
        ({"format": []}, "not one that is written"),
        ({"references": "x.png"}, "a tuple of images"),
        ({"references": b"x"}, "a tuple of images"),
        ({"references": None}, "a tuple of images"),
        ({"references": Path("x.png")}, "a tuple of images"),
        ({"references": ZEROS}, "a tuple of images"),
        ({"references": (Image.new("RGB", (64, 64)),)}, r"numpy.asarray\(image.convert"),
        ({"references": (None,)}, "none of path, file bytes"),
        ({"references": (np.broadcast_to(ZEROS[:1, :1], (20_000, 20_000, 3)),)}, "Scale it down"),
    ],
)
def test_a_request_of_the_wrong_types_is_refused_in_words(engine, wish, words):
    with pytest.raises(RequestError, match=words):
        engine.generate(Request("a", **wish))


@pytest.mark.parametrize("request_", [None, 3, {"prompt": "a"}, b"a"])
def test_what_is_no_request_is_refused_in_words(engine, request_):
    with pytest.raises(RequestError, match="a Request or a prompt is needed"):
        engine.generate(request_)


def test_drawing_from_inside_an_event_is_refused_instead_of_waiting_for_ever(engine):
    with pytest.raises(PortableDitError, match="from inside on_event"):
        engine.generate("a", on_event=lambda event: engine.generate("a"))
    with pytest.raises(PortableDitError, match="from inside on_event"):
        engine.generate("a", on_event=lambda event: engine.close() if "Step" in str(type(event)) else None)
    assert engine.generate("a").images


def test_overrides_are_never_dropped(tiny_recipe):
    for loaded in (load_recipe(tiny_recipe), set_up(tiny_recipe)):
        with pytest.raises(RecipeError, match="overrides"):
            Engine.load(loaded, {"sampling.steps": 6})
    with pytest.raises(RecipeError, match="strict"):
        Engine.load(set_up(tiny_recipe), strict=True)
    with Engine.load(set_up(tiny_recipe, strict=True)) as engine:
        assert engine.setup.strict


def test_what_is_no_recipe_is_refused_in_words(tiny_recipe):
    for wrong in (3, None, {"model": "h3-mini"}):
        with pytest.raises(RecipeError, match="a name or a path is needed"):
            Engine.load(wrong)
    with pytest.raises(RecipeError, match="a key must be text"):
        load_recipe(tiny_recipe, {1: 2})
