"""Machine files: read strictly, with every mistake told."""

import json
from pathlib import Path

import pytest

from portable_dit.errors import UserError
from portable_dit.machine_file import MAX_BYTES, dump_machine, load_machine, named_machines

MACHINES = sorted((Path(__file__).parents[1] / "data" / "machines").glob("*.json"))


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_a_machine_is_the_same_after_writing_and_reading(path, tmp_path):
    machine = load_machine(path)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(dump_machine(machine)))
    assert load_machine(again) == machine
    assert "float32" in machine.dtypes
    assert machine.device.total_bytes > 0


def test_there_are_machines_of_every_kind():
    backends = {load_machine(path).device.backend for path in MACHINES}
    assert backends == {"cpu", "cuda", "rocm", "xpu", "ascend", "musa"}


def test_all_mistakes_of_a_machine_file_are_told(tmp_path):
    data = json.loads(MACHINES[0].read_text())
    data["colour"] = 1
    data["count"] = "2"
    data["device"]["size"] = 2
    del data["dtypes"]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError) as caught:
        load_machine(path)
    for words in (
        "colour: unknown key",
        "count: '2' must be a whole number",
        "device.size: unknown key. Known: arch",
        "dtypes: missing",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00", b"null", b" " * (MAX_BYTES + 1)])
def test_what_is_no_machine_file_is_refused(tmp_path, content):
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="machine"):
        load_machine(path)


def test_a_machine_that_comes_with_the_package_is_found_by_name(cli):
    assert set(named_machines()) == {path.stem for path in MACHINES}
    assert load_machine("h200") == load_machine(named_machines()["h200"])
    assert cli("plan", "--machine", "cpu-bf16").exit_code == 0


def test_a_machine_that_is_not_there_lists_those_that_are(tmp_path, cli):
    refused = cli("plan", "--machine", "h20")
    assert refused.exit_code == 2
    for said in ("machine 'h20': neither a file nor", "Did you mean 'h200'?", *named_machines(), "copy /"):
        assert said in refused.stderr
    with pytest.raises(UserError, match="neither a file nor a machine's name"):
        load_machine(tmp_path / "none.json")
    with pytest.raises(UserError, match="a folder, not a file"):
        load_machine(tmp_path)
