"""Processes started in ways that nobody plans: streams closed or full, a folder that is gone, odd locales."""

import json
import os
import subprocess
import sys

import pytest

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
COMMAND = f"{sys.executable} -m portable_dit"


def shell(script, *, cwd, **environment):
    """Runs a shell script, in which $PD is our command."""
    return subprocess.run(
        ["bash", "-c", script],
        cwd=cwd,
        env={**ENVIRONMENT, "PD": COMMAND, **environment},
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=120,
        check=False,
    )


@pytest.fixture
def draw(tiny_recipe):
    return f"$PD run --recipe {tiny_recipe} -p 'a red apple' -o a.png"


def test_closed_streams_do_not_keep_a_picture_from_being_drawn(draw, tmp_path):
    done = shell(f"{draw} <&- >&- 2>&-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_prompt_from_a_closed_stdin_is_an_empty_prompt(tiny_recipe, tmp_path):
    done = shell(f"$PD run --recipe {tiny_recipe} -p - <&-", cwd=tmp_path)
    assert done.returncode == 2
    assert "prompt: empty" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_answer_that_cannot_be_written_is_told_and_the_picture_stays(draw, tmp_path):
    done = shell(f"{draw} >/dev/full", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: stdout cannot be written (No space left on device)")
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_an_error_that_cannot_be_told_keeps_its_exit_code(tiny_recipe, tmp_path):
    for stderr in ("2>/dev/full", "2>&-"):
        assert shell(f"$PD run --recipe {tiny_recipe} -p '' {stderr}", cwd=tmp_path).returncode == 2


def test_a_plan_whose_reader_goes_away_is_no_error(tiny_recipe, tmp_path):
    done = shell(f"$PD plan --recipe {tiny_recipe} | true; exit ${{PIPESTATUS[0]}}", cwd=tmp_path)
    assert done.returncode in (0, 141)
    assert done.stderr == ""


def test_a_folder_that_is_gone_is_told(draw, tmp_path):
    done = shell(f"mkdir gone; cd gone; rmdir ../gone; {draw}", cwd=tmp_path)
    assert done.returncode == 2
    assert "does not exist any more" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["utf-8:strict", "latin-1:strict"])
def test_a_path_of_any_bytes_is_written_and_told_in_any_locale(tiny_recipe, tmp_path, encoding):
    name = os.fsdecode(b"\xff") + "🍎.png"
    asked = tmp_path / "a.jsonl"
    asked.write_text(json.dumps({"prompt": "a", "output": name}))
    done = shell(f"$PD run --recipe {tiny_recipe} --prompts a.jsonl", cwd=tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert (tmp_path / name).is_file()
    if encoding == "utf-8:strict":
        assert done.stdout == name + "\n"


def test_several_runs_that_write_one_file_leave_one_whole_picture(tiny_recipe, tmp_path):
    one = f"$PD run --recipe {tiny_recipe} -p 'a red apple' --size 256x256 -o same.png"
    done = shell(f"{one} --seed 1 & {one} --seed 2 & wait; $PD inspect same.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert any(f"seed: {seed}\n" in done.stdout for seed in (1, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["same.png"]
