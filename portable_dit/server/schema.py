"""The bodies of requests, strict: an unknown field or a value of another type is refused, never ignored.

Fields of OpenAI that ask for what these models have not are listed with the one value that asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

MAX_TEXT = 200_000  # characters; a model's own limit, which is far lower, gives the better message

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Word = Annotated[str, Field(max_length=64)]
Count = Annotated[int, Field(ge=1, le=128)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Steps = Annotated[int, Field(ge=1, le=1000)]
Scale = Annotated[float, Field(ge=0, le=100, strict=False)]
Nought = Annotated[float, Field(ge=0, le=0, strict=False)]
Percent = Annotated[int, Field(ge=0, le=100)]


class Body(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Sampling(Body):
    """What decides the picture beside the words; left out, the model's own."""

    model: Annotated[str, Field(max_length=256)] | None = None
    """The served model's name, as /v1/models lists it."""
    n: Count | None = None
    """How many pictures; picture k uses seed + k."""
    size: Word | None = None
    """WIDTHxHEIGHT in pixels, or auto."""
    aspect_ratio: Word | None = None
    """W:H at the model's default area, or at that of `resolution`."""
    resolution: Word | None = None
    """An area by name, such as 1K or 4K, where the model has some."""
    seed: Seed | None = None
    """Left out, one is drawn and told in the answer."""
    num_inference_steps: Steps | None = None
    guidance_scale: Scale | None = None
    use_system_prompt: Word | None = None
    """The name of a system prompt that comes with the checkpoint."""
    system_prompt: Text | None = None
    """A system prompt of one's own, for models that take one."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """Kept with a job; changes nothing."""


class ImageWish(Sampling):
    """What generations, edits and jobs have in common."""

    prompt: Text
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Percent | None = None
    """Quality of JPEG and WebP, 100 is best."""
    response_format: Literal["b64_json", "url"] | None = None
    stream: bool | None = None
    """Server-sent events, with partial images on the way."""
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None
    """How many previews a stream holds for each picture."""
    quality: Literal["auto", "standard"] | None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    """Nothing is moderated here."""

    @field_validator("output_compression")
    @classmethod
    def _compression_has_an_effect(cls, value: int | None, others: ValidationInfo) -> int | None:
        if value is not None and others.data.get("output_format", "wrong") in (None, "png"):
            raise ValueError("PNG is exact and has none. Say output_format jpeg or webp.")
        return value

    @field_validator("partial_images")
    @classmethod
    def _partial_images_have_a_stream(cls, value: int | None, others: ValidationInfo) -> int | None:
        if value and not others.data.get("stream", True):
            raise ValueError("only a stream holds any. Say stream: true.")
        return value


class Generation(ImageWish):
    """POST /v1/images/generations."""


class Edit(ImageWish):
    """The fields of POST /v1/images/edits beside its files, which are named image or image[]."""


class JobWish(Sampling):
    """POST /v1/jobs. images: references, as data URLs, or as addresses where the server may fetch them."""

    prompt: Text
    images: Annotated[list[str], Field(max_length=128)] = []
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Percent | None = None
    previews: bool = False
    """Whether events carry a preview after each step, which costs a small decode each."""


class LatestJobs(Body):
    """What may stand in the address of GET /v1/jobs."""

    limit: Annotated[int, Field(ge=1, le=200, strict=False)] = 50


class ImageUrl(Body):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class Part(Body):
    """A part of a message: text, or a reference picture."""

    type: Literal["text", "image_url"]
    text: Text | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> Part:
        if (self.type == "text") != (self.text is not None) or (self.type == "image_url") != (
            self.image_url is not None
        ):
            raise ValueError(f"a part of type {self.type} holds {self.type} and nothing else.")
        return self


class ChatMessage(Body):
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Annotated[list[Part], Field(max_length=256)] | list[dict[str, Any]] | None
    name: Word | None = None


class ChatExtra(Sampling):
    """Fields beside the messages, at the top or inside extra_body. height and width go together."""

    height: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    width: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    num_outputs_per_prompt: Count | None = None
    """The same as n."""
    output_format: Literal["png", "jpeg", "webp"] | None = None


class AnswerText(Body):
    """The form of a language model's answer that asks for nothing."""

    type: Literal["text"]


class StreamOptions(Body):
    include_usage: bool | None = None
    """Whether a stream ends with a chunk of `usage`, in which nothing is counted."""
    include_obfuscation: bool | None = None


class OfLanguage(Body):
    """What programs for chats send out of habit, as far as it asks for nothing that a picture could have."""

    frequency_penalty: Nought | None = None
    presence_penalty: Nought | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    logprobs: Literal[False] | None = None
    stop: Annotated[list[str], Field(max_length=0)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: AnswerText | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None


class Chat(ChatExtra, OfLanguage):
    """POST /v1/chat/completions: the last message, from the user, is drawn."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000)]
    extra_body: ChatExtra | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    """Of a language model; noted and without effect, like top_p and max_tokens."""
    top_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    @field_validator("stream_options")
    @classmethod
    def _options_have_a_stream(cls, value: StreamOptions | None, others: ValidationInfo) -> Any:
        if value is not None and not others.data.get("stream", True):
            raise ValueError("only a stream has any. Say stream: true.")
        return value
