"""The official client and curl against a running server, with a tiny model that draws in a blink."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import openai
import pytest
from PIL import Image
from server_process import RunningServer, running

from portable_dit.request import Request


@pytest.fixture(scope="module")
def server(tiny_recipe: Path, tmp_path_factory):
    with running(tiny_recipe, tmp_path_factory.mktemp("server") / "jobs.sqlite3") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RunningServer):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def opened(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def decoded(text: str | None) -> np.ndarray:
    assert text
    return opened(base64.b64decode(text))


def png(color: str, size: tuple[int, int] = (96, 64)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


def test_a_generation_is_the_very_file_that_the_engine_makes(client, engine):
    answer = client.images.generate(
        model="h3-mini", prompt="a red apple", size="96x64", n=2, extra_body={"seed": 7}
    )
    expected = engine.generate(Request("a red apple", size=(96, 64), seed=7, images=2, format="png"))
    files = [base64.b64decode(image.b64_json or "") for image in answer.data]
    assert files == [picture.encoded["png"] for picture in expected.images]
    assert (answer.size, answer.output_format) == ("96x64", "png")


def test_an_answer_says_how_long_each_stage_took_and_how_much_memory(server):
    answer = server.draw(size="64x64", seed=1)
    stages = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert {"queue", "text_encode", "denoise", "vae_decode", "encode_png", "total"} <= set(stages)
    assert float(stages["total"]) >= float(stages["denoise"]) > 0
    assert float(answer.headers["x-peak-memory-mb"]) > 1


def test_without_a_seed_pictures_differ_and_say_their_seed(server):
    first, second = (server.draw(size="64x64").json for _ in range(2))
    assert first["portable_dit"]["seeds"] != second["portable_dit"]["seeds"]
    seed = first["portable_dit"]["seeds"][0]
    assert server.draw(size="64x64", seed=seed).json["data"] == first["data"]


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_every_format_is_written_and_read(client, format):
    answer = client.images.generate(prompt="a red apple", size="64x64", output_format=format)
    with Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))) as image:
        assert (image.format, image.size) == (format.upper(), (64, 64))


def test_compression_changes_the_size_of_a_jpeg(client):
    sizes = [
        len(
            client.images.generate(
                prompt="a red apple",
                size="64x64",
                output_format="jpeg",
                output_compression=quality,
                extra_body={"seed": 1},
            )
            .data[0]
            .b64_json
        )
        for quality in (10, 95)
    ]
    assert sizes[0] < sizes[1]


def test_an_address_gives_the_same_picture_without_a_key(server, client):
    here = client.images.generate(prompt="a red apple", size="64x64", extra_body={"seed": 5})
    there = client.images.generate(
        prompt="a red apple", size="64x64", response_format="url", extra_body={"seed": 5}
    )
    answer = server.get(there.data[0].url.removeprefix(server.url))
    assert answer.headers["content-type"] == "image/png"
    assert answer.body == base64.b64decode(here.data[0].b64_json)


def test_an_edit_takes_several_references_in_their_order(client, engine):
    references = [png("red"), png("blue"), png("green")]
    answer = client.images.edit(
        image=[(f"{k}.png", data) for k, data in enumerate(references)],
        prompt="make it blue",
        size="96x64",
        extra_body={"seed": "3"},
    )
    in_order, reversed_ = (
        engine.generate(Request("make it blue", size=(96, 64), seed=3, references=order)).images[0].pixels
        for order in (references, references[::-1])
    )
    assert np.array_equal(decoded(answer.data[0].b64_json), in_order)
    assert not np.array_equal(in_order, reversed_)


def test_an_edit_of_one_reference_has_its_size(client):
    answer = client.images.edit(image=("one.png", png("red", (128, 96))), prompt="make it blue")
    assert decoded(answer.data[0].b64_json).shape == (96, 128, 3)


def test_a_stream_shows_partial_images_and_then_the_picture(client):
    whole = client.images.generate(prompt="a red apple", size="96x64", extra_body={"seed": 2})
    events = list(
        client.images.generate(
            prompt="a red apple", size="96x64", stream=True, partial_images=2, extra_body={"seed": 2}
        )
    )
    assert [event.type for event in events] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert all(decoded(event.b64_json).ndim == 3 for event in events[:2])
    assert events[2].b64_json == whole.data[0].b64_json


def test_a_stream_of_an_edit_has_the_names_of_an_edit(client):
    events = client.images.edit(
        image=("a.png", png("red")), prompt="make it blue", stream=True, partial_images=1
    )
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]


def test_chat_answers_with_data_urls(client, engine):
    answer = client.chat.completions.create(
        model="h3-mini",
        messages=[{"role": "user", "content": "a red apple"}],
        extra_body={"height": 64, "width": 96, "num_inference_steps": 6, "seed": 42},
    )
    part = answer.choices[0].message.content[0]
    expected = engine.generate(Request("a red apple", size=(96, 64), seed=42)).images[0].pixels
    head, _, data = part["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert np.array_equal(decoded(data), expected)
    assert part["stage_durations"]["denoise"] > 0
    assert part["peak_memory_mb"] > 1


def test_chat_takes_references_as_parts_and_several_outputs(client, engine):
    url = f"data:image/png;base64,{base64.b64encode(png('red')).decode()}"
    answer = client.chat.completions.create(
        model="h3-mini",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "make it blue"},
                    {"type": "image_url", "image_url": {"url": url}},
                ],
            }
        ],
        extra_body={"num_outputs_per_prompt": 2, "seed": 1},
    )
    expected = engine.generate(Request("make it blue", references=(png("red"),), seed=1, images=2))
    urls = [part["image_url"]["url"] for part in answer.choices[0].message.content]
    for url, picture in zip(urls, expected.images, strict=True):
        assert np.array_equal(decoded(url.partition(",")[2]), picture.pixels)


def test_a_chat_stream_ends_with_the_picture(client):
    chunks = list(
        client.chat.completions.create(
            model="h3-mini",
            messages=[{"role": "user", "content": "a red apple"}],
            stream=True,
            extra_body={"size": "64x64"},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[1].choices[0].delta.content[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_chat_stream_ends_with_its_usage_where_that_is_wished(client):
    wish = {
        "model": "h3-mini",
        "messages": [{"role": "user", "content": "a"}],
        "extra_body": {"size": "64x64"},
    }
    options = {"include_usage": True}
    *_, stop, last = client.chat.completions.create(**wish, stream=True, stream_options=options)
    assert stop.choices[0].finish_reason == "stop"
    assert (last.choices, last.usage.total_tokens) == ([], 0)
    with pytest.raises(openai.BadRequestError, match=r"stream_options.*: only a stream has any"):
        client.chat.completions.create(**wish, stream_options=options)


def test_what_programs_for_chats_send_out_of_habit_asks_for_nothing(client):
    """Open WebUI and others send such fields with every request."""
    wish = {
        "model": "h3-mini",
        "messages": [{"role": "user", "content": "a"}],
        "extra_body": {"size": "64x64"},
    }
    habits = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": False, "stop": [],
        "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"},
        "service_tier": "auto", "store": False,
    }  # fmt: skip
    assert client.chat.completions.create(**wish, **habits).choices[0].finish_reason == "stop"
    call = {"type": "function", "function": {"name": "draw"}}
    for name, value in {
        "frequency_penalty": 0.5, "logit_bias": {"50256": -100}, "logprobs": True, "stop": ["end"],
        "tools": [call], "tool_choice": "required", "response_format": {"type": "json_object"}, "store": True,
    }.items():  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**wish, **{name: value})
        assert str(caught.value.param).startswith(name)


def test_what_of_a_chat_has_no_effect_is_noted(server):
    body = {
        "messages": [
            {"role": "user", "content": "a green apple"},
            {"role": "assistant", "content": "here"},
            {"role": "user", "content": "a red apple"},
        ],
        "temperature": 0.5,
        "size": "64x64",
    }
    notes = server.post("/v1/chat/completions", body).json["portable_dit"]["notes"]
    assert any("2 before it have no effect" in note for note in notes)
    assert any(note.startswith("temperature") for note in notes)


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="curl or jq is not installed")
def test_the_curl_of_the_hunyuan_image_recipe_writes_a_picture(server, engine, tmp_path):
    """Its script as it is published, with this model's numbers."""
    body = {
        "messages": [{"role": "user", "content": "a red apple"}],
        "extra_body": {"height": 64, "width": 96, "num_inference_steps": 6, "seed": 42},
    }
    script = (
        f"curl -s {server.url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))} "
        "| jq -r '.choices[0].message.content[0].image_url.url' | cut -d',' -f2- | base64 -d > out.png"
    )
    subprocess.run(["bash", "-c", script], check=True, cwd=tmp_path, timeout=300)
    expected = engine.generate(Request("a red apple", size=(96, 64), seed=42, format="png"))
    assert (tmp_path / "out.png").read_bytes() == expected.images[0].encoded["png"]


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_sends_an_edit_as_a_form(server, tmp_path):
    for name in ("red", "blue"):
        (tmp_path / f"{name}.png").write_bytes(png(name))
    script = (
        f"curl -s -f {server.url}/v1/images/edits -F prompt='make it blue' -F 'image[]=@red.png' "
        "-F 'image[]=@blue.png' -F n=2 -F output_format=jpeg"
    )
    done = subprocess.run(
        ["bash", "-c", script], check=True, cwd=tmp_path, timeout=60, stdout=subprocess.PIPE
    )
    assert len(json.loads(done.stdout)["data"]) == 2


def test_models_are_listed_and_another_is_not_found(client):
    assert [model.id for model in client.models.list()] == ["h3-mini"]
    assert client.models.retrieve("h3-mini").id == "h3-mini"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.images.generate(model="dall-e-3", prompt="a red apple")


def test_the_client_reads_our_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="a red apple", size="100x10")
    assert "The nearest is" in str(caught.value)
    assert caught.value.type == "invalid_request_error"


def test_a_picture_that_is_cut_short_is_an_invalid_image(client):
    whole = png("red")
    for data in (b"", b"no picture", whole[: len(whole) // 2]):
        with pytest.raises(openai.BadRequestError) as caught:
            client.images.edit(image=data, prompt="make it blue")
        assert (caught.value.code, caught.value.param) == ("invalid_image", "image"), len(data)


def test_what_the_models_have_not_is_refused_by_name(server):
    for fields, word in (
        ({"quality": "high"}, "quality"),
        ({"background": "transparent"}, "background"),
        ({"negative_prompt": "blur"}, "negative_prompt"),
        ({"guidance_scale": 5.0}, "guidance_scale"),
        ({"partial_images": 2}, "partial_images"),
        ({"output_compression": 50}, "output_compression"),
    ):
        answer = server.draw(**fields)
        assert answer.status == 400, fields
        assert word in answer.error["message"]
    with_mask = b"".join(
        b'--x\r\nContent-Disposition: form-data; name="%s"; filename="a.png"\r\n\r\n%s\r\n'
        % (name, png("red"))
        for name in (b"image", b"mask")
    )
    body = (
        b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nmake it\r\n' + with_mask + b"--x--\r\n"
    )
    answer = server.post(
        "/v1/images/edits", body, headers={"Content-Type": "multipart/form-data; boundary=x"}
    )
    assert (answer.status, answer.error["param"]) == (400, "mask")


def test_a_misspelt_field_is_told_the_near_one(server):
    message = server.draw(num_inference_step=6).error["message"]
    assert "Did you mean 'num_inference_steps'?" in message


def test_server_info_tells_recipe_plan_kernels_notes_and_versions(server, engine):
    (worker,) = server.get("/server_info").json["workers"]
    assert worker["recipe"]["precision"] == {"value": "float32", "from": "recipe"}
    assert worker["plan"]["digest"] == engine.plan.digest
    assert worker["kernels"]["dit"] == dict(engine.plan.kernels["dit"])
    assert worker["notes"] == list(engine.setup.notes)
    assert set(worker["versions"]) >= {"portable-dit", "torch", "python"}


def test_the_server_itself_holds_no_torch(server):
    """Which would cost 200 MB, and on a device a context of its own; it is the worker's."""
    server.draw(size="64x64")
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{server.worker_pid}/maps").read_text()


def test_metrics_count_pictures_and_steps(server):
    def counts() -> dict[str, float]:
        lines = server.get("/metrics").body.decode().splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}

    before = counts()
    server.draw(size="64x64", n=2)
    after = counts()
    grown = {name: after[name] - before[name] for name in after if name in before}
    assert grown["portable_dit_pictures_total"] == 2
    assert grown["portable_dit_steps_total"] == 12
    assert grown["portable_dit_queue_wait_seconds_count"] == 1
    assert after["portable_dit_workers_ready"] == 1
    assert after["portable_dit_device_peak_bytes"] > 1


def test_a_request_keeps_its_id(server):
    assert server.get("/health", headers={"X-Request-Id": "my-id.7"}).headers["x-request-id"] == "my-id.7"
    made = server.get("/health", headers={"X-Request-Id": "no spaces allowed"}).headers["x-request-id"]
    assert made != "no spaces allowed"
    assert len(made) == 16


def test_the_same_request_always_gives_the_same_bytes(server):
    digests = {
        hashlib.sha256(
            base64.b64decode(server.draw(size="64x64", seed=9).json["data"][0]["b64_json"])
        ).digest()
        for _ in range(3)
    }
    assert len(digests) == 1
