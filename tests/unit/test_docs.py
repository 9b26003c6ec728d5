"""The documents say what the code does: rows, links, and commands that exist."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from test_house import ROWS

from portable_dit.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rows_in_design() -> dict[str, int]:
    """Module -> row, from the table of docs/design.md."""
    found = {}
    for line in (ROOT / "docs" / "design.md").read_text().splitlines():
        if row := re.match(r"\| (\d) \|", line):
            names = re.findall(r"`([\w.]+)`", line.rsplit("|", 2)[1])
            found |= {f"portable_dit.{name}": int(row[1]) for name in names}
    return found


def test_the_table_of_rows_is_that_of_the_imports():
    built = {
        name: row
        for name, row in ROWS.items()
        if (path := ROOT.joinpath(*name.split("."))).is_dir() or path.with_suffix(".py").is_file()
    }
    built.pop("portable_dit")
    assert rows_in_design() == built


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    dead = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not dead


def commands(page: Path) -> list[str]:
    """What follows `portable-dit` in the lines of code blocks, fenced or indented."""
    found, fenced = [], False
    for line in page.read_text().replace("\\\n", " ").splitlines():
        fenced ^= line.startswith("```")
        if line.lstrip().startswith("portable-dit ") and (fenced or line.startswith("    ")):
            found.append(line.split(maxsplit=1)[1])
    return found


@pytest.mark.parametrize(
    "line", [line for page in PAGES for line in commands(page)], ids=lambda line: line[:40]
)
def test_every_command_in_the_documents_exists_with_its_options(line):
    """Reads the options as the command would, and runs nothing."""
    words, command = shlex.split(line, comments=True), typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands
        command, words = command.commands[words[0]], words[1:]
    with command.make_context("portable-dit", words):
        pass


@pytest.mark.parametrize("page", ["h3-image.md", "hunyuan-image-3.md"])
def test_what_a_page_draws_with_made_up_weights_is_drawn(page, cli, tmp_path, monkeypatch):
    """As it is written there, from the command that makes the weights on."""
    lines = commands(ROOT / "docs" / page)
    (first,) = (place for place, line in enumerate(lines) if line.startswith("weights init"))
    examples = [line for line in lines[first:] if "weights=tiny" in line]
    assert examples
    monkeypatch.chdir(tmp_path)
    for line in (lines[first], *examples):
        done = cli(*shlex.split(line))
        assert done.exit_code == 0, done.stderr
    assert {line.split()[-1] for line in examples} == {made.name for made in tmp_path.glob("*.png")}


@pytest.mark.parametrize("line", ["draw --prompt x", "run --recipee cpu/h3-mini", "recipes list rtx extra"])
def test_a_command_that_does_not_exist_is_found(line):
    with pytest.raises(Exception, match=r"draw|No such option|unexpected extra"):
        test_every_command_in_the_documents_exists_with_its_options(line)


def planned(cli, recipe: str, machine: str) -> dict[str, Any]:
    done = cli("plan", "--recipe", recipe, "--machine", machine, "--json")
    assert done.exit_code == 0, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def test_the_verdict_that_the_first_page_quotes_is_the_one_of_its_command(cli):
    text = (ROOT / "README.md").read_text()
    recipe, machine = re.findall(r"portable-dit plan --recipe (\S+) --machine (\S+)", text)[0]
    (quoted,) = re.findall(r"`(fits: [^`]+)`", text)
    assert planned(cli, recipe, machine)["verdict"].startswith(quoted)


def test_the_peaks_of_hunyuan_image_in_its_page_are_those_of_plans(cli):
    text = (ROOT / "docs" / "hunyuan-image-3.md").read_text()
    rows = re.findall(r"^\| `(h[12]00)/…(-\S+?)`.*\| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    for machine, name, runtime, peak in rows:
        sizes = planned(cli, f"nvidia/{machine}/hunyuan-image-3{name}", machine)["bytes"]
        assert f"{sizes['peak'] / 1e9:.1f}" == peak, name
        assert runtime == f"{700 * 2**20 / 1e9:.2f}"
