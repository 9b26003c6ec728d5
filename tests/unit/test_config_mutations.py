"""Every value of every config of a checkpoint, changed to what no model has: one message with the file and
the key, or a model whose bytes can be counted. Nothing hangs, and nothing else is raised.
"""

import copy
import json
from dataclasses import replace

import pytest
from h3_tiny import CONFIG, WORDS
from mini_configs import write_configs

from portable_dit.errors import WeightsError
from portable_dit.models import read_spec
from portable_dit.models.h3_image.qwen_config import TINY_QWEN
from portable_dit.models.h3_image.qwen_files import write_qwen_files
from portable_dit.models.hunyuan_image_3 import random_checkpoint as hunyuan
from portable_dit.models.spec import COMPONENTS, Numbers, Workload
from portable_dit.request import size_problem

WRONG = (0, -1, 1e30, 10**30, float("nan"), "x", None)


def small(folder):
    """H3-Image with the small text encoder."""
    write_configs(folder, CONFIG)
    (folder / "text_encoder" / "vocab.txt").write_text("\n".join(WORDS))


def large(folder):
    """H3-Image with the big one, whose configs are two files."""
    dit = replace(CONFIG.dit, text_dim=TINY_QWEN.hidden_size)
    write_configs(folder, replace(CONFIG, dit=dit, text=TINY_QWEN))
    write_qwen_files(folder, TINY_QWEN)


def mixture(folder):
    hunyuan.write_configs(folder, hunyuan.TINY)


def leaves(value, path=()):
    """Where each value stands; of a list the list itself and its first item."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path
        if isinstance(value, list):
            yield (*path, 0)


def changed(root, path, value):
    root = copy.deepcopy(root)
    at = root
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return root


def count(model, folder):
    """What a plan asks of a spec."""
    spec = read_spec(model, folder)
    workload = Workload(*spec.sizes.default, spec.prompt_tokens)
    for component in COMPONENTS:
        assert spec.bytes_on_device(component, workload, Numbers("float32", "int8_row")).weights > 0
    assert spec.rows(workload) > 0
    assert all(request.rows > 0 for _, request in spec.attention_requests(workload, "float32"))
    assert spec.fusion_requests("dit", "float32")
    assert sum(len(group.names()) for group in spec.linears) < 10**6
    assert size_problem(*spec.sizes.nearest(1000, 10), spec.sizes) is None


@pytest.mark.parametrize(
    ("model", "write", "file"),
    [
        ("hunyuan-image-3", mixture, "config.json"),
        ("hunyuan-image-3", mixture, "generation_config.json"),
        ("h3-image", small, "model_index.json"),
        ("h3-image", small, "transformer/config.json"),
        ("h3-image", small, "vae/config.json"),
        ("h3-image", small, "scheduler/scheduler_config.json"),
        ("h3-image", small, "text_encoder/config.json"),
        ("h3-image", large, "text_encoder/config.json"),
        ("h3-image", large, "processor/preprocessor_config.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_with_a_wrong_value_is_refused_by_file_and_key_or_counted(tmp_path, model, write, file):
    write(tmp_path)
    count(model, tmp_path)
    path, refused = tmp_path / file, 0
    raw = json.loads(path.read_text())
    for place in leaves(raw):
        key = next(part for part in reversed(place) if isinstance(part, str))
        for value in WRONG:
            path.write_text(json.dumps(changed(raw, place, value)))
            try:
                count(model, tmp_path)
            except WeightsError as error:
                said, refused = str(error), refused + 1
                assert key in said or key == "model_type", (place, value, said)
                assert file in said or str(tmp_path) in said or "block canvas" in said, (place, value, said)
                assert len(said) < 1000
    assert refused > len(WRONG)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts", "hidden_size", "moe_topk"])
def test_a_size_without_end_is_refused_with_the_largest_there_is(tmp_path, key):
    mixture(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, key: 10**30}))
    with pytest.raises(WeightsError, match=rf"config\.json: {key} = 1000000000000.* must be at most "):
        read_spec("hunyuan-image-3", tmp_path)


@pytest.mark.parametrize("depth", [2, 900])
def test_lists_in_lists_are_refused_however_deep(tmp_path, depth):
    write_configs(tmp_path, CONFIG)
    path = tmp_path / "transformer" / "config.json"
    rest = json.dumps(json.loads(path.read_text()))[1:]
    key = '"hidden_size": '
    assert key in rest
    path.write_text("{" + rest.replace(key, key + "[" * depth + "1" + "]" * depth + ', "x": '))
    with pytest.raises(WeightsError, match=r"transformer/config\.json: hidden_size = "):
        read_spec("h3-image", tmp_path)
