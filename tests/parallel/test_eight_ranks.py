"""Eight ranks, each run by itself in this process: what they hold, what they give, what they would send.

torch's "fake" process group takes what a rank gives to the others and gives nothing back. So the numbers mean
nothing, and every layout of eight devices is tried in the time of a few pictures; that the numbers are right
is shown with up to four real processes in test_every_layout.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from many_layouts import TEXT_LAYERS, Traffic, shrink_references
from torch.testing._internal.distributed.fake_pg import FakeStore

from portable_dit import Request
from portable_dit.catalog import read_spec
from portable_dit.layout import Layout, layout_problems
from portable_dit.loading import load_model
from portable_dit.models.h3_image import qwen_config
from portable_dit.models.h3_image import random_checkpoint as h3_image
from portable_dit.models.h3_image.qwen_config import TINY_QWEN
from portable_dit.models.hunyuan_image_3 import random_checkpoint as hunyuan
from portable_dit.models.spec import Numbers, Workload
from portable_dit.parallel import mesh
from portable_dit.parallel.collectives import Pulse
from portable_dit.recipe import make_recipe
from portable_dit.sampling import predict, run_each
from portable_dit.setup import set_up
from portable_dit.traffic import KINDS, bytes_sent_in_a_step

WORLD = 8
PICTURE = np.zeros((80, 96, 3), dtype=np.uint8)
REQUESTS = {
    "h3-mini": Request("make it a red apple", references=(PICTURE,), size=(256, 256)),
    "h3-image": Request("put an apple on a table!!!!", references=(PICTURE, PICTURE), size=(192, 128)),
    "hunyuan-image-3": Request("a red apple", steps=2, guidance_scale=4.0),
}
IN_8_BITS = (("h3-image", "fp8_row"), ("hunyuan-image-3", "fp8_row"), ("hunyuan-image-3", "fp8_tensor"))
# Eight heads, so that each of eight ranks can have one.
H3_IMAGE = replace(
    h3_image.TINY,
    dit=replace(h3_image.TINY.dit, num_layers=2, token_refiner_num_layers=1, num_attention_heads=8),
    vae=replace(h3_image.TINY.vae, decoder_num_layers=1),
    text=replace(TINY_QWEN, num_layers=TEXT_LAYERS + 1),
)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, str]]]:
    """Keys of each model's recipe: the weights that ship, and random ones in the layout of large models."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen_config, "STATE", TEXT_LAYERS)  # 50 layers say no more about shapes
        patch.setitem(h3_image.CONFIGS, "tiny", H3_IMAGE)
        h3_image.write_random(folder / "h3", config="tiny", dialect="original", seed=0)
        shrink_references(folder / "h3")
        hunyuan.write_random(folder / "hunyuan", config="tiny", dialect="base", seed=0)
        weights = {"h3-mini": "builtin", "h3-image": folder / "h3", "hunyuan-image-3": folder / "hunyuan"}
        yield {name: {"model": name, "weights": str(place)} for name, place in weights.items()}


def layouts_of(keys: dict[str, str]) -> list[Layout]:
    """Every layout of eight devices that the model has, with experts dealt out as far as possible or not."""
    spec, degrees = read_spec(make_recipe({}, keys)), (1, 2, 4, 8)
    found = [
        Layout(tensor=t, ulysses=u, ring=r, guidance=g, expert=e)
        for t, u, r, g in product(degrees, repeat=4)
        for e in {1, t}
        if t * u * r * g == WORLD
    ]
    return [layout for layout in found if not layout_problems(layout, spec, devices=None)]


@dataclass(frozen=True)
class Seen:
    """What one rank did: the velocity's shape, bytes it would send in a step, weights that it read, rows."""

    shape: tuple[int, ...]
    sent: dict[str, int]
    bytes_read: int
    rows: int


@torch.inference_mode()
def run_rank(keys: dict[str, object], rank: int) -> Seen:
    """Loads a rank's part and evaluates two steps; what is sent in the second is counted."""
    setup = set_up(make_recipe({}, keys), rank=rank)
    request = setup.resolve(REQUESTS[str(keys["model"])])
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        loaded = load_model(setup, mesh=mesh.make_mesh(setup.plan.layout, rank, Pulse()))
        model, scale = loaded.model, request.guidance_scale
        pictures = [reference.pixels for reference in request.references]
        size, schedule = (request.width, request.height), model.schedule(request.steps)
        count = model.spec.branches(scale)
        prompt = model.encode_prompt(request.prompt, pictures, None)
        denoiser = model.prepare(
            prompt, pictures, *size, schedule, 0, guidance=scale, branches=loaded.branches(count)
        )
        latents = model.noise(*size, pictures, 0)
        run = partial(run_each, run=loaded.runner(denoiser))
        predict([denoiser], [latents], 0, run)
        traffic = Traffic()
        off = traffic.watch()
        try:
            velocity = predict([denoiser], [latents], 1, run)[0]
            if scale is not None:
                velocity = loaded.combiner(count, scale, 0.0)(velocity)
        finally:
            off()
        rows = int(denoiser.embed(latents, 0)[0].shape[1])
        assert velocity.shape == latents.shape
        return Seen(tuple(velocity.shape), dict(traffic.sent), loaded.bytes_read, rows)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def all_groups_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the ranks' group for words on the host, which is gloo's elsewhere."""
    plain = dist.new_group
    monkeypatch.setattr(
        mesh.dist, "new_group", lambda ranks, timeout=None, backend=None: plain(ranks, timeout=timeout)
    )


@pytest.mark.usefixtures("all_groups_fake")
@pytest.mark.parametrize(("model", "format"), [*((model, None) for model in REQUESTS), *IN_8_BITS])
def test_each_rank_of_every_layout_of_eight_has_the_shapes_and_sends_what_the_plan_says(
    model, format, recipes
):
    """In 8 bits with those that ranks agree on: fp8_tensor has them ask both of columns and of rows."""
    layouts = layouts_of(recipes[model])
    assert len(layouts) >= 2
    for number, layout in enumerate(layouts):
        degrees = {f"layout.{axis}": degree for axis, degree in vars(layout).items() if degree > 1}
        keys = {**recipes[model], "device.backend": "cpu", "precision": "float32", **degrees}
        keys |= {"quantization.dit": format} if format else {}
        first, other = run_rank(keys, 0), run_rank(keys, 1 + number % (WORLD - 1))
        assert first.shape == other.shape, layout
        assert first.bytes_read == other.bytes_read, layout
        said = planned(keys, first.rows)
        assert first.sent == said, layout  # the first has the longest part
        assert other.sent.keys() == said.keys(), layout
        assert all(size <= said[kind] for kind, size in other.sent.items() if kind != "send"), layout


def planned(keys: dict[str, object], rows: int) -> dict[str, int]:
    """What the plan says that the first rank sends. rows: of one branch."""
    setup = set_up(make_recipe({}, keys))
    request = setup.resolve(REQUESTS[str(keys["model"])])
    sizes = tuple(reference.size for reference in request.references)
    work = Workload(request.width, request.height, 0, sizes)
    rest = setup.spec.rows(work) // setup.spec.guidance_branches
    branches = setup.spec.branches(request.guidance_scale)
    work = replace(work, prompt_tokens=max(rows - rest, 0))
    format = setup.plan.formats["dit"]
    held, kinds = Numbers("float32", format, setup.plan.keep), KINDS if format else ()
    layout = setup.plan.layout
    return dict(bytes_sent_in_a_step(setup.spec, work, layout, held, branches=branches, quantizing=kinds))
