"""The recipes for AMD, Intel, Ascend and Moore Threads machines: each fits its machine."""

from functools import partial

import pytest
import recipe_machines
from recipe_machines import machine_of

from portable_dit.models import read_spec
from portable_dit.models.spec import Workload
from portable_dit.plan import default_workload, make_plan
from portable_dit.recipe import load_recipe, named_recipes

BACKEND_OF = {"amd": "rocm", "intel": "xpu", "ascend": "ascend", "mthreads": "musa"}
COUNTS = {
    "mi325x": {1, 2, 4, 8},
    "mi350x": {1, 2, 4, 8},
    "arc-b70": {1, 2, 4},
    "a2": {1, 2, 4},
    "a3": {1, 2, 4},
    "a5": {1, 2, 4},
    "s5000": {2, 4},
}
ALL = [n for n in named_recipes() if n.split("/")[0] in BACKEND_OF]
NAMES = [n for n in ALL if "/h3-image-" in n]
HUNYUAN = [n for n in ALL if "/hunyuan-image-3-" in n]
SPEC = read_spec("h3-image", "random")
HUNYUAN_SPEC = read_spec("hunyuan-image-3", "random")
WORKLOADS = (
    Workload(2048, 2048, 512),
    Workload(4096, 4096, 512),
    Workload(4096, 4096, 512, ((1024, 1024),) * 16),
)

planned = partial(recipe_machines.planned, spec=SPEC)


def test_every_card_of_the_list_has_its_recipes():
    found: dict[str, set[int]] = {}
    for name in NAMES:
        found.setdefault(name.split("/")[1], set()).add(load_recipe(name).device.count)
    assert found == COUNTS


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_its_machine_with_and_without_references(name):
    for workload in WORKLOADS:
        plan = planned(name, workload)
        assert plan.fits, f"{workload}: {plan.verdict}"


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_its_name_and_machine_say_and_claims_no_measurement(name):
    recipe, machine = load_recipe(name), machine_of(name)
    assert recipe.device.backend == machine.device.backend == BACKEND_OF[name.split("/")[0]]
    assert recipe.device.name == machine.device.name
    count, _, form = name.split("/h3-image-")[1].partition("x-bf16")
    assert recipe.device.count == int(count)
    assert recipe.precision == "bfloat16"
    assert recipe.quantization.dit is None
    for part in form.strip("-").split("-"):
        if part:
            axis = part.rstrip("0123456789")
            assert getattr(recipe.layout, axis) == int(part.removeprefix(axis))
    assert recipe.measured == {}
    assert recipe.description


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_captured_that_the_vendor_was_seen_to_fail_at(name):
    plan, vendor = planned(name, WORKLOADS[0]), name.split("/")[0]
    assert not plan.graphs["dit"]
    assert plan.graphs["vae"] == (vendor in ("amd", "mthreads"))
    if vendor == "amd":  # two graphs replayed at once hang, so one process decodes
        assert plan.layout.vae_tiles == 1


def test_four_arc_cards_hold_the_dit_that_fewer_stream():
    four, two, one = (
        planned(f"intel/arc-b70/h3-image-{form}", WORKLOADS[1])
        for form in ("4x-bf16-tensor4", "2x-bf16-tensor2", "1x-bf16")
    )
    assert (four.offload.dit, four.offload.text_encoder) == ("none", "layerwise")
    assert two.offload.dit == one.offload.dit == "layerwise"
    for overrides in ({"offload.dit": "none"}, {"offload.dit": "none", "offload.text_encoder": "component"}):
        assert not planned("intel/arc-b70/h3-image-1x-bf16", WORKLOADS[1], **overrides).fits


@pytest.mark.parametrize("card", ["a2", "a3", "a5"])
def test_fewer_than_four_npus_stream_the_text_encoder_and_four_stream_nothing(card):
    for name in (name for name in NAMES if name.startswith(f"ascend/{card}/")):
        plan = planned(name, WORKLOADS[1])
        streamed = "none" if load_recipe(name).device.count == 4 else "layerwise"
        assert (plan.offload.dit, plan.offload.text_encoder) == ("none", streamed)
    four = [name for name in NAMES if name.startswith(f"ascend/{card}/h3-image-4x")]
    layout = planned(*four, WORKLOADS[1]).layout
    assert (layout.tensor, layout.ulysses) == ((1, 4) if card == "a5" else (4, 1))
    assert layout.text_encoder_tensor == 4


@pytest.mark.parametrize("name", HUNYUAN)
def test_hunyuan_fits_its_machine_and_is_named_for_its_layout(name):
    recipe, machine = load_recipe(name), machine_of(name)
    plan = make_plan(recipe, HUNYUAN_SPEC, machine, None, default_workload(HUNYUAN_SPEC), strict=True)
    assert plan.fits, plan.verdict
    assert recipe.device.name == machine.device.name
    assert plan.layout.world == recipe.device.count == int(name.split("-image-3-")[1].split("x")[0])
    degrees = {"tp": plan.layout.tensor, "cfg": plan.layout.guidance}
    for short, degree in degrees.items():
        assert (f"-{short}{degree}-" in name) == (degree > 1)
    assert recipe.precision == "bfloat16"
    assert recipe.measured == {}


def test_hunyuan_is_planned_wherever_its_160_gb_fit():
    assert {name.split("/")[1] for name in HUNYUAN} == set(COUNTS)
    assert set(ALL) == {*NAMES, *HUNYUAN}
