"""Bytes: the published counts of H3-Image, the modules' own counts, and which machines a model fits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mini_configs import MINI

from portable_dit.capabilities import KernelLists
from portable_dit.footprint import USABLE_SHARE
from portable_dit.formats import FORMATS, QUANTIZED
from portable_dit.machine_file import load_machine
from portable_dit.models import read_spec
from portable_dit.models.h3_image import counts
from portable_dit.models.h3_image.config import DiTConfig, VAEConfig
from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.models.h3_image.spec import make_spec
from portable_dit.models.h3_image.text import MiniTextEncoder
from portable_dit.models.h3_image.vae import ImageVAE
from portable_dit.models.spec import FORMAT_SCALES, Numbers, Workload, linear_bytes, matches
from portable_dit.plan import make_plan
from portable_dit.recipe import FORMATS as RECIPE_FORMATS
from portable_dit.recipe import make_recipe
from portable_dit.request import Request
from portable_dit.setup import resolve_request, set_up
from portable_dit.yaml_lines import parse_value

MACHINES = Path(__file__).parents[1] / "data" / "machines"
MINI_SPEC = make_spec("h3-mini", MINI)
FULL_SPEC = read_spec("h3-image", "random")
FULL_TEXT = FULL_SPEC.config.text
GIB = 2**30


def planned(values=None, *, on="h200", spec=FULL_SPEC, workload=None):
    recipe = make_recipe({"model": spec.id, **(values or {})})
    return make_plan(recipe, spec, load_machine(MACHINES / f"{on}.json"), None, workload)


def size_of(module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def test_the_published_counts_come_out():
    dit = counts.dit_counts(DiTConfig())
    assert 50 * dit.block + dit.refiner + dit.other + dit.modulation == 33_105_770_752
    assert dit.modulation - (2 * 5376) * (2688 + 1) == 13_010_457_600
    assert dit.float32 == 16_356_480
    assert dit.heads == 7 * 516_192
    stored = 2 * 33_105_770_752 + 4 * (dit.float32 + dit.heads + 16)  # and 16 rope frequencies in the file
    assert stored == 66_291_420_800 + 4 * 16
    assert sum(counts.vae_parameters(VAEConfig(), taps=3)) == 584_228_408
    assert counts.text_counts(FULL_TEXT).checkpoint == 33_357_390_064


def test_the_tables_of_one_time_are_9_25_mib():
    assert round(2 * counts.table_values(DiTConfig(), 1) / 2**20, 2) == 9.25


def test_rows_are_one_for_each_32_pixels_squared():
    for size, rows in (
        ((1024, 1024), 1024),
        ((2048, 2048), 4096),
        ((4096, 4096), 16384),
        ((6272, 2688), 16464),
    ):
        assert FULL_SPEC.rows(Workload(*size, 100)) == 100 + rows
    # A reference costs rows twice where the text encoder sees it, once where it does not.
    edit = Workload(2048, 2048, 100, ((2048, 2048),))
    assert FULL_SPEC.rows(edit) == 100 + counts_label() + 3 * 4096
    assert MINI_SPEC.rows(Workload(512, 512, 32, ((512, 512), (256, 256)))) == 32 + 256 + 256 + 64


def counts_label() -> int:
    from portable_dit.models.h3_image.spec import LABEL_ROWS

    return LABEL_ROWS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["mlp", "curve"])
def test_the_dit_has_the_bytes_that_the_spec_counts(dtype, form):
    config = replace(MINI, dit=replace(MINI.dit, adaln_form=form))
    with torch.device("meta"):
        module = H3Transformer(config.dit, dtype)
    name = str(dtype).removeprefix("torch.")
    size = make_spec("x", config).bytes_on_device("dit", Workload(512, 512, 32), Numbers(name))
    assert size.weights + size.loading == size_of(module) + size.parts["modulation tables"]
    module.drop_adaln()
    assert size.weights == size_of(module) + size.parts["modulation tables"]
    assert size.num_blocks * size.block == size.parts["blocks"] == size_of(module.blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vae_and_the_text_encoder_have_the_bytes_that_the_spec_counts(dtype):
    name = str(dtype).removeprefix("torch.")
    with torch.device("meta"):
        vae, text = ImageVAE(MINI.vae, dtype), MiniTextEncoder(MINI.text, dtype)
    workload = Workload(512, 512, 32)
    biases = sum(p.numel() for n, p in vae.named_parameters() if p.dtype == dtype and n.endswith("bias"))
    counted = MINI_SPEC.bytes_on_device("vae", workload, Numbers(name)).weights
    slack = 0 if dtype == torch.float32 else 2 * biases  # biases of the linears are counted in float32
    assert 0 <= counted - size_of(vae) <= slack
    assert MINI_SPEC.bytes_on_device("text_encoder", workload, Numbers(name)).weights == size_of(text)


def test_every_linear_group_names_layers_of_the_modules():
    with torch.device("meta"):
        modules = {
            "dit": H3Transformer(MINI.dit),
            "vae": ImageVAE(MINI.vae),
            "text_encoder": MiniTextEncoder(MINI.text),
        }
    for group in MINI_SPEC.linears:
        for name in group.names():
            layer = modules[group.component].get_submodule(name)
            assert (layer.in_features, layer.out_features) == (group.in_features, group.out_features), name


def test_formats_have_the_same_names_and_bytes_everywhere():
    assert set(RECIPE_FORMATS) == set(FORMAT_SCALES) == set(QUANTIZED)
    for name in QUANTIZED:
        for shape in ((1536, 384), (384, 1000), (129, 257)):
            assert linear_bytes(name, *shape) == FORMATS[name].bytes(*shape), (name, shape)


def test_a_format_saves_what_it_says():
    workload = Workload(2048, 2048, 512)
    plain = FULL_SPEC.bytes_on_device("dit", workload, Numbers("bfloat16"))
    kept = FULL_SPEC.bytes_on_device("dit", workload, Numbers("bfloat16", "fp8_row", FULL_SPEC.keep))
    whole = FULL_SPEC.bytes_on_device("dit", workload, Numbers("bfloat16", "fp8_row"))
    block_linears = 385_351_680
    scales = 4 * (21504 + 5376 + 28672 + 5376)
    assert plain.weights - kept.weights == 50 * (block_linears - scales)
    assert whole.weights < kept.weights


def test_one_h200_holds_everything_and_smaller_cards_are_told_what_to_offload():
    assert planned().fits  # the published set-up: bfloat16, all weights resident
    small = planned(on="rtx-5090")
    assert not small.fits
    assert (
        "offload.text_encoder=layerwise offload.dit=layerwise" in small.verdict
    )  # as published for that card
    wish = {"offload": {"text_encoder": "layerwise", "dit": "layerwise", "vae": "component"}}
    assert planned(wish, on="rtx-5090").fits
    assert planned(wish, on="rtx-5090").offload.resident_blocks >= 20
    wish["offload"]["resident_blocks"] = 0
    assert planned(wish, on="rtx-5090").bytes.pinned > 80 * GIB


def way_out(verdict: str) -> dict[str, object]:
    keys = verdict.partition("It would with ")[2].rstrip(".").split()
    return {key: parse_value(value) for key, value in (key.split("=") for key in keys)}


@pytest.mark.parametrize(
    "wish",
    [
        {},
        {"graphs.vae": True, "graphs.dit": True},
        {"offload.dit": "layerwise", "offload.resident_blocks": 45},
        {"offload.text_encoder": "component", "offload.vae": "component"},
        {"precision": "float32", "quantization.dit": "int8_row"},
    ],
)
def test_the_way_out_that_a_plan_names_is_one_and_asks_for_no_more_than_is_needed(wish):
    named = 0
    for machine in ("h100", "rtx-5090", "rtx-4090", "arc-b70", "ascend-a2", "s5000"):
        capabilities = load_machine(MACHINES / f"{machine}.json")

        def fits(values, capabilities=capabilities):
            recipe = make_recipe({"model": FULL_SPEC.id}, values)
            return make_plan(recipe, FULL_SPEC, capabilities, None)

        if wish.get("graphs.vae") and not capabilities.graphs.supported:
            continue
        keys = way_out(fits(wish).verdict)
        if not keys:
            continue
        named += 1
        assert fits({**wish, **keys}).fits, (machine, keys)
        for key in keys:
            fewer = {other: value for other, value in keys.items() if other != key}
            if not key.startswith("graphs."):
                assert not fits({**wish, **fewer}).fits, (machine, keys, key)
    assert named


def test_what_stays_says_whether_the_largest_request_has_room():
    def note(gib: float) -> str:
        plan = planned({**STREAMED_IN_24_GIB, "device": {"memory_gib": gib}})
        (told,) = [n.text for n in plan.notes if n.code == "resident_blocks"]
        return told

    assert "as many as leave room for the largest request" in note(24.0)
    assert note(9.0).startswith("0 of the DiT's 50 blocks stay on the device: even so the largest would not")


def test_8_bits_are_named_where_only_they_help_and_not_where_nothing_does():
    small = {"offload": {"dit": "layerwise", "text_encoder": "layerwise", "vae": "component"}}
    host = planned({**small, "precision": "float32", "quantization": {"dit": "fp8_row"}}, on="rtx-4090")
    assert way_out(host.verdict) == {"quantization.text_encoder": "fp8_row"}
    tight = planned({**small, "device": {"memory_gib": 6.0}}, on="rtx-4090")
    assert "nor would it with everything offloaded and in 8 bits. A smaller size or " in tight.verdict


def test_a_plan_that_does_not_fit_shared_memory_asks_for_a_smaller_size():
    plan = planned(on="laptop-8gib")
    assert not plan.fits
    assert "smaller size" in plan.verdict
    assert planned(on="laptop-8gib", spec=MINI_SPEC).fits


def test_the_memory_of_the_recipe_counts_before_that_of_the_device():
    assert not planned({"device": {"memory_gib": 64.0}}).fits
    assert "of 64.00 GiB" in planned({"device": {"memory_gib": 64.0}}).verdict


def test_modulation_weights_wait_on_the_host_and_visit_the_device_one_block_at_a_time():
    sizes, dit = planned().bytes, planned().bytes.components["dit"]
    assert dit.loading > 20 * GIB
    resting = sum(size.weights for size in sizes.components.values())
    assert sizes.stages["load"] - resting < GIB + dit.loading / dit.num_blocks
    assert sizes.host > dit.loading
    shared = planned(on="cpu-bf16", spec=MINI_SPEC).bytes
    weights = sum(size.weights for size in shared.components.values())
    assert shared.stages["load"] - weights > shared.components["dit"].loading


@pytest.mark.parametrize("form", ["mlp", "curve"])
def test_the_temporary_weights_are_those_that_are_dropped(form):
    config = replace(MINI, dit=replace(MINI.dit, adaln_form=form))
    with torch.device("meta"):
        module = H3Transformer(config.dit)
    before = set(module.state_dict())
    module.drop_adaln()
    named = {name for name in before if matches(name, make_spec("x", config).temporary)}
    assert named == before - set(module.state_dict())


def test_more_pixels_or_references_never_need_less():
    small = planned(workload=Workload(2048, 2048, 512)).bytes.stages
    large = planned(workload=Workload(4096, 4096, 512)).bytes.stages
    edit = planned(workload=Workload(2048, 2048, 512, ((1024, 1024),) * 4)).bytes.stages
    for stage in ("text_encoder", "dit", "vae"):
        assert large[stage] >= small[stage]
        assert edit[stage] >= small[stage]


@given(st.integers(0, 48))
def test_blocks_that_stay_cost_device_memory_and_save_host_memory(resident):
    def at(blocks):
        return planned({"offload": {"dit": "layerwise", "resident_blocks": blocks}}).bytes

    block = at(resident).components["dit"].block
    assert at(resident).host - at(resident + 1).host == block
    assert 0 <= at(resident + 1).stages["dit"] - at(resident).stages["dit"] <= block


STREAMED_IN_24_GIB = {
    "quantization": {"dit": "fp8_row"},
    "offload": {"text_encoder": "layerwise", "dit": "layerwise", "vae": "component"},
    "device": {"memory_gib": 24.0},
}


def streamed(workload=None, **offload):
    wish = {**STREAMED_IN_24_GIB, "offload": {**STREAMED_IN_24_GIB["offload"], **offload}}
    return planned(wish, workload=workload)


def test_as_many_blocks_stay_as_leave_room_for_the_largest_picture():
    plan = streamed()
    kept = plan.offload.resident_blocks
    assert 0 < kept < 49
    # The most rows that a canvas and a reference have, and a long prompt.
    largest = Workload(2880, 6944, 8 * 512, ((1088, 992),) * 16)
    assert streamed(largest).fits
    assert not streamed(largest, resident_blocks=kept + 1).fits
    assert streamed(Workload(512, 512, 512)).offload.resident_blocks == kept
    note = next(note for note in plan.notes if note.code == "resident_blocks")
    assert f"{kept} of the DiT's 50 blocks stay" in note.text
    assert not note.changed
    assert streamed(resident_blocks=0).offload.resident_blocks == 0
    ample = planned({**STREAMED_IN_24_GIB, "device": {"memory_gib": 120.0}})
    assert ample.offload.resident_blocks == 49


@given(
    st.sampled_from(["rtx-4090", "rtx-5080", "rtx-5090", "arc-b70"]),
    st.sampled_from([None, "fp8_row"]),
    st.floats(9, 40),
)
def test_what_was_chosen_never_refuses_what_would_fit_with_no_block(machine, form, gib):
    wish = {**STREAMED_IN_24_GIB, "quantization": {"dit": form}, "device": {"memory_gib": gib}}
    none = {**wish, "offload": {**wish["offload"], "resident_blocks": 0}}
    for side, references in ((6944, 16), (4096, 16), (4096, 0), (2048, 16), (2048, 0)):
        workload = Workload(2880 if side == 6944 else side, side, 512, ((1088, 992),) * references)
        if planned(none, on=machine, workload=workload).fits:
            assert planned(wish, on=machine, workload=workload).fits


def test_more_memory_than_the_device_has_is_planned_with_what_there_is():
    plan = planned({"device": {"memory_gib": 200.0}}, on="rtx-5090")
    assert "of 31.36 GiB" in plan.verdict
    assert [n.text for n in plan.notes if n.changed and n.code == "device_memory"] == [
        "device.memory_gib=200: NVIDIA GeForce RTX 5090 has 31.36 GiB; 31.36 are planned with"
    ]


def used(gib, values=None, *, on="rtx-4090", workload=None):
    machine = load_machine(MACHINES / f"{on}.json")
    machine = replace(machine, used_bytes=int(gib * GIB))
    return make_plan(make_recipe({"model": "h3-image", **(values or {})}), FULL_SPEC, machine, None, workload)


def test_what_is_in_use_on_the_device_already_is_left_alone():
    streams = {"offload": STREAMED_IN_24_GIB["offload"]}
    alone, beside = used(0, streams), used(3, streams)
    assert alone.bytes.device_limit - beside.bytes.device_limit == 3 * GIB
    assert beside.fits
    assert beside.offload.resident_blocks < alone.offload.resident_blocks
    said = [note for note in beside.notes if note.code == "device_memory"]
    assert [note.text for note in said] == [
        "NVIDIA GeForce RTX 4090 has 23.53 GiB, 3.00 of them in use already; 20.53 are planned with"
    ]
    assert not said[0].changed
    assert not [note for note in alone.notes if note.code == "device_memory"]


def test_a_limit_counts_with_what_is_in_use_and_is_changed_only_where_it_is_above():
    below, above = used(3, {"device": {"memory_gib": 20.0}}), used(3, {"device": {"memory_gib": 22.0}})
    assert below.bytes.device_limit == 20 * GIB
    assert above.bytes.device_limit < 21 * GIB
    assert [[note.text for note in plan.notes if note.changed] for plan in (below, above)] == [
        [],
        [
            "device.memory_gib=22: NVIDIA GeForce RTX 4090 has 23.53 GiB, 3.00 of them in use already; "
            "20.53 are planned with"
        ],
    ]


def test_a_request_that_does_not_fit_beside_what_is_in_use_is_told_of_it():
    plan = used(100, on="h200")
    assert not plan.fits
    assert "100.00 GiB beside it being in use already" in plan.verdict
    assert "in use" not in used(100, {"device": {"memory_gib": 30.0}}, on="h200").verdict


def test_a_request_that_the_blocks_on_the_device_leave_no_room_for_is_told_how_many_would():
    edit = Workload(4096, 4096, 512, ((1024, 1024),) * 16)
    tight = streamed(edit, resident_blocks=40)
    assert not tight.fits
    fewer = int(tight.verdict.split("It would with offload.resident_blocks=")[1].rstrip("."))
    assert streamed(edit, resident_blocks=fewer).fits


def test_tiles_are_taken_in_smaller_batches_where_they_would_not_fit():
    wish = {"offload": {"text_encoder": "layerwise", "dit": "layerwise", "vae": "component"}}
    edit = Workload(2048, 2048, 512, ((1024, 1024),))
    roomy = planned(wish, on="rtx-5090", workload=edit)
    assert roomy.workload.tile_batch == 112
    assert roomy.bytes.peak_stage == "vae"
    tight = planned({**wish, "device": {"memory_gib": 8.7}}, on="rtx-5090", workload=edit)
    assert tight.fits
    assert tight.workload.tile_batch < 16
    text = f"the VAE takes {tight.workload.tile_batch} tiles at once instead of 112, to fit"
    assert any(text == note.text for note in tight.notes)


def test_plain_attention_is_charged_for_its_scores():
    machine = load_machine(MACHINES / "h200.json")
    recipe = make_recipe({"model": "h3-image"})
    workload = Workload(4096, 4096, 512)
    plain = make_plan(recipe, FULL_SPEC, machine, KernelLists(), workload)
    unknown = make_plan(recipe, FULL_SPEC, machine, None, workload)
    rows = FULL_SPEC.rows(workload)
    assert plain.bytes.stages["dit"] - unknown.bytes.stages["dit"] == 8 * 56 * rows**2


def test_references_are_brought_to_the_rule_of_the_checkpoint():
    for rule, size, wanted in (
        ("area", (3000, 1000), (896, 288)),
        ("fit", (256, 256), (256, 256)),
        ("fit", (2048, 2048), (512, 512)),
        ("short_edge", (1000, 2000), (512, 1024)),
        ("area", (1, 1), (512, 512)),
        ("area", (5000, 10), (11456, 32)),
    ):
        scheduler = replace(MINI.scheduler, reference_rule=rule, reference_pixels=512 * 512)
        spec = make_spec("x", replace(MINI, scheduler=scheduler))
        assert spec.reference_size(*size, canvas=(256, 256)) == wanted
        assert spec.reference_size(*size, canvas=(512, 512)) == wanted


def test_captured_calls_may_hold_what_the_plan_leaves_up_to_a_quarter_of_the_device():
    roomy = planned(on="h200")
    assert roomy.bytes.graphs == int(0.25 * roomy.bytes.device_limit)
    tight = planned({"quantization": {"dit": "fp8_row"}, "device": {"memory_gib": 76.0}}, on="h200")
    size = tight.bytes
    assert tight.fits
    assert 0 < size.graphs < 0.25 * size.device_limit
    assert size.peak + size.graphs == int(0.97 * size.device_limit)
    assert planned({"graphs": {"dit": False, "vae": False}}, on="h200").bytes.graphs == 0
    moved = planned({"offload": {"dit": "layerwise", "vae": "component"}}, on="h200")
    assert moved.bytes.graphs == 0


def test_memory_that_is_asked_for_graphs_is_planned_with_and_refused_where_there_is_none():
    wish = {"quantization": {"dit": "fp8_row"}, "device": {"memory_gib": 76.0}}
    some = planned({**wish, "graphs": {"memory_gib": 1.5}}, on="h200")
    assert some.fits
    assert some.bytes.graphs == 3 << 29
    much = planned({**wish, "graphs": {"memory_gib": 50.0}}, on="h200")
    assert not much.fits
    assert "50.00 GiB for graphs. It would with graphs.memory_gib=" in much.verdict
    enough = float(much.verdict.split("graphs.memory_gib=")[1].rstrip("."))
    assert planned({**wish, "graphs": {"memory_gib": enough}}, on="h200").fits
    none = planned({**wish, "graphs": {"dit": False, "vae": False, "memory_gib": 50.0}}, on="h200")
    assert none.fits
    assert any("graphs.memory_gib=50 is for nothing" in note.text for note in none.notes)


def test_a_batch_takes_the_activations_of_as_many_pictures_and_no_more_weights():
    one, four = (planned({"batch": count}, workload=Workload(2048, 2048, 512)) for count in (1, 4))
    assert four.bytes.components["dit"].activations == 4 * one.bytes.components["dit"].activations
    assert four.bytes.components["dit"].weights == one.bytes.components["dit"].weights
    for stage in ("load", "text_encoder", "vae"):
        assert four.bytes.stages[stage] == one.bytes.stages[stage]
    assert four.workload.batch == 4
    assert four.digest == one.digest, "it decides no picture, so the file does not tell of it"


@pytest.mark.parametrize("layout", [{}, {"ulysses": 2}, {"tensor": 2}])
def test_fewer_pictures_at_once_are_planned_where_all_would_not_fit(layout):
    """Also what ranks send to each other is there for each picture."""
    workload = Workload(4096, 4096, 512)
    sizes = {n: planned({"layout": layout, "batch": n}, workload=workload).bytes for n in (1, 3)}
    several, one = (sizes[n].components["dit"].activations for n in (3, 1))
    assert several == pytest.approx(3 * one, rel=1e-6)
    each = (sizes[3].stages["dit"] - sizes[1].stages["dit"]) / 2
    room = (sizes[1].stages["dit"] + 2.5 * each) / USABLE_SHARE / 2**30
    keys = {
        "layout": layout,
        "batch": 8,
        "device": {"memory_gib": room},
        "graphs": {"dit": False, "vae": False},
    }
    plan = planned(keys, workload=workload)
    assert plan.fits
    assert plan.workload.batch == 3
    assert "the DiT takes 3 pictures at once instead of 8, to fit" in [note.text for note in plan.notes]


def test_a_request_is_planned_with_the_length_of_its_prompt():
    setup = set_up(make_recipe({"model": "h3-image", "weights": "random"}))

    def size(prompt: str):
        return setup.plan_of(resolve_request(Request(prompt), setup.recipe, setup.spec)).bytes

    short, long = size("a red apple"), size("a red apple, " * 400)
    assert short == setup.plan.bytes
    for stage in ("text_encoder", "dit"):
        assert long.stages[stage] > short.stages[stage]
    assert size("\u82f9\u679c" * 2000).stages["dit"] > size("ap" * 2000).stages["dit"], "three bytes a letter"
    assert size("42" * 2000).stages["dit"] > size("ap" * 2000).stages["dit"], "a token a digit"
    assert size("ap" * 3000 + "42").stages["dit"] > size("ap" * 3000).stages["dit"]
