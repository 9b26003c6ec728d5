"""Plans: what a recipe means on a machine, every refusal with its reason, and nothing changed in silence."""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mini_configs import MINI

from portable_dit.backend import EmulatedLinear, ExpertKernel, LinearKernel
from portable_dit.capabilities import AttentionRequest, KernelLists, LinearRequest, Reject
from portable_dit.errors import RecipeError
from portable_dit.layout import Layout, layout_problems, split_problems
from portable_dit.machine_file import load_machine
from portable_dit.models import read_spec
from portable_dit.models.h3_image.spec import make_spec
from portable_dit.models.spec import LinearGroup, TensorSplit, Workload
from portable_dit.plan import default_workload, make_plan
from portable_dit.recipe import make_recipe

MACHINES = Path(__file__).parents[1] / "data" / "machines"
MINI_SPEC = make_spec("h3-mini", MINI)
FULL_SPEC = read_spec("h3-image", "MiniMaxAI/MiniMax-H3-Image")
NO_KERNELS = KernelLists()


@dataclass(frozen=True)
class TestKernel:
    """A kernel as another package would bring it: it takes some dtypes, up to some head size or width."""

    __test__ = False
    id: str
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    largest: int = 1 << 20
    exact: bool = True
    quantizes_input: bool = True

    def check(self, request, capabilities):
        if request.dtype not in self.dtypes:
            return Reject("dtype", f"takes {' and '.join(self.dtypes)}, not {request.dtype}")
        size = {AttentionRequest: "head_dim", LinearRequest: "out_features"}.get(type(request), "channels")
        if getattr(request, size) > self.largest:
            return Reject(size, f"takes {size} up to {self.largest}, not {getattr(request, size)}")
        return None


def machine(name="cpu-bf16"):
    return load_machine(MACHINES / f"{name}.json")


def planned(values=None, *, spec=MINI_SPEC, on="cpu-bf16", kernels=NO_KERNELS, workload=None, strict=False):
    recipe = make_recipe({"model": spec.id, **(values or {})})
    return make_plan(recipe, spec, machine(on), kernels, workload, strict=strict)


def refused(values, **more) -> str:
    with pytest.raises(RecipeError) as caught:
        planned(values, **more)
    return str(caught.value)


def test_automatic_precision_follows_the_machine_and_says_so():
    assert planned().dtype == {"text_encoder": "bfloat16", "dit": "bfloat16", "vae": "float32"}
    without = planned(on="cpu-without-bf16")
    assert set(without.dtype.values()) == {"float32"}
    assert any("does not compute in bfloat16" in note.text for note in without.notes)


def test_a_precision_that_the_machine_or_the_model_lacks_is_refused():
    said = refused({"precision": "bfloat16"}, on="cpu-without-bf16")
    assert "Intel Xeon E5-2690 v4 does not compute in bfloat16. Say precision=auto, or float32" in said
    assert "h3-mini does not keep its pictures in float16" in refused({"precision": "float16"}, on="h200")


def test_all_problems_come_in_one_message():
    said = refused(
        {
            "device": {"backend": "elsewhere", "count": 5},
            "layout": {"guidance": 2},
            "executor": "inline",
            "precision": "float16",
            "quantization": {"dit": "mxfp8", "keep": ["blok"]},
            "offload": {"vae": "layerwise", "resident_blocks": 2},
            "graphs": {"dit": True},
            "sampling": {"steps": 4, "guidance_scale": 5.0},
            "attention": "flash",
        },
        workload=Workload(100, 0, 8),
    )
    for key in (
        "device.backend=elsewhere",
        "device.count=5",
        "layout.guidance=2",
        "executor=inline",
        "precision=float16",
        "quantization.dit=mxfp8",
        "quantization.keep: 'blok' matches no linear layer of h3-mini. Did you mean 'blocks'?",
        "offload.vae=layerwise",
        "offload.resident_blocks=2",
        "graphs.dit=true",
        "sampling.steps=4",
        "sampling.guidance_scale=5",
        "attention=flash",
        "size=100x0",
    ):
        assert key in said
    assert "14 problems" in said


def test_a_kernel_whose_backend_is_not_here_is_said_to_be_unknown():
    wish = {"attention": "banana", "device": {"backend": "cuda"}}
    (note,) = [n for n in planned(wish, on="h200", kernels=None).notes if n.code == "kernels_unknown"]
    assert note.text.endswith("nor can it be said whether attention=banana is one")
    (note,) = [n for n in planned(on="h200", kernels=None).notes if n.code == "kernels_unknown"]
    assert "attention" not in note.text


def test_more_devices_than_there_are_is_never_answered_with_a_count_that_the_layout_refuses():
    said = refused({"layout": {"ulysses": 8}, "device": {"count": 8}}, on="rtx-4090", spec=FULL_SPEC)
    assert "this machine has 2 x NVIDIA GeForce RTX 4090. Say a layout of no more than that" in said
    assert "Say device.count=" not in said
    said = refused({"device": {"count": 3}}, on="rtx-4090", spec=FULL_SPEC)
    assert said.count("Say device.count=1") == 2
    assert planned({"device": {"count": 1}}, on="rtx-4090", spec=FULL_SPEC)


@pytest.mark.parametrize("axis", ["guidance", "expert"])
def test_a_layout_that_the_model_does_not_have_is_refused_with_the_way_out(axis):
    said = refused({"layout": {axis: 2}, "device": {"count": 2}}, on="h200")
    assert f"layout.{axis}=2: h3-mini cannot be split this way" in said
    assert f"Say layout.{axis}=1" in said


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        ({"tensor": 3}, "must divide the 4 attention heads"),
        ({"tensor": 2, "ulysses": 4}, "must divide the 2 attention heads of each tensor part"),
        ({"ulysses": 2, "text_encoder_tensor": 2}, "must divide the 3 heads of the text encoder"),
        ({"vae_tiles": 2}, "must divide the 1 devices of a replica"),
        (
            {"ulysses": 2, "data": 2, "executor": "inline"},
            "one process drives one device, the layout needs 4",
        ),
    ],
)
def test_a_layout_that_breaks_a_rule_is_refused_with_the_rule(layout, rule):
    executor = layout.pop("executor", "auto")
    assert rule in refused({"layout": layout, "executor": executor}, on="h200")


def test_how_processes_are_started_follows_from_the_layout():
    assert planned().executor == "inline"
    assert planned({"layout": {"ulysses": 2}}, on="h200").executor == "mp"
    assert planned({"layout": {"ulysses": 2}}, on="h200").layout.world == 2


def test_parts_of_layers_end_where_the_blocks_of_their_format_do():
    said = refused({"layout": {"tensor": 4}, "quantization": {"dit": "fp8_block128"}}, on="h200")
    assert "the parts of blocks.*.mlp.fc1 must be whole blocks of 128" not in said
    narrow = replace(
        FULL_SPEC,
        supported_layouts=("tensor",),
        tensor_plan=(TensorSplit("dit", "blocks.*.mlp.fc2", "in"),),
        linears=(LinearGroup("dit", "blocks.*.mlp.fc2", 50, 14336 + 64, 5376),),
    )
    problems = split_problems(narrow, Layout(tensor=2), {"dit": "fp8_block128"})
    assert "must be whole blocks of 128 fp8_block128 values, and 7200 is none" in problems[0]
    assert split_problems(narrow, Layout(tensor=2), {"dit": "fp8_row"}) == []


def test_channels_that_a_format_turns_together_are_not_cut_apart():
    narrow = replace(
        FULL_SPEC,
        tensor_plan=(TensorSplit("dit", "blocks.*.mlp.fc2", "in"),),
        linears=(LinearGroup("dit", "blocks.*.mlp.fc2", 50, 13824, 5376),),
    )
    assert not split_problems(narrow, Layout(tensor=2), {"dit": "int8_row_rotated"})
    (problem,) = split_problems(narrow, Layout(tensor=4), {"dit": "int8_row_rotated"})
    assert "turns 256 neighbouring channels of blocks.*.mlp.fc2 together, and parts of 3456" in problem
    assert "quantization.dit=int8_row." in problem
    assert split_problems(narrow, Layout(tensor=4), {"dit": "int8_row"}) == []


class OwnScales(EmulatedLinear):
    """A kernel of another package that quantises its input as if all of it were there."""

    agrees = False


def test_a_kernel_that_scales_a_part_of_a_row_by_itself_does_not_serve_one_that_is_divided():
    kernels = KernelLists(linear={"fp8_row": (OwnScales("fp8_row", "own"), EmulatedLinear("fp8_row"))})
    wish = {"quantization": {"dit": "fp8_row"}}
    alone = planned(wish, spec=FULL_SPEC, on="h200", kernels=kernels)
    assert alone.choices("dit")["linear:fp8_row"] == "own"
    divided = planned({**wish, "layout": {"tensor": 2}}, spec=FULL_SPEC, on="h200", kernels=kernels)
    assert divided.choices("dit")["linear:fp8_row"] == "emulated"
    (refusal,) = (r for r in divided.refusals if r.kernel == "own")
    assert refusal.code == "divided"
    assert "numbers would depend on how many there are" in refusal.detail


def test_ranks_that_share_a_row_tell_each_other_its_largest_and_the_plan_counts_it():
    emulated, plain = (
        KernelLists(linear={format: (kernel(format),) for format in ("fp8_row", "mxfp8")})
        for kernel in (EmulatedLinear, LinearKernel)
    )
    sent = {
        (format, kernels): planned(
            {"quantization": {"dit": format}, "layout": {"tensor": 2}},
            spec=FULL_SPEC,
            on="h200",
            kernels=lists,
        ).traffic["all_reduce"]
        for format in ("fp8_row", "mxfp8")
        for kernels, lists in (("emulated", emulated), ("plain", plain))
    }
    rows = FULL_SPEC.rows(default_workload(FULL_SPEC))
    assert sent["fp8_row", "emulated"] - sent["fp8_row", "plain"] == 2 * FULL_SPEC.num_blocks * 4 * rows
    assert sent["mxfp8", "emulated"] == sent["mxfp8", "plain"] == sent["fp8_row", "plain"]


def test_one_scale_for_rows_that_devices_scale_apart_is_noted():
    hunyuan = read_spec("hunyuan-image-3", "random")
    kernels = KernelLists(
        linear={"fp8_tensor": (EmulatedLinear("fp8_tensor"),)},
        experts={"fp8_tensor": (ExpertKernel(EmulatedLinear("fp8_tensor")),)},
    )
    for layout, said in ({"guidance": 2}, True), ({"tensor": 2}, False), ({"ulysses": 2}, False):
        wish = {"quantization": {"dit": "fp8_tensor"}, "layout": layout, "precision": "bfloat16"}
        plan = planned(wish, spec=hunyuan, on="h200", kernels=kernels)
        notes = [note.text for note in plan.notes if note.code == "scales_apart"]
        assert bool(notes) == said, layout
        assert not said or "each device of layout.guidance=2 has one for its own" in notes[0]


SPLITTABLE = replace(FULL_SPEC, supported_layouts=tuple(Layout.__dataclass_fields__))


@given(st.integers(2, 80), st.sampled_from(["tensor", "ulysses"]))
def test_a_degree_that_does_not_divide_names_the_nearest_that_does(degree, axis):
    problems = layout_problems(Layout(**{axis: degree}), SPLITTABLE, devices=degree)
    divides = 56 % degree == 0 and (axis == "ulysses" or 14336 % degree == 0)
    assert (not problems) == divides
    if problems:
        nearest = int(problems[0].rpartition("Nearest: ")[2].rstrip("."))
        assert not layout_problems(Layout(**{axis: nearest}), SPLITTABLE, devices=nearest)


def test_a_layout_must_use_the_devices_that_it_was_given():
    layout = Layout(tensor=2, ulysses=2, data=2)
    assert not layout_problems(layout, SPLITTABLE, devices=8)
    said = layout_problems(layout, SPLITTABLE, devices=4)
    assert "uses 8 (tensor 2 x ulysses 2 x ring 1 x guidance 1 x data 2)" in said[0]
    assert layout_problems(Layout(tensor=8, ulysses=2), SPLITTABLE, devices=16)  # 7 heads are left for two
    assert layout_problems(Layout(tensor=2, vae_tiles=4), SPLITTABLE, devices=2)
    assert "no experts" in layout_problems(Layout(expert=2), SPLITTABLE, devices=2)[0]
    assert "without guidance" in layout_problems(Layout(guidance=2), SPLITTABLE, devices=2)[0]


def test_the_first_kernel_that_serves_is_taken_and_every_refusal_kept():
    kernels = KernelLists(
        attention=(
            TestKernel("tiny", largest=64),
            TestKernel("rough", exact=False),
            TestKernel("half", dtypes=("bfloat16",)),
            TestKernel("any"),
        ),
        fused={"swiglu": (TestKernel("narrow", largest=8), TestKernel("wide"))},
    )
    plan = planned(kernels=kernels)
    assert plan.choices("dit")["attention"] == "half"
    assert plan.choices("vae")["attention"] == "tiny"  # its heads have 64 channels
    assert plan.choices("dit")["swiglu"] == "wide"
    assert plan.choices("dit")["norm_modulate"] == "plain"
    kept = {(r.component, r.op, r.kernel): r for r in plan.refusals}
    assert kept["dit", "attention", "tiny"].detail == "takes head_dim up to 64, not 128"
    assert kept["dit", "attention", "rough"].code == "approximate"
    assert kept["vae", "attention", "half"].code == "dtype"
    assert kept["dit", "swiglu", "narrow"].code == "channels"


def test_an_approximate_kernel_runs_only_when_named():
    kernels = KernelLists(attention=(TestKernel("rough", exact=False), TestKernel("any")))
    plan = planned({"attention": "rough"}, kernels=kernels)
    assert plan.choices("dit")["attention"] == "rough"
    assert plan.choices("vae")["attention"] == "any"
    assert planned({"attention": "plain"}, kernels=kernels).choices("dit")["attention"] == "plain"


def test_a_named_kernel_that_does_not_serve_is_refused_with_its_reason():
    kernels = KernelLists(attention=(TestKernel("tiny", largest=64), TestKernel("any")))
    said = refused({"attention": "tiny"}, kernels=kernels)
    assert "attention=tiny: this kernel does not serve the dit: takes head_dim up to 64, not 128" in said
    assert "Did you mean 'tiny'?" in refused({"attention": "tin"}, kernels=kernels)


def test_a_format_gets_a_kernel_or_is_refused_with_all_reasons():
    serves = KernelLists(linear={"fp8_row": (TestKernel("small", largest=64), TestKernel("big"))})
    plan = planned({"quantization": {"dit": "fp8_row"}}, on="h200", kernels=serves)
    assert plan.choices("dit")["linear:fp8_row"] == "big"
    assert plan.formats == {"dit": "fp8_row", "text_encoder": None, "vae": None}
    assert plan.keep == ("condition_proj", "token_refiner")
    fails = KernelLists(
        linear={"fp8_row": (TestKernel("small", largest=64),), "int8_row": (TestKernel("x"),)}
    )
    said = refused({"quantization": {"dit": "fp8_row"}}, on="h200", kernels=fails)
    assert "small: takes out_features up to 64, not 1536" in said
    assert "Formats it has: fp8_row, int8_row" in said
    assert "has no kernel for that format" in refused({"quantization": {"dit": "mxfp8"}}, kernels=serves)


def test_a_format_that_reaches_no_layer_is_refused():
    kernels = KernelLists(linear={"int8_row": (TestKernel("any"),)})
    wish = {"dit": "int8_row", "keep": ["blocks", "condition_proj", "token_refiner"]}
    assert "reaches no layer of the dit" in refused({"quantization": wish}, kernels=kernels)


def test_a_format_without_a_matrix_unit_is_noted_and_strict_refuses_it():
    kernels = KernelLists(linear={"fp8_row": (TestKernel("dequantise"),)})
    wish = {"quantization": {"dit": "fp8_row"}}
    plan = planned(wish, kernels=kernels)
    assert [note.code for note in plan.notes if note.changed] == ["not_native"]
    assert "strict: quantization.dit=fp8_row" in refused(wish, kernels=kernels, strict=True)
    assert not [note for note in planned(strict=True).notes if note.changed]


def test_graphs_follow_the_machine_and_exclude_moving_weights():
    assert planned(on="h200").graphs == {"dit": True, "vae": True}
    assert planned(on="arc-b70").graphs == {"dit": False, "vae": False}  # can, but not by itself
    assert planned({"graphs": {"dit": True}}, on="arc-b70").graphs["dit"]
    assert not planned({"graphs": {"dit": False}}, on="h200").graphs["dit"]
    moved = {"offload": {"dit": "layerwise"}}
    assert planned(moved, on="h200").graphs == {"dit": False, "vae": True}
    assert "offload.dit is layerwise" in refused({**moved, "graphs": {"dit": True}}, on="h200")
    assert "captures no graphs" in refused({"graphs": {"vae": True}})
    fatal = planned({"graphs": {"dit": True}}, on="ascend-a2")
    assert any("a failed capture ends the process" in note.text for note in fatal.notes)


def test_offload_that_saves_nothing_is_said_and_strict_refuses_it():
    moved = {"offload": {"dit": "component"}}
    assert "offload_shared_memory" in [note.code for note in planned(moved).notes if note.changed]
    assert "shares the host's memory" in refused(moved, strict=True)
    assert "none would move" in refused(
        {"offload": {"dit": "layerwise", "resident_blocks": 6}}, on="h200", strict=True
    )


def test_a_machine_whose_backend_is_not_installed_is_still_planned_for():
    plan = planned({"quantization": {"dit": "fp8_row"}}, spec=FULL_SPEC, on="h200", kernels=None)
    assert plan.choices("dit") == {"attention": "unknown", "linear:fp8_row": "unknown"}
    assert any("not installed here" in note.text for note in plan.notes)


def test_a_plan_is_json_and_says_where_every_value_comes_from():
    plan = planned({"attention": "plain"}, on="h200")
    data = json.loads(json.dumps(plan.as_dict()))
    assert data["recipe"]["attention"] == {"value": "plain", "from": "recipe"}
    assert data["recipe"]["layout.tensor"] == {"value": 1, "from": "default"}
    assert data["bytes"]["peak"] == plan.bytes.peak
    assert data["kernels"]["dit"]["attention"] == "plain"
    assert data["verdict"] == plan.verdict


def test_what_the_model_assumes_is_noted():
    assert any("published sizes" in note.text for note in planned(spec=FULL_SPEC, on="h200").notes)


ODD = (
    None,
    True,
    "x",
    "",
    -1,
    0,
    2,
    7,
    10**30,
    1.5,
    1e-300,
    1e308,
    [],
    {},
    ["*"],
    "layerwise",
    "int8_row",
    "\0",
)


@pytest.mark.parametrize("key", make_recipe({"model": "h3-mini"}).values())
def test_whatever_a_key_holds_is_refused_in_words_or_planned(key):
    for value in ODD:
        for name in ("cpu-bf16", "h200"):
            with suppress(RecipeError):
                recipe = make_recipe({"model": "h3-mini"}, {key: value})
                plan = make_plan(recipe, MINI_SPEC, machine(name), NO_KERNELS)
                assert json.loads(json.dumps(plan.as_dict()))["recipe"][key]["from"] == "flag"


def test_processes_that_share_the_memory_of_one_processor_need_it_together():
    one = planned()
    limit = 3.5 * one.bytes.peak / 2**30
    several = replace(machine(), count=8)
    recipe = make_recipe({"model": "h3-mini", "layout": {"data": 4}, "device": {"memory_gib": limit}})
    four = make_plan(recipe, MINI_SPEC, several, NO_KERNELS)
    assert one.bytes.host == one.bytes.peak
    assert four.bytes.host == 4 * four.bytes.peak
    assert four.bytes.fits_device
    assert not four.bytes.fits
    assert "in all" in four.verdict
