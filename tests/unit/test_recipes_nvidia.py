"""The recipes of H3-Image for NVIDIA machines: each fits its machine, and its bytes add up."""

from functools import partial

import pytest
import recipe_machines
from recipe_machines import machine_of

from portable_dit.footprint import STAGING_BLOCKS
from portable_dit.models import read_spec
from portable_dit.models.spec import COMPONENTS, Workload
from portable_dit.recipe import load_recipe, named_recipes

NAMES = [name for name in named_recipes() if name.startswith("nvidia/") and "/h3-image-" in name]
SPEC = read_spec("h3-image", "random")
WORKLOADS = (
    Workload(2048, 2048, 512),
    Workload(4096, 4096, 512),
    Workload(6272, 2688, 512),
    Workload(4096, 4096, 512, ((1024, 1024),)),
    Workload(4096, 4096, 512, ((1024, 1024),) * 16),
)

planned = partial(recipe_machines.planned, spec=SPEC)


def test_every_card_of_the_list_has_its_recipes():
    cards = {name.split("/")[1] for name in NAMES}
    cards_of_one = {"rtx4090", "rtx5080", "rtx5090", "rtx6000d", "rtxpro6000"}
    assert cards == cards_of_one | {"a100", "h100", "h200", "b200", "gb200", "gb300", "rubin"}
    assert len(NAMES) == 37
    assert {f"nvidia/{card}/h3-image-1x-{form}" for card in cards_of_one for form in ("bf16", "fp8")} <= set(
        NAMES
    )


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_its_machine_with_and_without_references(name):
    for workload in WORKLOADS:
        plan = planned(name, workload)
        assert plan.fits, f"{workload}: {plan.verdict}"


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is_for_and_has_as_many_devices_as_its_name_says(name):
    recipe = load_recipe(name)
    assert recipe.description
    assert recipe.device.count == int(name.split("-image-")[1][0])


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_every_stage_add_up(name):
    plan = planned(name, WORKLOADS[3])
    sizes, machine = plan.bytes, machine_of(name)
    for stage in COMPONENTS:
        rests = 0
        for component, size in sizes.components.items():
            assert size.weights - size.block * size.num_blocks >= 0
            match plan.offload.of(component):
                case "none":
                    rests += size.weights
                case "component":
                    rests += size.weights if component == stage else 0
                case _:
                    here = STAGING_BLOCKS if component == stage else 0
                    here += plan.offload.resident_blocks if component == "dit" else 0
                    rests += size.weights - size.block * (size.num_blocks - here)
        assert sizes.stages[stage] == machine.runtime_bytes + rests + sizes.components[stage].activations


def test_splits_divide_what_they_split_and_nothing_else():
    one, four = "nvidia/b200/h3-image-4x-mxfp8-4replicas", "nvidia/b200/h3-image-4x-mxfp8-ulysses4"
    replica, ulysses = (planned(name, WORKLOADS[1]).bytes for name in (one, four))
    assert replica.components["dit"].weights == ulysses.components["dit"].weights
    rows = -(-SPEC.rows(WORKLOADS[1]) // 4)
    exchanged = 4 * rows * 7168 * 2
    assert ulysses.components["dit"].activations == -(-replica.components["dit"].activations // 4) + exchanged
    assert replica.components["vae"] == ulysses.components["vae"]
    whole = planned("nvidia/h200/h3-image-1x-fp8", WORKLOADS[1]).bytes.components["text_encoder"]
    quarter = planned("nvidia/h100/h3-image-4x-fp8", WORKLOADS[1]).bytes.components["text_encoder"]
    assert whole.block == 4 * quarter.block
    assert whole.weights - quarter.weights == 50 * 3 * quarter.block


def test_tensor_parallel_divides_the_blocks_of_the_dit():
    name = "nvidia/h100/h3-image-4x-fp8"
    layout = {"layout.ulysses": 1, "layout.tensor": 4}
    split = planned(name, WORKLOADS[1], **layout).bytes.components["dit"]
    whole = planned(name, WORKLOADS[1]).bytes.components["dit"]
    assert split.block == -(-whole.block // 4)
    assert whole.weights - split.weights == 50 * (whole.block - split.block)


def test_each_process_of_a_layout_has_host_memory_of_its_own():
    four = planned("nvidia/a100/h3-image-4x-bf16", WORKLOADS[1]).bytes
    quarter = four.components["text_encoder"].weights
    assert four.pinned == 4 * quarter


def test_a_reference_costs_rows_twice_and_memory():
    plain, edit = (SPEC.rows(workload) for workload in (WORKLOADS[1], WORKLOADS[3]))
    label = 9
    assert edit - plain == 2 * 1024 + label
    name = "nvidia/h200/h3-image-1x-bf16"
    stages = [planned(name, workload).bytes.stages for workload in (WORKLOADS[1], *WORKLOADS[3:])]
    for stage in ("text_encoder", "dit"):
        assert stages[0][stage] < stages[1][stage] < stages[2][stage]
