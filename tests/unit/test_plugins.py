"""Discovery of plugins that are really installed: distributions with entry points in a folder on sys.path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plugin_shelf import BACKEND, Shelf

from portable_dit.errors import BackendError
from portable_dit.plugins import (
    Additions,
    Plugins,
    PluginStatus,
    load_additions,
    load_plugins,
    select_backend,
)


def status(plugins: Plugins, name: str) -> PluginStatus:
    return next(s for s in plugins.status if s.name == name)


def test_without_plugins_there_is_the_built_in_backend_through_the_same_hook() -> None:
    plugins = load_plugins()
    assert status(plugins, "cpu").ok
    assert status(plugins, "cpu").origin == "built in"
    assert select_backend(None, plugins).id == "cpu"


def test_the_only_backend_with_a_device_is_taken(shelf: Shelf) -> None:
    shelf.backend("alpha")
    shelf.backend("beta", devices=0)
    plugins = load_plugins()
    assert select_backend(None, plugins).id == "alpha"
    assert select_backend("auto", plugins).id == "alpha"
    assert select_backend("cpu", plugins).id == "cpu"
    assert status(plugins, "alpha").devices == ("alpha card",)


def test_the_host_is_taken_when_no_other_backend_has_a_device(shelf: Shelf) -> None:
    shelf.backend("beta", devices=0)
    assert select_backend().id == "cpu"


def test_two_backends_with_devices_are_ambiguous_and_both_named(shelf: Shelf) -> None:
    shelf.backend("alpha")
    shelf.backend("beta")
    with pytest.raises(BackendError, match=r"2 backends have a device here: alpha, beta\. Name one"):
        select_backend()
    assert select_backend("beta").id == "beta"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_library_at_all", "No module named 'no_such_library_at_all'"),
        ("raise OSError('libdriver.so: cannot open')", "OSError: libdriver.so"),
        ("def broken(:", "SyntaxError"),
        (
            "from portable_dit.hooks import hookimpl\n@hookimpl\ndef portable_dit_nonsense(): return []",
            "unknown hook",
        ),
        (
            "from portable_dit.hooks import hookimpl\n@hookimpl\ndef portable_dit_backends(wrong): return []",
            "wrong",
        ),
        (
            "from portable_dit.hooks import hookimpl\n@hookimpl\ndef portable_dit_backends(): return 1 / 0",
            "portable_dit_backends raised ZeroDivisionError",
        ),
        (
            "from portable_dit.hooks import hookimpl\n@hookimpl\n"
            "def portable_dit_backends(): return [object()]",
            "object is not a portable_dit.backend.Backend",
        ),
        (
            "from portable_dit.hooks import hookimpl\n@hookimpl\ndef portable_dit_backends(): return 7",
            "must return a list",
        ),
        (BACKEND.format(id="broken", devices=1, version=99), "api_version 99"),
        (BACKEND.format(id="broken", devices=1, version=None), "must set id and api_version"),
        (BACKEND.format(id="broken", devices="1 / 0", version=1), r"devices\(\) of backend 'broken' raised"),
        (BACKEND.format(id="cpu", devices=1, version=1), "'cpu' is already taken"),
        (
            BACKEND.format(id="broken", devices=1, version=1)
            + "\n@hookimpl\ndef portable_dit_attention_kernels(backend): raise KeyError('x')\n",
            "portable_dit_attention_kernels raised KeyError",
        ),
    ],
)
def test_a_broken_plugin_is_shown_with_its_reason_and_the_others_work(
    shelf: Shelf, source: str, reason: str
) -> None:
    shelf.install("broken", source)
    shelf.backend("zeta")
    plugins = load_plugins()
    found = status(plugins, "broken")
    assert not found.ok
    with pytest.raises(BackendError, match=reason):
        select_backend("broken", plugins)
    assert set(plugins.backends) == {"cpu", "zeta"}
    assert select_backend(None, plugins).id == "zeta"


def test_a_named_backend_without_a_device_is_refused(shelf: Shelf) -> None:
    shelf.backend("beta", devices=0)
    with pytest.raises(BackendError, match="'beta' was asked for and finds no device"):
        select_backend("beta")


def test_a_backend_without_a_device_says_why_it_has_none(shelf: Shelf) -> None:
    shelf.backend("beta", devices=0, more="\nSome.absence = lambda self: 'no driver 580'\n")
    found = status(load_plugins(), "beta")
    assert (found.ok, found.devices, found.reason) == (True, (), "no driver 580")
    with pytest.raises(BackendError, match="finds no device here: no driver 580"):
        select_backend("beta")


def test_an_unknown_backend_names_the_near_one(shelf: Shelf) -> None:
    shelf.backend("alpha")
    with pytest.raises(BackendError, match=r"'alpa' is not installed.*Did you mean 'alpha'.*alpha, cpu"):
        select_backend("alpa")


def test_a_vendors_backend_that_is_missing_is_installed_from_a_clone(shelf: Shelf) -> None:
    with pytest.raises(BackendError) as caught:
        select_backend("musa")
    # No index has it, so that a name for an index would bring nothing, or something of another's.
    assert "In a clone of portable-dit, type: pip install ./backends/musa." in str(caught.value)
    assert "portable-dit[" not in str(caught.value)


def test_kernels_of_another_plugin_come_after_the_own_ones(shelf: Shelf) -> None:
    shelf.install(
        "extra",
        """
from portable_dit.backend import AttentionKernel, FusedOp, LinearKernel
from portable_dit.hooks import hookimpl

class Mine(AttentionKernel):
    id = "mine"

@hookimpl
def portable_dit_attention_kernels(backend):
    return [Mine()] if backend == "cpu" else []

@hookimpl
def portable_dit_linear_kernels():
    return [LinearKernel("mxfp8", "mine")]

@hookimpl
def portable_dit_fused_ops():
    return [FusedOp("swiglu", "mine", len), FusedOp("new_seam", "mine", len)]

@hookimpl
def portable_dit_recipe_folders():
    return ["/somewhere"]
""",
    )
    plugins = load_plugins()
    assert status(plugins, "extra").ok
    lists = plugins.backends["cpu"].kernel_lists()
    assert [k.id for k in lists.attention][-1] == "mine"
    assert [k.id for k in lists.linear["mxfp8"]] == ["emulated", "mine", "plain"]
    assert [k.id for k in lists.fused["swiglu"]][-1] == "mine"
    assert [k.id for k in lists.fused["new_seam"]] == ["mine"]
    assert plugins.backends["cpu"].attention_kernel("mine").id == "mine"
    assert load_additions() == Additions(families=(), recipe_folders=(Path("/somewhere"),))


def test_the_command_lists_every_plugin_as_json(shelf: Shelf) -> None:
    shelf.backend("alpha")
    shelf.install("broken", "import no_such_library_at_all")
    path = os.pathsep.join([str(shelf.folder), *filter(None, sys.path)])
    run = subprocess.run(
        [sys.executable, "-c", "from portable_dit.cli import main; main()", "backends", "--json"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    data = json.loads(run.stdout)
    by_name = {plugin["name"]: plugin for plugin in data["plugins"]}
    assert [by_name[n]["ok"] for n in ("cpu", "alpha", "broken")] == [True, True, False]
    assert "no_such_library_at_all" in by_name["broken"]["reason"]
    assert data["backends"]["alpha"][0]["name"] == "alpha card"


def test_loading_plugins_leaves_global_settings_alone() -> None:
    before = (torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed(), dict(os.environ))
    load_plugins()
    after = (torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed(), dict(os.environ))
    assert before == after
