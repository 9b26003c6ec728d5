"""What a refused request is told: every problem, with its field, what was asked, the rule and the way out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from portable_dit.errors import (
    CancelledError,
    DeviceMemoryError,
    DoesNotFitError,
    RankError,
    RecipeError,
    RequestError,
    WeightsError,
)
from portable_dit.recipe import load_recipe
from portable_dit.server import schema
from portable_dit.server.app import create_app
from portable_dit.server.refusal import refusal_of
from portable_dit.server.settings import Limits, Settings
from portable_dit.server.wording import problems_of, refused

Error = dict[str, Any]
Ask = Callable[..., Error]
GENERATIONS, EDITS, CHAT, JOBS = (
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/chat/completions",
    "/v1/jobs",
)
PYDANTIC = ("Input should", "Extra inputs", "Field required", "valid ", "Value error")
WRONG = (
    None,
    True,
    0,
    -1,
    10**30,
    1.5,
    float("nan"),
    float("-inf"),
    "",
    "x" * 300_000,
    "\ud800",
    [],
    {},
    [7],
)


@pytest.fixture(scope="module")
def ask(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """The error of a request that is refused before it reaches a queue; no worker runs."""
    settings = Settings(
        jobs=tmp_path_factory.mktemp("asked") / "jobs", limits=Limits(images=4, pixels=128 * 128)
    )
    app = create_app(load_recipe(tiny_recipe), settings)

    def ask(path: str, body: Any = b"", *, kind: str = "application/json", method: str = "POST") -> Error:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = asyncio.run(call(app, method, path, data, kind))
        assert 400 <= answer["status"] < 500
        error: Error = json.loads(answer["body"])["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"], error
        assert not any(word in error["message"] for word in PYDANTIC), error
        return error

    yield ask
    asyncio.run(app.state.service.store.close())


async def call(app: Any, method: str, path: str, body: bytes, kind: str) -> dict[str, Any]:
    """One request to an ASGI application, by hand."""
    path, _, query = path.partition("?")
    headers = [(b"host", b"127.0.0.1"), (b"content-type", kind.encode())]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "root_path": ""}
    scope |= {"query_string": query.encode(), "headers": headers, "client": ("127.0.0.1", 1), "state": {}}
    scope |= {
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 80),
        "asgi": {"version": "3.0"},
    }
    answer: dict[str, Any] = {"status": 0, "body": b""}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        answer["status"] = message.get("status", answer["status"])
        answer["body"] += message.get("body", b"")

    await app(scope, receive, send)
    return answer


def form(*files: str, **fields: str) -> bytes:
    """A form with files of no content, and fields."""
    head = '--x\r\nContent-Disposition: form-data; name="{}"'
    parts = [f'{head.format(name)}; filename="a"\r\n\r\n\r\n' for name in files]
    parts += [f"{head.format(name)}\r\n\r\n{value}\r\n" for name, value in fields.items()]
    return "".join([*parts, "--x--\r\n"]).encode()


def test_a_chat_is_told_its_own_fields(ask: Ask):
    wish = {"messages": [{"role": "user", "content": " "}], "size": "64x64"}
    assert ask(CHAT, wish)["param"] == "messages"
    assert ask(CHAT, wish)["message"].startswith("messages: empty. Say what to draw")
    user = {"role": "user", "content": "a"}
    for role in ("system", "developer"):
        error = ask(CHAT, {"messages": [{"role": role, "content": "be kind"}, user], "size": "64x64"})
        assert error["param"] == "messages"
        assert error["message"].startswith("messages: h3-mini takes no system prompt")
    assert ask(CHAT, {"messages": [user], "system_prompt": "be kind"})["param"] == "system_prompt"
    error = ask(CHAT, {"messages": [user], "logit_bias": {"7": 1, "8": 1}})
    assert error["message"].startswith("logit_bias={'7': 1, '8': 1}: has 2 entries and may have 0.")
    for more in ({"num_outputs_per_prompt": 5}, {"extra_body": {"num_outputs_per_prompt": 5}}):
        error = ask(CHAT, {"messages": [{"role": "user", "content": "a"}], **more})
        assert error["param"] == "num_outputs_per_prompt"
        assert error["message"].startswith("num_outputs_per_prompt=5: this server draws at most 4")


def test_a_key_that_is_said_twice_is_named(ask: Ask):
    for path, body, key in (
        (JOBS, b'{"prompt": "a", "n": 1, "prompt": "b"}', "prompt"),
        (CHAT, b'{"messages": [{"role": "user", "role": "user"}]}', "role"),
    ):
        error = ask(path, body)
        assert error["message"] == f"'{key}': said twice in one object. Say it once."
        assert error["param"] == key


FORM = "multipart/form-data; boundary=x"


@pytest.mark.parametrize(
    ("fields", "said", "param"),
    [
        ({"n": 0}, "n=0: must be at least 1. Leave it out", "n"),
        ({"n": 129}, "n=129: must be at most 128.", "n"),
        ({"n": 5}, "n=5: this server draws at most 4", "n"),
        ({"quality": "hd"}, "quality='hd': is not one of 'auto', 'standard'. Leave it out", "quality"),
        ({"seed": "1"}, "seed='1': must be a whole number.", "seed"),
        ({"seed": 2**63}, "seed=9223372036854775808: must be below 9223372036854775808.", "seed"),
        ({"stream": 1}, "stream=1: must be true or false.", "stream"),
        ({"guidance_scale": float("inf")}, "guidance_scale=inf: must be a finite number.", "guidance_scale"),
        ({"prompt": None}, "prompt=null: must be text.", "prompt"),
        ({"size": "9" * 65}, "must have at most 64 characters", "size"),
        (
            {"partial_images": 2},
            "partial_images: only a stream holds any. Say stream: true.",
            "partial_images",
        ),
        ({"output_compression": 5}, "output_compression: PNG is exact", "output_compression"),
        ({"guidance_scale": -1}, "guidance_scale=-1: must be at least 0. Leave it out", "guidance_scale"),
        ({"": 1}, "'': not a field of this call.", "''"),
        ({"extra_body": {}}, "extra_body: not a field of this call. What it holds stands", "extra_body"),
        ({"heigth": 64}, "heigth: not a field of this call.", "heigth"),
        ({"num_inference_steps": 7}, "num_inference_steps=7: ", "num_inference_steps"),
        ({"size": "65x64"}, "size=65x64: both sides must be multiples", "size"),
        ({"size": "256x192"}, "size=256x192: this server draws at most 16,384 pixels. Say a", "size"),
        ({"size": "wide"}, "size=wide: give width x height", "size"),
        ({"aspect_ratio": "1:9"}, "aspect_ratio=1:9: the sides may differ", "aspect_ratio"),
        ({"resolution": "4K"}, "resolution=4K: ", "resolution"),
        ({"guidance_scale": 3.5}, "guidance_scale=3.5: ", "guidance_scale"),
        ({"system_prompt": "be kind"}, "system_prompt: ", "system_prompt"),
        ({"prompt": " "}, "prompt: empty. Say what to draw", "prompt"),
        ({"model": "dall-e-3"}, "model=dall-e-3: not served here.", "model"),
    ],
)
def test_a_field_that_is_wrong_is_named_with_its_rule(ask: Ask, fields, said, param):
    error = ask(GENERATIONS, {"prompt": "a red apple", **fields})
    assert said in error["message"]
    assert error["param"] == param


def test_every_problem_of_a_body_is_told(ask: Ask):
    error = ask(GENERATIONS, {"heigth": 3, "n": 0, "qualty": "hd"})
    assert error["message"].startswith("The request has 4 problems:\n")
    for said in (
        "prompt: missing",
        "n=0: must be",
        "heigth: not a field",
        "qualty: not a field of this call. Did",
    ):
        assert said in error["message"]
    error = ask(EDITS, form(heigth="3", n="many", stream="maybe"), kind=FORM)
    for said in (
        "prompt: missing",
        "n='many': must be a whole",
        "stream='maybe': must be true",
        "heigth: not a",
    ):
        assert said in error["message"]
    assert "image: missing" in error["message"]
    error = ask(GENERATIONS, {"prompt": "a", "num_inference_steps": 7, "guidance_scale": 2, "size": "65x1"})
    for said in ("num_inference_steps=7: ", "guidance_scale=2", "size=65x1: "):
        assert said in error["message"]


def test_of_thousands_of_problems_the_first_are_told_and_all_counted(ask: Ask):
    error = ask(GENERATIONS, {f"key{n}": n for n in range(19_000)})
    assert error["message"].startswith("The request has 19,001 problems:\n  prompt: missing.")
    assert error["message"].endswith("and 18,981 more")


def test_a_misspelt_field_inside_another_is_named_with_the_near_one(ask: Ask):
    body = {"messages": [{"role": "user", "content": "a"}], "extra_body": {"heigth": 64}}
    error = ask(CHAT, body)
    assert error["param"] == "extra_body.heigth"
    assert "extra_body.heigth: not a field of this call. Did you mean 'height'?" in error["message"]
    error = ask(CHAT, {"messages": [{"rol": "user", "content": "a"}]})
    assert "messages.0.rol: not a field of this call. Did you mean 'role'?" in error["message"]
    assert "messages.0.role: missing" in error["message"]


@pytest.mark.parametrize(
    ("content", "said", "param"),
    [
        (7, "messages.0.content=7: must be text or must be a list.", "messages.0.content"),
        (
            [{"type": "image_url", "image_url": "http://a/b.png"}],
            "image_url='http://a/b.png': must be an object with url, detail.",
            "messages.0.content.0.image_url",
        ),
        ([{"type": "text"}], "a part of type text holds text", "messages.0.content.0"),
        (
            [{"type": "image_url", "image_url": {"url": "x", "detail": "ultra"}}],
            "messages.0.content.0.image_url.detail='ultra': is not one of 'auto', 'low', 'high'.",
            "messages.0.content.0.image_url.detail",
        ),
        (["hello"], "messages.0.content.0='hello': must be an object", "messages.0.content.0"),
        ([{"type": "audio"}], "is not one of 'text', 'image_url'", "messages.0.content.0.type"),
        ([{"type": "text", "txt": "a"}], "Did you mean 'text'?", "messages.0.content.0.txt"),
    ],
)
def test_a_wrong_part_of_a_message_is_named(ask: Ask, content, said, param):
    error = ask(CHAT, {"messages": [{"role": "user", "content": content}]})
    assert said in error["message"]
    assert error["param"] == param


def test_references_are_called_as_the_call_calls_them(ask: Ask):
    broken = "data:image/png;base64,AAAA"
    part = {"type": "image_url", "image_url": {"url": broken}}
    assert ask(JOBS, {"prompt": "a", "images": [broken]})["param"] == "images"
    assert ask(JOBS, {"prompt": "a", "images": ["x"]})["param"] == "images.0"
    assert ask(CHAT, {"messages": [{"role": "user", "content": [part]}]})["param"] == "image_url"
    assert ask(EDITS, form(prompt="a"), kind=FORM)["param"] == "image"


@pytest.mark.parametrize(
    ("path", "body", "kind", "said"),
    [
        (GENERATIONS, b"{", "application/json", "The body is not JSON ("),
        (
            JOBS,
            b'{"n": ' + b"9" * 5000 + b"}",
            "application/json",
            "a number in it has too many digits. Send",
        ),
        (CHAT, b'{"prompt": "\xff"}', "application/json", "byte 12 is not UTF-8. Send JSON in UTF-8."),
        (GENERATIONS, b"", "application/json", "The body must be a JSON object"),
        (GENERATIONS, b"[]", "application/json", "The body must be a JSON object"),
        (GENERATIONS, b'{"prompt": "a"}', "text/plain", "The body must be a JSON object"),
        (EDITS, b'{"prompt": "a"}', "application/json", "takes a form with files. Say multipart/form-data"),
        (EDITS, b"prompt=a", "application/x-www-form-urlencoded", "takes a form with files. Say multipart"),
        (EDITS, form(prompt="a"), "multipart/form-data", "The form cannot be read: Missing boundary"),
        (EDITS, form(**{f"k{n}": "v" for n in range(99)}), FORM, "The form cannot be read: Too many"),
        ("/v1/nothing", b"", "application/json", "No such address."),
        (EDITS, form(body="a"), FORM, "body: not a field of this call."),
    ],
)
def test_a_body_of_another_kind_says_what_is_taken(ask: Ask, path, body, kind, said):
    assert said in ask(path, body, kind=kind)["message"]


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        (form("image", "mask", prompt="a"), "mask: these models take none. Describe the change", "mask"),
        (form("images", prompt="a"), "images: not a file that is taken; image and image[] are.", "images"),
        (form("prompt", "image"), "prompt: text is needed, not a file.", "prompt"),
        (form(prompt="a", image="data:,"), "image: a file is needed, not text.", "image"),
        (form("image", prompt="a", model="b")[:-7] + form(model="c"), "model: given twice.", "model"),
        (form("mask", heigth="3"), "heigth: not a field of this call.", "prompt"),
        (form("image", prompt="a"), "reference 1: not an image in a known format.", "image"),
    ],
)
def test_what_is_wrong_with_a_form_is_named(ask: Ask, body, said, param):
    error = ask(EDITS, body, kind=FORM)
    assert said in error["message"]
    assert error["param"] == param
    assert ask(EDITS, body, kind=FORM.title().replace("Boundary=X", "boundary=x")) == error


def test_what_stands_in_the_address_is_named(ask: Ask):
    error = ask(f"{JOBS}?limit=0", method="GET")
    assert error["message"] == "limit='0': must be at least 1. Leave it out for the default."
    assert error["param"] == "limit"
    error = ask(f"{JOBS}?limt=3", method="GET")
    assert error["message"] == "limt: not a field of this call. Did you mean 'limit'? Known: limit."


@pytest.mark.parametrize("body", [schema.Generation, schema.Edit, schema.Chat, schema.JobWish])
def test_whatever_a_field_is_given_the_refusal_is_in_our_words(body):
    whole = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    whole = {name: value for name, value in whole.items() if name in body.model_fields}
    told = {
        name: [error for value in WRONG if (error := refusal(body, {**whole, name: value})) is not None]
        for name in body.model_fields
    }
    assert all(told.values())
    for name, errors in told.items():
        for error in errors:
            assert str(error["param"]).split(".")[0] == name
            assert str(error["message"]).startswith(name)
            assert not any(word in error["message"] for word in PYDANTIC), error


def refusal(body: type[BaseModel], values: dict[str, Any]) -> Error | None:
    try:
        body.model_validate(values)
    except ValidationError as found:
        error: Error = refused(problems_of(found.errors(), body)).body["error"]
        return error
    return None


def test_only_what_the_caller_can_change_is_the_callers_fault():
    """A worker that starts its ranks again may find that the weights have gone."""
    found = {type(error): refusal_of(error).body["error"] for error in ERRORS}
    status = {type(error): refusal_of(error).status_code for error in ERRORS}
    assert status == {
        RequestError: 400,
        DoesNotFitError: 400,
        WeightsError: 500,
        RecipeError: 500,
        CancelledError: 409,
        RankError: 503,
        DeviceMemoryError: 503,
    }
    again = {type(error) for error in ERRORS if "X-Should-Retry" not in (refusal_of(error).headers or {})}
    assert again == {RequestError, DoesNotFitError, RankError, DeviceMemoryError}
    assert found[RequestError]["param"] == "n"
    assert found[RequestError]["message"] == "n=0: at least one."
    assert found[DoesNotFitError]["param"] == "size"
    assert found[WeightsError]["type"] == "server_error"
    assert found[RankError]["message"] == "rank 1 of 2 died. Try again."


ERRORS = (
    RequestError("images=0: at least one.", [("images", "images=0: at least one.")]),
    DoesNotFitError("too large"),
    WeightsError("gone"),
    RecipeError("changed"),
    CancelledError("cancelled"),
    RankError("rank 1 of 2 died."),
    DeviceMemoryError("no room"),
)
