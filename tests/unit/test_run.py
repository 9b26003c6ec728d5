"""`portable-dit run` and `bench` through the command line, on a tiny checkpoint."""

import hashlib
import io
import json

import pytest
from PIL import Image

from portable_dit.image import read_record


@pytest.fixture
def run(cli, tiny_recipe, tmp_path):
    def call(*arguments, stdin=None):
        return cli("run", "--recipe", tiny_recipe, *arguments, stdin=stdin)

    return call


def test_one_prompt_gives_one_file_whose_path_is_the_answer(run, tmp_path):
    out = tmp_path / "out.png"
    result = run("--prompt", "a red apple", "-o", out)
    assert result.exit_code == 0
    assert result.stdout == f"{out}\n"
    assert result.stderr == ""
    with Image.open(out) as image:
        assert image.size == (96, 64)
    assert [path.name for path in tmp_path.iterdir()] == ["out.png"]


def test_json_is_one_line_that_says_everything(run, tmp_path):
    out = tmp_path / "out.png"
    result = run("-p", "a red apple", "-o", out, "--seed", 7, "-n", 2, "--json")
    assert result.stdout.count("\n") == 1
    answer = json.loads(result.stdout)
    assert [image["seed"] for image in answer["images"]] == [7, 8]
    for image in answer["images"]:
        data = (tmp_path / image["path"]).read_bytes()
        assert image["sha256"] == hashlib.sha256(data).hexdigest()
        assert (image["width"], image["height"]) == Image.open(io.BytesIO(data)).size
    assert [len(steps) for steps in answer["seconds"]["steps"]] == [6, 6]
    assert {"text_encode", "prepare", "denoise", "vae_decode", "encode_png", "total"} <= set(
        answer["seconds"]
    )
    assert all(value == float(f"{value:.7g}") for steps in answer["seconds"]["steps"] for value in steps)
    assert answer["peak_bytes"] > 0
    assert answer["backend"] == "cpu"
    assert set(answer["kernels"]) == {"text_encoder", "dit", "vae"}
    assert answer["notes"] == []


def test_the_same_seed_twice_is_identical_bytes(run, tmp_path):
    for name in ("a.png", "b.png"):
        run("-p", "a red apple", "-o", tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        (("--size", "128x64"), (128, 64)),
        (("--width", 64, "--height", 128), (64, 128)),
        (("--aspect-ratio", "1:1"), (64, 64)),
        ((), (96, 64)),
    ],
)
def test_the_size_is_the_one_asked_for(run, tmp_path, flags, size):
    out = tmp_path / "out.png"
    assert run("-p", "a red apple", "-o", out, *flags).exit_code == 0
    with Image.open(out) as image:
        assert image.size == size


@pytest.mark.parametrize(
    ("name", "flags", "kind"),
    [
        ("a.jpg", (), "JPEG"),
        ("a.JPEG", (), "JPEG"),
        ("a.webp", (), "WEBP"),
        ("a", ("--format", "jpeg"), "JPEG"),
        ("a", (), "PNG"),
    ],
)
def test_the_format_is_the_one_asked_for_and_carries_the_record(run, tmp_path, name, flags, kind):
    out = tmp_path / name
    run("-p", "a red apple", "-o", out, *flags)
    with Image.open(out) as image:
        assert image.format == kind
    record = read_record(out)
    assert record["prompt"] == "a red apple"
    assert record["seed"] == 0


def test_several_pictures_are_all_of_the_format_that_the_name_says(run, tmp_path):
    assert run("-p", "a red apple", "-n", 2, "-o", tmp_path / "a.jpg").exit_code == 0
    for name in ("a-1.jpg", "a-2.jpg"):
        with Image.open(tmp_path / name) as image:
            assert image.format == "JPEG"


def test_the_prompt_comes_from_stdin_or_a_file(run, tmp_path):
    (tmp_path / "prompt.txt").write_text("a green apple\n", encoding="utf-8")
    run("-p", "-", "-o", tmp_path / "a.png", stdin=b"a green apple\n")
    run("-p", f"@{tmp_path / 'prompt.txt'}", "-o", tmp_path / "b.png")
    assert read_record(tmp_path / "a.png")["prompt"] == "a green apple"
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_file_of_prompts_is_drawn_in_one_load(run, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red apple\n\na green apple\n")
    result = run("--prompts", prompts, "-o", tmp_path / "p.png", "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["a red apple", "a green apple"]
    assert [line["images"][0]["path"] for line in lines] == [str(tmp_path / f"p-{k}.png") for k in (1, 2)]


def test_a_jsonl_line_may_set_more_keys(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "a red apple", "seed": 4, "size": "64x64", "n": 2},
        {"prompt": "a green apple", "output": str(tmp_path / "mine.webp"), "num_inference_steps": 6},
    ]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    result = run("--prompts", prompts, "-o", tmp_path / "p.png", "--seed", 1)
    names = ["p-1-1.png", "p-1-2.png", "mine.webp"]
    assert result.stdout.split() == [str(tmp_path / name) for name in names]
    assert [read_record(tmp_path / name)["seed"] for name in names] == [4, 5, 1]
    assert read_record(tmp_path / "p-1-1.png")["size"] == "64x64"


def test_every_wrong_line_is_named_and_nothing_is_drawn(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    right, wrong = '{"prompt": "a red apple"}', '{"prompt": 5}\n{"promt": "x"}'
    prompts.write_text(f'{right}\n{wrong}\n{{"prompt": "x", "size": "big"}}\nnope\n[1]\n')
    result = run("--prompts", prompts, "-o", tmp_path / "p.png")
    assert result.exit_code == 2
    for words in (
        "prompts.jsonl:2: prompt: 5 must be text",
        "prompts.jsonl:3: key 'promt' is not known. Did you mean 'prompt'?",
        "prompts.jsonl:4: size=big",
        "prompts.jsonl:5: not JSON",
        "prompts.jsonl:6: not a JSON object",
    ):
        assert words in result.stderr
    prompts.write_text('{"prompt": "a red apple", "size": "5x5"}\n{"prompt": ""}\n')
    result = run("--prompts", prompts, "-o", tmp_path / "p.png")
    assert "prompts.jsonl:1: size=5x5" in result.stderr
    assert "prompts.jsonl:2: prompt: empty" in result.stderr
    assert list(tmp_path.glob("p*.png")) == []


def test_two_lines_may_not_write_one_file(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    line = json.dumps({"prompt": "a red apple", "output": str(tmp_path / "same.png")})
    prompts.write_text(f"{line}\n{line}\n")
    result = run("--prompts", prompts)
    assert result.exit_code == 2
    assert "is written by" in result.stderr


def test_a_picture_may_replace_its_own_reference(run, tmp_path):
    path = tmp_path / "a.png"
    run("-p", "a red apple", "-o", path)
    before = path.read_bytes()
    assert run("-p", "make it green", "--image", path, "-o", path).exit_code == 0
    assert path.read_bytes() != before
    assert read_record(path)["references"] == [{"name": "a.png", "size": "96x64"}]


def test_notes_go_to_stderr_and_into_the_file_and_strict_refuses_them(run, tmp_path):
    reference = tmp_path / "cut-out.png"
    Image.new("RGBA", (64, 64), (255, 0, 0, 90)).save(reference)
    flags = ("-p", "make it green", "--image", reference, "-o", tmp_path / "out.png")
    strict = run(*flags, "--strict")
    assert strict.exit_code == 2
    assert "strict:" in strict.stderr
    assert not (tmp_path / "out.png").exists()
    result = run(*flags)
    assert result.exit_code == 0
    assert "transparency was laid over white" in result.stderr
    assert "transparency was laid over white" in read_record(tmp_path / "out.png")["notes"][-1]


def test_bench_reports_medians_per_stage(cli, tiny_recipe):
    result = cli("bench", "--recipe", tiny_recipe, "--requests", 3, "--size", "64x64", "--json")
    report = json.loads(result.stdout)
    assert report["requests"] == 3
    assert report["size"] == "64x64"
    for row in ("text_encode", "prepare", "denoise", "vae_decode", "encode_png", "total"):
        assert 0 < report["least"][row] <= report["median"][row] <= report["most"][row]
    assert report["peak_bytes"] > 0
    text = cli("bench", "--recipe", tiny_recipe, "--requests", 1, "--warmup", 0).stdout
    assert "denoise" in text
    assert "peak memory" in text
    assert "side by side" not in text


def test_bench_says_how_many_pictures_were_drawn_together(cli, tiny_recipe):
    flags = ("bench", "--recipe", tiny_recipe, "-n", 3, "--requests", 2, "--warmup", 0, "--size", "64x64")
    report = json.loads(cli(*flags, "--set", "batch=2", "--json").stdout)
    assert (report["images"], report["batch"]) == (3, 2)
    assert report["side_by_side"] == pytest.approx((2 + 2 + 1) / 3)
    text = cli(*flags, "--set", "batch=2").stdout
    assert "2 requests of 3 pictures\nside by side 1.7 pictures, of 2 that may be\n" in text
    assert json.loads(cli(*flags, "--json").stdout)["side_by_side"] == 1.0
