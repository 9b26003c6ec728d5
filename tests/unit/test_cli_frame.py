"""The command line's frame: quick help, messages and exit codes; plans and recipes through the front door."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from mini_configs import write_configs
from typer.testing import CliRunner

import portable_dit
from portable_dit.cli import app
from portable_dit.cli.options import FLAGS, as_flags
from portable_dit.errors import DeviceMemoryError, DoesNotFitError, OutputError
from portable_dit.recipe import Recipe

MACHINES = Path(__file__).parents[1] / "data" / "machines"
COMMANDS = ("run", "plan", "bench", "doctor", "backends", "recipes", "weights", "inspect")


def call(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


IN_A_PROCESS = "from portable_dit.cli import main; main()"


def in_a_process(*words: str, code: str = IN_A_PROCESS, **more):
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120, check=False, **more
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    """A flag for a folder with the built-in model's configs."""
    return f"weights={write_configs(tmp_path_factory.mktemp('mini'))}"


def test_help_names_every_command_and_loads_nothing_heavy():
    code = """
import sys
from portable_dit.cli import main
try:
    main()
finally:
    print(sorted({"torch", "numpy", "pydantic", "rich", "PIL", "yaml"} & set(sys.modules)), file=sys.stderr)
"""
    done = in_a_process("--help", code=code)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize(
    "words", [("list",), ("show", "cpu/h3-mini"), ("validate", "cpu/h3-mini"), ("schema",)]
)
def test_recipes_are_read_without_torch(words):
    done = in_a_process("recipes", *words, code="import sys; sys.modules['torch'] = None\n" + IN_A_PROCESS)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    done = call(command, "--help")
    assert done.exit_code == 0
    assert "Usage:" in done.stdout


def test_the_version_is_the_packages():
    done = call("--version")
    assert done.stdout == f"portable-dit {portable_dit.__version__}\n"


def test_a_wrong_flag_is_a_usage_error():
    assert call("plan", "--no-such-flag").exit_code == 2
    assert call("no-such-command").exit_code == 2


def test_an_error_is_one_message_on_stderr_and_an_exit_code():
    done = call("plan", "--recipe", "cpu/h3-mni")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: recipe cpu/h3-mni: ")
    assert "Did you mean 'cpu/h3-mini'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_name_among_very_many_is_answered_with_the_near_one_or_the_nearest_few():
    done = call("plan", "--recipe", "nvidia/h200/h3-image-1x-bf17")
    assert done.exit_code == 2
    assert done.stderr.rstrip().endswith(
        "Did you mean 'nvidia/h200/h3-image-1x-bf16'? `portable-dit recipes list` names all."
    )
    done = call("plan", "--recipe", "?")
    assert "Did you mean" not in done.stderr
    assert re.search(r"Known: .*, and \d+ more\.$", done.stderr.strip())
    assert len(done.stderr) < 1000


def test_debug_shows_the_traceback():
    done = in_a_process("--debug", "recipes", "show", "--recipe", "nowhere")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    done = in_a_process(
        "recipes", "show", "--recipe", "nowhere", env={**os.environ, "PORTABLE_DIT_DEBUG": "1"}
    )
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OutputError("disk full"), 2, "error: disk full"),
        (DoesNotFitError("too large"), 3, "error: too large"),
        (DeviceMemoryError("out of memory"), 1, "error: out of memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_what_goes_wrong_in_a_command_becomes_its_exit_code(error, code, said):
    program = f"""
from portable_dit.cli import Commands, options
from portable_dit.errors import *
import typer
app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)
app.callback()(options)
@app.command()
def fail() -> None:
    raise {type(error).__name__}({str(error)!r})
app()
"""
    done = in_a_process("fail", code=program)
    assert done.returncode == code
    assert done.stderr.strip() == said


def test_a_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "portable_dit", "recipes", "schema"],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == b""


def test_every_flag_sets_keys_that_a_recipe_has():
    known = Recipe(model="x").values()
    for flag in FLAGS:
        assert set(flag.keys) <= set(known), flag.names


def test_named_flags_and_set_reach_the_recipe_and_are_named_as_its_origin():
    done = call(
        "recipes", "show", "--json", "--set", "sampling.steps=6", "--usp", 4, "--tensor-parallel-size", 2,
        "--cfg-parallel-size", 1, "--quantization", "fp8_row", "--enforce-eager", "--backend", "cpu",
        "--attention-backend", "plain", "--enable-layerwise-offload",
        "--vae-patch-parallel-size", 3, "--text-encoder-tp-size", 5,
        "--distributed-executor-backend", "mp", "--precision", "float32", "--ring-degree", 6,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    keys = json.loads(done.stdout)["recipe"]
    wanted = {
        "sampling.steps": 6, "layout.ulysses": 4, "layout.tensor": 2, "layout.guidance": 1,
        "quantization.dit": "fp8_row", "graphs.dit": False, "graphs.vae": False, "attention": "plain",
        "offload.dit": "layerwise", "layout.vae_tiles": 3, "layout.text_encoder_tensor": 5, "executor": "mp",
        "precision": "float32", "layout.ring": 6, "device.backend": "cpu",
    }  # fmt: skip
    for key, value in wanted.items():
        assert keys[key] == {"value": value, "from": "flag"}, key
    assert keys["model"]["from"] == "recipe"
    assert keys["layout.data"] == {"value": 1, "from": "default"}


def test_settings_that_cannot_be_read_or_contradict_are_all_told():
    done = call(
        "recipes", "show", "--set", "steps", "--set", "a..b=1", "--set", "attention=[", "--usp", 4,
        "--set", "layout.ulysses=2", "--set", "layout.ring=1",
    )  # fmt: skip
    assert done.exit_code == 2
    assert "--set steps: say KEY=VALUE" in done.stderr
    assert "--set a..b=1: say KEY=VALUE" in done.stderr
    assert "--set attention=[: this is not YAML" in done.stderr
    assert "--set layout.ulysses=2: layout.ulysses was already given as 4" in done.stderr
    assert "layout.ring" not in done.stderr


def test_a_plan_for_a_machine_that_is_elsewhere(weights):
    on = ("--set", weights, "--set", "device.backend=null", "--machine")
    done = call("plan", *on, MACHINES / "h200.json", "--size", "256x384")
    assert done.exit_code == 0, done.stderr
    assert "h3-mini on NVIDIA H200 (cuda), 256x384" in done.stdout
    assert "\nfits: " in done.stdout
    words = " ".join(done.stdout.split())
    assert "device.backend None" not in words
    assert "model h3-mini recipe" in words
    assert "vae runs in float32 plan" in words
    assert "executor inline plan" in words
    assert "layout." not in words, "a key at its default says nothing"
    assert "Keys at their defaults are left out" in words
    assert "unknown" not in words, "a backend that is not here is one note, no table"


def on_machine(recipe: str, machine: str, *flags: object):
    return call("plan", "--recipe", recipe, "--machine", MACHINES / f"{machine}.json", *flags)


def test_measured_figures_are_the_last_of_a_plan_one_a_line():
    done = on_machine("nvidia/h200/h3-image-1x-fp8", "h200")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("measured: text_to_image_4096: seconds ")]
    assert lines.index(line) > next(k for k, line in enumerate(lines) if line.startswith(" memory"))
    assert "{" not in done.stdout


def test_a_plan_that_does_not_fit_names_flags_and_a_recipe_that_does():
    done = on_machine("nvidia/h200/h3-image-1x-bf16", "rtx-4090")
    assert done.exit_code == 3
    assert ", to fit" not in done.stdout, "what was given up did not help"
    *_, flags, other = done.stdout.splitlines()
    settings = flags.removeprefix("On the command line: ").split()
    assert on_machine("nvidia/h200/h3-image-1x-bf16", "rtx-4090", *settings).exit_code == 0
    name = other.removeprefix("A recipe for it that fits: --recipe ")
    assert name.startswith("nvidia/rtx4090/")
    assert on_machine(name, "rtx-4090").exit_code == 0
    limited = on_machine("nvidia/h200/h3-image-1x-bf16", "rtx-4090", "--max-vram", 1)
    assert (limited.exit_code, "A recipe" in limited.stdout) == (3, False)
    told = json.loads(on_machine("nvidia/h200/h3-image-1x-bf16", "rtx-4090", "--json").stdout)
    assert not [note for note in told["notes"] if note["code"] in ("tiles", "batch", "resident_blocks")]


def test_a_recipe_that_fits_does_so_with_the_flags_or_says_without_which():
    flags = ("--max-vram", 14, "--size", "4096x4096", "--set", "offload.resident_blocks=30")
    kept = on_machine("nvidia/rtx4090/h3-image-1x-fp8", "rtx-4090", *flags)
    assert kept.exit_code == 3
    without = "A recipe for it that fits, without offload.resident_blocks: --recipe "
    assert kept.stdout.splitlines()[-1].startswith(without)
    wide = ("--precision", "float32")
    done = on_machine("nvidia/rtx4090/h3-image-1x-bf16", "rtx-4090", *wide)
    *_, other = done.stdout.splitlines()
    assert (done.exit_code, other) == (
        3,
        "A recipe for it that fits, without precision: --recipe nvidia/rtx4090/h3-image-1x-bf16",
    )


def test_a_refusal_says_how_its_keys_are_said_as_flags(weights):
    machine = ("--machine", MACHINES / "h200.json")
    done = call("plan", "--set", weights, *machine)
    assert done.stderr.rstrip().endswith("On the command line: --set device.backend=cuda")
    done = call("plan", "--set", weights, *machine, "--set", "device.backend=cuda")
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("Say device.backend=cuda, or leave it out.", "--set device.backend=cuda"),
        ("It would with graphs.memory_gib=0.25.", "--set graphs.memory_gib=0.25"),
        ("It would with offload.dit=layerwise a.b=1.", "--set offload.dit=layerwise --set a.b=1"),
        ("Say executor=mp, or auto.", "--set executor=mp"),
        ("Say a.b=1 or less.\n  x: no. Try c=2.\n  y: no. Say a.b=1.", "--set a.b=1 --set c=2"),
        ("layout.ring=3: too many. Say less.", None),
        ("a.b: no. Say a.b=1.\n  a.b: no. Say a.b=2, or c=3.", "--set a.b=1"),
    ],
)
def test_what_a_message_advises_is_found_in_it(message, flags):
    assert as_flags(message) == (None if flags is None else f"On the command line: {flags}")


def test_a_plan_that_does_not_fit_has_its_own_exit_code(weights):
    done = call(
        "plan", "--set", weights, "--set", "device={}", "--set", "device.memory_gib=0.2", "--json",
        "--machine", MACHINES / "cpu-bf16.json",
    )  # fmt: skip
    assert done.exit_code == 3, done.stderr
    plan = json.loads(done.stdout)
    assert plan["bytes"]["fits"] is False
    assert plan["verdict"].startswith("does not fit: ")


def test_a_plan_for_this_machine_names_its_kernels(weights):
    done = call("plan", "--set", weights, "--json")
    assert done.exit_code == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["backend"] == "cpu"
    assert plan["kernels"]["dit"]["attention"] not in ("plain", "unknown")


def test_references_make_a_plan_larger(weights):
    plans = [json.loads(call("plan", "--set", weights, "--json", "--image-count", n).stdout) for n in (0, 3)]
    assert plans[1]["bytes"]["peak"] > plans[0]["bytes"]["peak"]
    assert plans[1]["workload"]["reference_sizes"] == [[512, 512]] * 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--size", "big"), "512x512"),
        (("--size", "0x512"), "size=0x512"),
        (("--size", "512x520"), "multiples of 32"),
        (("--image-count", 4), "takes at most 3"),
        (("--machine", "/nowhere.json"), "/nowhere.json"),
        (("--machine", MACHINES / "h200.json"), "device.backend=cpu: NVIDIA H200 belongs to backend cuda"),
        (("--tensor-parallel-size", 3), "layout.tensor=3"),
        (("--backend", "abacus"), "abacus"),
        (("--precision", "int4"), "'int4' is not one of"),
        (("--set", "model=h3-min"), "Did you mean 'h3-mini'?"),
        (("--set", "weights=/nowhere"), "no such folder"),
        (("--set", "model=h3-image", "--set", "weights=builtin"), "ships weights for h3-mini"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(weights, words, said):
    given = () if any("weights=" in str(word) for word in words) else ("--set", weights)
    done = call("plan", *given, *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_recipes_are_listed_with_what_they_are_for():
    done = call("recipes", "list")
    assert "cpu/h3-mini" in done.stdout
    listed = json.loads(call("recipes", "list", "--json").stdout)
    assert any({"name": "cpu/h3-mini", "model": "h3-mini"}.items() <= row.items() for row in listed)
    some = json.loads(call("recipes", "list", "H200", "--json").stdout)
    assert some == [row for row in listed if "h200" in row["name"]]
    assert 0 < len(some) < len(listed)
    none = call("recipes", "list", "zx81")
    assert (none.exit_code, "'zx81': in no recipe's name" in none.stderr) == (2, True)


def test_a_recipe_can_be_printed_as_the_start_of_ones_own(tmp_path):
    done = call("recipes", "show", "cpu/h3-mini", "--yaml")
    mine = tmp_path / "mine.yaml"
    mine.write_text(done.stdout)
    assert "#" in done.stdout, "with the words that explain it"
    assert call("recipes", "validate", mine).exit_code == 0
    same = [json.loads(call("recipes", "show", r, "--json").stdout)["digest"] for r in ("cpu/h3-mini", mine)]
    assert same[0] == same[1]
    refused = call("recipes", "show", "cpu/h3-mini", "--yaml", "--usp", 2)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "Leave --json and flags for keys out" in refused.stderr


def test_validate_tells_right_from_wrong(tmp_path, weights):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(f"model: h3-mini\n{weights.replace('=', ': ')}\n")
    bad.write_text("model: h3-mini\nlayuot: {}\n")
    done = call("recipes", "validate", good)
    assert (done.exit_code, done.stdout) == (0, f"{good}: right\n")
    done = call("recipes", "validate", good, bad, "nowhere")
    assert done.exit_code == 2
    assert done.stdout == f"{good}: right\n"
    assert "line 2: layuot: unknown key. Did you mean 'layout'?" in done.stderr
    assert "recipe nowhere: neither a file" in done.stderr


def test_the_schema_that_is_printed_is_json():
    assert json.loads(call("recipes", "schema").stdout)["title"] == "portable-dit recipe"


def test_python_m_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "portable_dit", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("portable-dit ")
    assert isinstance(app, typer.Typer)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan --image-count -1", "'--image-count': '-1' must be at least 0"),
        ("bench -n 200", "'200' must be at most 128"),
        ("run -p a --seed 1e3", "'--seed': '1e3' must be a whole number"),
        ("run -p a --guidance-scale much", "'much' must be a number"),
        ("serve --port 99999", "'99999' must be at most 65535"),
        ("serve --keep-hours inf", "'inf' must be at most 87600"),
        ("serve --deadline nan", "'nan' must be at"),
        ("serve --max-body-mib 99999999", "must be at most 65536"),
    ],
)
def test_an_option_that_is_wrong_is_told_in_our_words(cli, words, said):
    done = cli(*words.split())
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert "Input should" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve --profile x.json", "Say --enable-diffusion-pipeline-profiler too"),
        ("serve --allow-image-host http://x", "--allow-image-host http://x: not a host"),
        ("serve --cors-origin *", "--cors-origin *: not an origin"),
        ("serve --host 300.1.1.1 --port 0 --jobs jobs", "--host 300.1.1.1: no address of this machine"),
        ("weights init -o /proc/x", "-o /proc/x: cannot be written"),
        ("plan --set model=", "model: null must be text (given as a flag)"),
        ("plan --machine /tmp", "machine '/tmp': a folder, not a file. Known: a100-80gb"),
    ],
)
def test_a_flag_that_could_not_work_is_refused_with_the_way_out(cli, words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = cli(*words.split())
    assert done.exit_code == 2
    assert said in done.stderr
