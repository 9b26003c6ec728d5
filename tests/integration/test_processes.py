"""What only a process of its own can show: Ctrl-C, a full disk, a closed pipe, a cold start."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "portable_dit"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(*arguments, **options):
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        **options,
    )


def test_ctrl_c_in_the_middle_exits_130_and_leaves_only_whole_files(tiny_recipe, tmp_path):
    """Pictures that were complete before stay; of the one in the making there is nothing."""
    out = tmp_path / "out.png"
    process = start(
        "run", "--recipe", tiny_recipe, "-p", "a red apple", "-n", 128, "--size", "256x256", "-o", out
    )
    try:
        first = process.stdout.readline()  # one picture is done, so it is drawing
        assert first.strip() == str(tmp_path / "out-001.png")
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.strip() == "interrupted"
    written = sorted(path.name for path in tmp_path.iterdir())
    assert len(written) < 128
    assert written == [line.rsplit("/", 1)[1] for line in (first + rest).split()]


STUCK = """
import sys, time
from portable_dit.backend import API_VERSION
from portable_dit.cpu import CpuBackend
from portable_dit.hooks import hookimpl

class Backend(CpuBackend):
    id = "stuck"
    api_version = API_VERSION
    calls = 0

    def synchronize(self, device):
        self.calls += 1
        if self.calls == 5:  # after loading and some stages: in a step
            print("stuck", flush=True)
            time.sleep(600)

@hookimpl
def portable_dit_backends():
    return [Backend()]
"""


def test_ctrl_c_ends_the_process_though_a_step_goes_on_and_on(tiny_recipe, tmp_path, shelf):
    """A step of a large model may take minutes, and a thread cannot be stopped inside a kernel."""
    shelf.install("stuck", STUCK)
    process = subprocess.Popen(
        [*COMMAND, "run", "--recipe", str(tiny_recipe), "--set", "device.backend=stuck", "-p", "a red apple"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "PYTHONPATH": str(shelf.folder)},
        cwd=tmp_path,
    )
    try:
        assert process.stdout.readline() == "stuck\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert list(tmp_path.glob("*.png")) == []


# Ctrl-C by the process itself, at a moment that a clock would not hit: when it imports a module, or ends.
INTERRUPTED_AT = """
import atexit, os, signal, sys

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

class Finder:
    def find_spec(self, name, *more):
        if name == {moment!r}:
            interrupt()

sys.meta_path.insert(0, Finder())
if {moment!r} == "the end":
    atexit.register(interrupt)
if {moment!r} == "the commands":
    import typer.main
    typer.main.get_command = lambda app: interrupt()
from portable_dit.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("typer", ""),
        ("portable_dit.cli.run", ""),
        ("the commands", ""),
        ("yaml", "interrupted\n"),
        ("the end", ""),
    ],
)
def test_ctrl_c_at_any_moment_of_a_command_is_quiet(moment, said):
    code = INTERRUPTED_AT.format(moment=moment)
    command = [sys.executable, "-c", code, "recipes", "show", "cpu/h3-mini"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, said)


def test_ctrl_c_that_the_shell_keeps_from_a_background_job_does_not_stop_it():
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + INTERRUPTED_AT.format(
        moment="yaml"
    )
    command = [sys.executable, "-c", code, "recipes", "show", "cpu/h3-mini"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "h3-mini" in done.stdout


def test_a_disk_that_fills_up_while_writing_leaves_nothing(tiny_recipe, tmp_path):
    """A limit on file size fails the write just where a full disk would."""
    out = tmp_path / "out.png"
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        "from portable_dit.cli import main; main()"
    )
    arguments = [
        "run",
        "--recipe",
        str(tiny_recipe),
        "-p",
        "a red apple",
        "-o",
        str(out),
        "--size",
        "256x256",
    ]
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "cannot be written" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a small file system of its own")
def test_a_really_full_file_system_is_refused_before_loading(tiny_recipe, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this process may not mount")
    try:
        process = start(
            "run", "--recipe", tiny_recipe, "-p", "a red apple", "--size", "256x256", "-o", place / "a.png"
        )
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 2
        assert "196,608 bytes are needed" in errors
        assert output == ""
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_on_a_terminal_there_is_progress_and_the_answer_still_goes_to_stdout(tiny_recipe, tmp_path):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    out = tmp_path / "out.png"
    command = [*COMMAND, "run", "--recipe", str(tiny_recipe), "-p", "a red apple", "-n", "2", "-o", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=ENVIRONMENT)
    os.close(theirs)
    shown = b""
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        # Linux raises when nobody holds the other end any more.
        while block := terminal.read(65536):
            shown += block
    answer, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert answer.split() == [str(tmp_path / name) for name in ("out-1.png", "out-2.png")]
    assert b"loading" in shown
    assert b"out-1.png" not in shown


def test_a_reader_that_goes_away_is_no_error(tiny_recipe, tmp_path):
    process = start("run", "--recipe", tiny_recipe, "-p", "a red apple", "-n", 3, "-o", tmp_path / "out.png")
    process.stdout.close()
    with process.stderr:
        errors = process.stderr.read()
    assert process.wait(timeout=60) == 141  # 128 + SIGPIPE, as shells say it
    assert errors == ""
    assert (tmp_path / "out-1.png").is_file()


def test_a_cold_run_imports_neither_the_compiler_nor_other_model_libraries(tiny_recipe, tmp_path):
    """Each of these costs up to seconds at every start: torch's compiler two of them."""
    arguments = ["run", "--recipe", str(tiny_recipe), "-p", "a red apple", "-o", str(tmp_path / "a.png")]
    code = (
        "import sys\nfrom portable_dit.cli import app\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        "slow = {'torch._dynamo', 'torch._inductor', 'transformers', 'diffusers', 'sympy', 'rich'}\n"
        "print(sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom portable_dit.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'PIL', 'pydantic'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "run" in done.stdout


MEMORY_CODE = """
import resource, sys, torch
from pathlib import Path
from portable_dit import Engine, Request
from portable_dit.errors import DeviceMemoryError

def address_space():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmSize"].split()[0]) * 1024

engine = Engine.load(sys.argv[1])
before = engine.generate(Request("a red apple", seed=3)).images[0].pixels
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (address_space() + 40 * 2**20, limits[1]))
try:
    engine.generate(Request("a red apple", size=(2048, 2048)))
except DeviceMemoryError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, limits)
after = engine.generate(Request("a red apple", seed=3)).images[0].pixels
assert (before == after).all()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits address space the Linux way")
def test_running_out_of_memory_says_what_was_resident_and_the_engine_goes_on(tmp_path, make_checkpoint):
    folder = make_checkpoint(tmp_path / "large", max_side=2048, max_pixels=2048 * 2048)
    recipe = tmp_path / "large.yaml"
    recipe.write_text(f"model: h3-mini\nweights: {folder}\ndevice: {{backend: cpu}}\nprecision: float32\n")
    command = [sys.executable, "-c", MEMORY_CODE, str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert "h3-mini at 2048x2048: out of memory during" in done.stdout
    assert "Weights: text_encoder" in done.stdout
    assert "Draw a smaller picture" in done.stdout
    assert "offload" not in done.stdout, "there is no other memory to move weights to"
