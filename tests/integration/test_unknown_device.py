"""A device that nobody makes, under a name that no file of portable_dit knows: nothing assumes a name.

Its backend is the smallest there is (tests/mock_vendor/spork), and its machine is mocked, so this also shows
that the mocked machine refuses what a device refuses.
"""

from __future__ import annotations

import json

import pytest
from mock_vendor.mutants import assert_all_seen
from mock_vendor.pictures import assert_draws_as_the_host
from mock_vendor.process import ROOT, MockedMachine, Mutation


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    home = ROOT / "tests" / "mock_vendor" / "spork"
    return MockedMachine("spork", "", tmp_path_factory.mktemp("machine"), home=home)


def test_it_is_found_named_and_used_without_being_asked_for(machine):
    listed = json.loads(machine.command("backends", "--json").stdout)
    status = {s["name"]: s for s in listed["plugins"]}["spork"]
    assert (status["ok"], status["devices"], status["reason"]) == (True, ["Spork One"], None)


def test_it_draws_the_picture_of_the_host_with_weights_on_the_device_and_streamed(machine):
    said = assert_draws_as_the_host(machine, precision="bfloat16")
    assert said["backend"] == "spork"
    streamed = {"offload__dit": "layerwise", "offload__resident_blocks": "1", "offload__vae": "component"}
    assert_draws_as_the_host(machine, precision="float32", **streamed)


MUTATIONS = [
    Mutation("__init__.py", "self._stream.wait_event(mark.event)", "pass", "transfer"),
    Mutation("__init__.py", "event.record(self._stream)", "event.record(torch.spork.Stream())", "transfer"),
    Mutation("__init__.py", 'f"spork:{i}"', '"cpu"', "identity"),
    Mutation("__init__.py", "count=len(self.devices())", "count=8", "identity"),
    Mutation("__init__.py", "float64=False", "float64=True", "identity"),
    Mutation("__init__.py", "torch.spork.mem_get_info(device.index)", "(1 << 32, 1 << 32)", "identity"),
]


def test_faults_of_lanes_devices_and_memory_are_seen(machine):
    assert_all_seen(machine, MUTATIONS)


REFUSED = [
    ("torch.ones(2, device='spork') + torch.ones(2)", "same device"),
    ("torch.ones(2, device='spork').numpy()", "can't convert spork"),
    ("torch.ones(2, device='spork:3')", "invalid device ordinal"),
    ("torch.ones(2, device='spork').double()", "has no torch.float64"),
    ("torch.empty(1 << 33, dtype=torch.uint8, device='spork')", "mock device"),
]


TRY_EACH = """
import sys, torch
for line in sys.argv[1:]:
    try:
        exec(line)
        print("it went through")
    except (RuntimeError, TypeError) as error:
        print(" ".join(str(error).split()))
"""


def test_the_mocked_device_refuses_what_a_device_refuses(machine):
    done = machine.python("-c", TRY_EACH, *(code for code, _ in REFUSED))
    for said, (code, message) in zip(done.stdout.splitlines(), REFUSED, strict=True):
        assert message in said, code


CAPTURE = """
import torch
from mock_vendor.device import KINDS
from mock_vendor.streams import GraphRules, graph_types
Graph, graph = graph_types(KINDS["spork"], GraphRules(max_live=2), first_name="g")
x = torch.zeros(3, device="spork")
g = Graph()
with graph(g, pool=None, stream=None):
    y = (x + 1) * 2
x.fill_(4)
assert y.tolist() == [2, 2, 2]
g.replay()
assert y.tolist() == [10, 10, 10], y
try:
    with graph(Graph()):
        y.sum().item()
except RuntimeError as error:
    assert "capturing" in str(error)
else:
    raise AssertionError("a capture that waits for the device")
more = [Graph() for _ in range(2)]
with graph(more[0]):
    x + 1
try:
    with graph(more[1]):
        x + 1
except RuntimeError as error:
    assert "no more can be made" in str(error)
print("done")
"""


def test_a_mocked_graph_is_a_tape_over_the_memory_it_was_recorded_with(machine):
    done = machine.python("-c", CAPTURE)
    assert done.stdout == "done\n", done.stderr


LATE = """
import torch
host = torch.ones(4, pin_memory=True)
assert host.is_pinned()
there = torch.zeros(4, device="spork")
side = torch.spork.Stream()
with torch.spork.stream(side):
    there.copy_(host, non_blocking=True)
assert torch.isnan(there.cpu()).all()
side.synchronize()
assert there.tolist() == [1, 1, 1, 1]
print("done")
"""


def test_a_copy_on_a_second_stream_arrives_only_when_somebody_waits_for_it(machine):
    done = machine.python("-c", LATE)
    assert done.stdout == "done\n", done.stderr


IN_USE = """
from mock_vendor.device import KINDS
from portable_dit.catalog import load_recipe
from portable_dit.plugins import select_backend
from portable_dit.setup import look_at, set_up
one, two = (
    load_recipe("cpu/h3-mini", {"device.backend": "spork", "layout.tensor": ranks}) for ranks in (1, 2)
)
spork = select_backend("spork")
for gib in (0, 0.03, 3):
    KINDS["spork"].memory[0].live = int(gib * 2**30)
    size = set_up(one).plan.bytes
    apart = look_at(spork, spork.devices()[0], two).used_bytes
    print(size.device_limit / 2**30, size.in_use / 2**30, apart)
"""


def test_what_other_programs_hold_is_seen_where_one_device_has_the_whole_model(machine):
    done = machine.python("-c", IN_USE)
    assert done.stdout.split("\n") == ["4.0 0.0 0", "4.0 0.0 0", "1.0 3.0 0", ""], done.stderr
