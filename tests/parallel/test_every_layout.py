"""Every layout draws the picture of one process: h3-mini, H3-Image with references, HunyuanImage-3.

float32 pictures of Ulysses, VAE tiles and text encoders without a sum are the same to the bit. Where a sum is
taken in another order (tensor, experts, ring, a batch of two branches), pixels are off by one level at most
in float32. In bfloat16 and with 8-bit weights the bound is twice what the format itself changes.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from apart_device import PLUGIN
from many_layouts import TEXT_LAYERS, Answer, Job, probe, probe_input, shrink_references

from portable_dit import Engine, Request
from portable_dit.catalog import read_spec
from portable_dit.formats import dequantize_blocks, format_named, quantize_blocks
from portable_dit.layout import Layout, layout_problems
from portable_dit.models.h3_image import qwen_config
from portable_dit.models.h3_image import random_checkpoint as h3_image
from portable_dit.models.h3_image.qwen_config import TINY_QWEN
from portable_dit.models.hunyuan_image_3 import random_checkpoint as hunyuan
from portable_dit.models.spec import ModelSpec, Numbers, Workload
from portable_dit.recipe import make_recipe
from portable_dit.setup import set_up
from portable_dit.traffic import KINDS, bytes_sent_in_a_step

HERE = Path(__file__).parent
TIMEOUT = 400
RNG = np.random.default_rng(0)
PICTURES = tuple(RNG.integers(0, 256, (80 + 16 * n, 96, 3), dtype=np.uint8) for n in range(2))
# Words that make the rows uneven: 17, 101 and 257 are divided by none of the degrees.
REQUESTS = {
    "h3-mini": Request("make it a red apple", references=PICTURES[:1], size=(96, 64), seed=3),
    "h3-image": Request("put an apple on a table!!!!", references=PICTURES, size=(192, 128), seed=4),
    "hunyuan-image-3": Request("a red apple", steps=2, guidance_scale=4.0, seed=5),
}
NUMBERS = {
    "float32": {"precision": "float32"},
    "bfloat16": {"precision": "bfloat16"},
    "fp8": {"precision": "float32", "quantization.dit": "fp8_row"},
}
OFFLOAD = {"resident": {}, "layerwise": {"offload.dit": "layerwise"}}
# What each layout is tried with; of other formats, and blocks that rest elsewhere, two processes tell enough.
TRIED = (("float32", "resident"), ("fp8", "resident"))
TRIED_BY_TWO = (*TRIED, ("bfloat16", "resident"), ("float32", "layerwise"), ("fp8", "layerwise"))
BYTES_STORED = 2  # of a weight in the checkpoints of both large models
BIT_FOR_BIT = {"ulysses", "vae_tiles", "data"}  # axes that change no sum
CONVOLVES = "hunyuan-image-3"  # convolutions of few tiles are not those of many to the last bit
# With few steps and layers, and a text encoder whose heads can be divided.
H3_IMAGE = replace(
    h3_image.TINY,
    dit=replace(h3_image.TINY.dit, num_layers=3, token_refiner_num_layers=1, pdd_heads=2),
    vae=replace(h3_image.TINY.vae, decoder_num_layers=2),
    text=replace(TINY_QWEN, num_layers=TEXT_LAYERS + 1, num_attention_heads=4, num_key_value_heads=2),
    scheduler=replace(h3_image.TINY.scheduler, num_inference_steps=2),
)
# As many rows as the tiny one has, of half the pixels along each side.
HUNYUAN = replace(
    hunyuan.TINY,
    dit=replace(hunyuan.TINY.dit, image_base_size=128),
    vae=replace(hunyuan.TINY.vae, block_out_channels=(4, 8, 16, 16), ffactor_spatial=8),
)
LAYOUTS = {
    2: (
        {"ulysses": 2},
        {"ulysses": 2, "vae_tiles": 2},
        {"tensor": 2},
        {"tensor": 2, "text_encoder_tensor": 2, "vae_tiles": 2},
        {"ring": 2},
        {"guidance": 2},
        {"tensor": 2, "expert": 2},
    ),
    3: ({"ring": 3, "vae_tiles": 3},),
    4: (
        {"ulysses": 4, "vae_tiles": 4},
        {"tensor": 4, "text_encoder_tensor": 2},
        {"tensor": 2, "ulysses": 2},
        {"ring": 2, "ulysses": 2},
        {"tensor": 2, "ring": 2, "vae_tiles": 2},
        {"guidance": 2, "ulysses": 2},
        {"guidance": 2, "tensor": 2, "expert": 2},
        {"tensor": 4, "expert": 2},
    ),
}


def label(layout: dict[str, int]) -> str:
    return "-".join(f"{axis}{degree}" for axis, degree in layout.items())


@pytest.fixture(scope="module", autouse=True)
def short_text_encoder():
    """H3-Image takes the state behind layer 50 of its text encoder. Here and in the ranks: behind layer 4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen_config, "STATE", TEXT_LAYERS)
        yield


@pytest.fixture(scope="module")
def recipes(tmp_path_factory, tiny_checkpoint):
    """Keys of each model's recipe."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(h3_image.CONFIGS, "tiny", H3_IMAGE)
        h3_image.write_random(folder / "h3", config="tiny", dialect="original", seed=0)
        patch.setitem(hunyuan.CONFIGS, "tiny", (HUNYUAN, hunyuan.TINY_TOWER))
        hunyuan.write_random(folder / "hunyuan", config="tiny", dialect="base", seed=0)
    shrink_references(folder / "h3")
    weights = {"h3-mini": tiny_checkpoint, "h3-image": folder / "h3", "hunyuan-image-3": folder / "hunyuan"}
    keys = {name: {"model": name, "weights": str(place)} for name, place in weights.items()}
    keys["hunyuan-image-3"]["vae_tiling"] = True  # whole, it is one tile
    return keys


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """A device with memory of its own, installed where other processes find it too."""
    from plugin_shelf import Shelf

    folder = tmp_path_factory.mktemp("shelf")
    Shelf(folder, name="matrix").install("apart", PLUGIN.format(arguments=""))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield {"device.backend": "apart"}


@pytest.fixture(scope="module")
def alone(recipes, device):
    """The picture of one process: alone(model, numbers). bytes_read: by model, what loading it reads.

    probed: by model, what its 8-bit layers give, and how far other orders of the same sums may be from it.
    """

    class Alone:
        def __init__(self):
            self.bytes_read: dict[str, int] = {}
            self.known: dict[tuple[str, str], np.ndarray] = {}
            self.probed: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}

        def __call__(self, model: str, numbers: str) -> np.ndarray:
            if (model, numbers) not in self.known:
                recipe = make_recipe({}, {**recipes[model], **device, **NUMBERS[numbers]})
                with Engine.load(recipe) as engine:
                    self.bytes_read[model] = engine.workers.loaded.bytes_read
                    self.known[model, numbers] = engine.generate(REQUESTS[model]).images[0].pixels
                    if numbers == "fp8":
                        self.probed[model] = probe_alone(engine)
            return self.known[model, numbers]

    return Alone()


def probe_alone(engine: Engine) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What layers give, and a bound of the order of their sums, [M, N] each.

    A sum of K products in float32 is off by K units of the sum of their magnitudes in any order (Higham,
    Accuracy and Stability of Numerical Algorithms, 3.1), so two orders differ by twice that at most.
    """
    model, form = engine.workers.loaded.model, format_named("fp8_row")
    dit, found = model.component("dit"), {}
    for name, out in probe(dit, model.spec.tensor_plan).items():
        layer = dit.get_submodule(name)
        x = probe_input(name, layer.in_features)
        seen = dequantize_blocks(*quantize_blocks(x, form, (1, 0)), form, (1, 0)).abs()
        values, scales = layer.packed_values.float(), layer.packed_scales
        weights = (values * scales).abs().view(-1, *values.shape[-2:])  # [experts or 1, N, K]
        parts = zip(seen.chunk(len(weights)), weights, strict=True)
        magnitude = torch.cat([rows @ weight.T for rows, weight in parts])
        found[name] = out, 2 * layer.in_features * 2.0**-24 * magnitude
    return found


def distinct_layouts(model: str, world: int, spec: ModelSpec) -> list[dict[str, int]]:
    """Those that the model has; what another one has too is tried with that, where bits say as much."""
    legal = [one for one in LAYOUTS[world] if not layout_problems(Layout(**one), spec, devices=None)]
    if model == CONVOLVES:
        return legal
    return [one for one in legal if not any(one.items() < other.items() for other in legal)]


def jobs_for(world: int, recipes, device) -> list[Job]:
    """Every layout that each model has for so many processes, with the formats and the places of weights."""
    jobs = []
    for model, keys in recipes.items():
        for layout in distinct_layouts(model, world, read_spec(make_recipe({}, keys))):
            degrees = {f"layout.{axis}": degree for axis, degree in layout.items()}
            for numbers, offload in TRIED_BY_TWO if world == 2 else TRIED:
                wish = {**keys, **device, **degrees, **NUMBERS[numbers], **OFFLOAD[offload]}
                name = f"{model}|{label(layout)}|{numbers}|{offload}"
                trace = offload == "resident" and numbers != "bfloat16"
                probe = trace and numbers == "fp8" and "tensor" in layout
                jobs.append(Job(name, wish, REQUESTS[model], trace=trace, probe=probe))
    return jobs


MUTATIONS = (
    ("drop_the_tail", "h3-image", {"ulysses": 2}),
    ("drop_the_tail", "h3-image", {"ring": 2}),
    ("shared_as_split", "hunyuan-image-3", {"ulysses": 2}),
    ("sum_not_taken", "h3-image", {"tensor": 2}),
    ("sum_not_taken", "hunyuan-image-3", {"tensor": 2, "expert": 2}),
    ("sum_not_taken", "h3-image", {"tensor": 2, "text_encoder_tensor": 2}),
    ("ring_forgets_a_turn", "h3-image", {"ring": 2}),
    ("wrong_branch", "hunyuan-image-3", {"guidance": 2}),
)
# Seen by what layers give, since a picture moves less by it than by the format.
SCALES_APART = ("h3-image", "hunyuan-image-3")


def faults_for(recipes, device) -> list[Job]:
    """Pictures of two processes with a fault in each."""
    jobs = []
    for number, (mutation, model, layout) in enumerate(MUTATIONS):
        degrees = {f"layout.{axis}": degree for axis, degree in layout.items()}
        wish = {**recipes[model], **device, **degrees, **NUMBERS["float32"]}
        jobs.append(Job(f"{number} {mutation} {model}", wish, REQUESTS[model], mutation=mutation))
    for model in SCALES_APART:
        wish = {**recipes[model], **device, "layout.tensor": 2, **NUMBERS["fp8"]}
        fault = "scales_not_agreed"
        jobs.append(Job(f"{fault} {model}", wish, REQUESTS[model], mutation=fault, probe=True))
    return jobs


def run_ranks(world: int, jobs: list[Job], folder: Path) -> dict[str, Answer]:
    """What processes of one start draw with all jobs. Each layout uses all of them."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    file = folder / "jobs"
    file.write_bytes(pickle.dumps(jobs))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, str(HERE / "many_layouts.py"), str(file), str(world), str(store.port)]
    ranks = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        start_new_session=True,
    )
    try:
        said = ranks.communicate(timeout=TIMEOUT)[0]
    except subprocess.TimeoutExpired:
        os.killpg(ranks.pid, signal.SIGKILL)
        raise
    assert ranks.returncode == 0, said[-6000:]
    answers: dict[str, Answer] = pickle.loads(file.with_suffix(".answers").read_bytes())
    return answers


@pytest.fixture(scope="module", params=sorted(LAYOUTS), ids=lambda world: f"{world}-processes")
def drawn(request, recipes, device, tmp_path_factory):
    """(jobs, answers) of one number of processes; with two, answers to the planted faults too."""
    jobs = jobs_for(request.param, recipes, device)
    faults = faults_for(recipes, device) if request.param == 2 else []
    return jobs, run_ranks(request.param, [*jobs, *faults], tmp_path_factory.mktemp("ranks"))


def off(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return np.abs(ours.astype(int) - theirs)


def test_every_layout_draws_the_picture_of_one_process(drawn, alone):
    jobs, answers = drawn
    problems = []
    for job in jobs:
        model, layout, numbers, _ = job.name.split("|")
        picture, one, exact = answers[job.name].pixels, alone(model, numbers), alone(model, "float32")
        apart = off(picture, one)
        axes = {axis.rstrip("0123456789") for axis in layout.split("-")}
        if axes <= (BIT_FOR_BIT - {"vae_tiles"} if model == CONVOLVES else BIT_FOR_BIT):
            right = not apart.any()
        elif numbers == "float32":
            right = apart.max() <= 1
        else:
            right = apart.mean() <= 2 * off(one, exact).mean()
        if not right:
            own = off(one, exact).mean()
            problems.append(
                f"{job.name}: off by {apart.max()}, mean {apart.mean():.4f}, the format {own:.4f}"
            )
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("drawn", [2], indirect=True, ids=["2-processes"])
def test_where_weights_rest_changes_nothing(drawn):
    jobs, answers = drawn
    streamed = [job for job in jobs if job.name.endswith("|layerwise")]
    assert streamed
    for job in streamed:
        resident = answers[job.name.replace("|layerwise", "|resident")]
        assert np.array_equal(answers[job.name].pixels, resident.pixels), job.name


def test_a_rank_reads_its_share_of_the_weights_and_no_more(drawn, recipes, alone):
    jobs, answers = drawn
    for job in jobs:
        model, layout, numbers, _ = job.name.split("|")
        degrees = Layout(**{axis: int(n) for axis, n in re.findall(r"([a-z_]+)(\d+)", layout)})
        read = answers[job.name].bytes_read
        assert len(set(read)) == 1, job.name  # nobody reads for the others
        if numbers == "float32" and model != "h3-mini":
            spec = read_spec(make_recipe({}, recipes[model]))
            saved = 0
            for group in spec.linears:
                if (group.component, group.pattern) in {(s.component, s.pattern) for s in spec.tensor_plan}:
                    degree = {"dit": degrees.tensor, "text_encoder": degrees.text_encoder_tensor}
                    size = group.count * (group.experts or 1) * group.in_features * group.out_features
                    saved += BYTES_STORED * (size - size // degree[group.component])
            assert read[0] == alone.bytes_read[model] - saved, job.name


def test_the_plan_says_what_each_rank_sends_in_a_step(drawn):
    jobs, answers = drawn
    traced = [job for job in jobs if job.trace]
    assert traced
    for job in traced:
        setup, answer = set_up(make_recipe({}, job.keys)), answers[job.name]
        assert answer.rows % setup.plan.layout.world, "the rows were meant to be uneven"
        request = setup.resolve(job.request)
        sizes = tuple(reference.size for reference in request.references)
        words = Workload(request.width, request.height, 0, sizes)
        rest = setup.spec.rows(words) // setup.spec.guidance_branches
        format = setup.plan.formats["dit"]
        said = bytes_sent_in_a_step(
            setup.spec,
            replace(words, prompt_tokens=max(answer.rows - rest, 0)),
            setup.plan.layout,
            Numbers("float32", format, setup.plan.keep),
            branches=setup.spec.branches(request.guidance_scale),
            quantizing=KINDS if format else (),
        )
        assert answer.sent[0] == said, job.name


def test_layers_that_quantise_their_input_differ_from_one_process_in_the_order_of_sums_alone(drawn, alone):
    jobs, answers = drawn
    probed = [job for job in jobs if job.probe]
    assert probed or not any("tensor" in job.name for job in jobs), "three processes split no layer"
    for job in probed:
        model = job.name.split("|")[0]
        assert not too_far(answers[job.name], model, alone), job.name


def too_far(answer: Answer, model: str, alone) -> list[str]:
    """Layers whose results are further from one process's than another order of the sums explains."""
    alone(model, "fp8")
    assert len(alone.probed[model]) >= 2
    return [
        name
        for name, (wanted, bound) in alone.probed[model].items()
        if not bool(((answer.probed[name] - wanted).abs() <= bound).all())
    ]


@pytest.mark.parametrize("drawn", [2], indirect=True, ids=["2-processes"])
def test_scales_that_ranks_do_not_agree_on_are_seen(drawn, alone):
    _, answers = drawn
    for model in SCALES_APART:
        answer = answers[f"scales_not_agreed {model}"]
        assert too_far(answer, model, alone) == list(answer.probed), answer.problem


@pytest.mark.parametrize("drawn", [2], indirect=True, ids=["2-processes"])
def test_each_planted_fault_is_seen(drawn, alone):
    """What the first test would miss if it could not fail."""
    _, answers = drawn
    for number, (mutation, model, _) in enumerate(MUTATIONS):
        answer = answers[f"{number} {mutation} {model}"]
        assert answer.problem or off(answer.pixels, alone(model, "float32")).max() > 1, mutation
