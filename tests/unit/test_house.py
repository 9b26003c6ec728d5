"""The house rules of the design, read off the source: who imports whom, no vendor words, small files."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "portable_dit"
FILES = sorted(PACKAGE.rglob("*.py"))

# A file imports only from its own row or rows below. Keys are modules or packages; the longest match counts.
ROWS = {
    "portable_dit": 0,
    "portable_dit.errors": 0,
    "portable_dit.paths": 0,
    "portable_dit.yaml_lines": 1,
    "portable_dit.refused_values": 1,
    "portable_dit.recipe": 1,
    "portable_dit.recipe_rules": 1,
    "portable_dit.capabilities": 1,
    "portable_dit.machine_file": 1,
    "portable_dit.models.sizes": 1,
    "portable_dit.models.config_json": 1,
    "portable_dit.models.tiling": 1,
    "portable_dit.models.spec": 1,  # torch-free data that plans are made from
    "portable_dit.layout": 1,
    "portable_dit.fitting": 1,
    "portable_dit.footprint": 1,
    "portable_dit.traffic": 1,
    "portable_dit.scaling": 1,
    "portable_dit.kernel_choice": 1,
    "portable_dit.plan": 1,
    "portable_dit.request": 1,
    "portable_dit.image": 1,
    "portable_dit.png": 1,
    "portable_dit.safetensors_file": 1,
    "portable_dit.host": 1,
    "portable_dit.masks": 2,
    "portable_dit.pieces": 2,
    "portable_dit.piecewise": 2,
    "portable_dit.scaled_products": 2,
    "portable_dit.grouped_products": 2,
    "portable_dit.accelerator": 2,
    "portable_dit.formats": 2,
    "portable_dit.rotation": 2,
    "portable_dit.kernels": 2,
    "portable_dit.backend": 2,
    "portable_dit.plugins": 2,
    "portable_dit.hooks": 2,
    "portable_dit.cpu": 2,
    "portable_dit.ops": 3,
    "portable_dit.sampling": 3,
    "portable_dit.tiles": 3,
    "portable_dit.pixels": 3,
    "portable_dit.probing": 3,
    "portable_dit.trees": 3,
    "portable_dit.models": 4,
    "portable_dit.bind": 5,
    "portable_dit.quantize": 5,
    "portable_dit.offload": 5,
    "portable_dit.lora": 5,
    "portable_dit.weights": 5,
    "portable_dit.slots": 5,
    "portable_dit.shares": 5,
    "portable_dit.manifest": 5,
    "portable_dit.weight_cache": 5,
    "portable_dit.hub": 5,
    "portable_dit.parallel": 5,
    "portable_dit.graphs": 5,
    "portable_dit.prompt_cache": 5,
    "portable_dit.batches": 5,
    "portable_dit.catalog": 6,
    "portable_dit.loading": 6,
    "portable_dit.setup": 6,
    "portable_dit.engine": 6,
    "portable_dit.loaded": 6,
    "portable_dit.drawing": 6,
    "portable_dit.stages": 6,
    "portable_dit.result": 6,
    "portable_dit.workers": 6,
    "portable_dit.cli": 7,
    "portable_dit.server": 7,
    "portable_dit.evaluation": 7,
    "portable_dit.bench": 7,
    "portable_dit.doctor": 7,
    "portable_dit.conformance": 7,
    "portable_dit.__main__": 7,
}
TORCH_FREE_ROWS = (0, 1)
VENDOR_WORDS = re.compile(
    r"(?<![a-z])(cuda|npu|xpu|musa|hip|rocm|nccl|hccl|xccl|mccl|ascend|nvidia|amd|intel|radeon|geforce|mthreads)"
    r"(?![a-z])",
    re.IGNORECASE,
)
MAX_LINES = 500


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def row(module: str) -> int:
    """The row of the longest known name at the start of a module's name."""
    while module not in ROWS:
        module, dot, _ = module.rpartition(".")
        assert dot, "every module of the package has a row"
    return ROWS[module]


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of what a file imports when it runs; imports for type checkers alone are left out."""
    tree = ast.parse(path.read_text())
    checked = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in checked:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            inside = {module_name(file) for file in FILES}
            found += [(node.lineno, name if name in inside else node.module) for name in names]
    return found


def own_imports(path: Path) -> list[tuple[int, str]]:
    return [(line, name) for line, name in imports(path) if name.split(".")[0] == "portable_dit"]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_imports_only_from_its_row_or_below(path):
    mine = row(module_name(path))
    if module_name(path) == "portable_dit":
        return  # its names are loaded lazily, by those who ask for them
    wrong = [
        f"line {line}: {name} is in row {row(name)}, this file in row {mine}"
        for line, name in own_imports(path)
        if row(name) > mine
    ]
    assert not wrong


def test_every_file_has_a_row_of_its_own_or_of_its_package():
    rowless = [
        module_name(path)
        for path in FILES
        if module_name(path) not in ROWS and module_name(path).count(".") == 1
    ]
    assert not rowless, "add these to ROWS, and to the table in docs, where they belong"


@pytest.mark.parametrize("path", [p for p in FILES if "models" in p.parts], ids=module_name)
def test_models_know_no_device_and_no_engine(path):
    allowed = {
        "errors", "paths", "masks", "ops", "models", "capabilities", "sampling", "tiles", "rotation",
        "safetensors_file",
    }  # fmt: skip
    names = {name.split(".")[1] for _, name in own_imports(path) if "." in name}
    assert names <= allowed
    families = {
        name.split(".")[2] for _, name in own_imports(path) if name.startswith("portable_dit.models.")
    }
    own = set(path.parts) & {"h3_image", "hunyuan_image_3"}
    if own:
        shared = {"spec", "sizes", "tiling", "config_json", "random_files"}
        assert families <= own | shared, "a family does not import another family"
    others = {name.split(".")[0] for _, name in imports(path)}
    foreign = {"os", "subprocess", "diffusers", "transformers"}
    if path.name == "qwen.py":  # the text encoder whose layers are transformers' own
        foreign -= {"transformers"}
    assert not others & foreign


@pytest.mark.parametrize("path", [p for p in FILES if row(module_name(p)) == 5], ids=module_name)
def test_what_acts_on_models_imports_no_model(path):
    models = {name for _, name in own_imports(path) if name.startswith("portable_dit.models")}
    assert models <= {"portable_dit.models.spec"}


def test_the_torch_free_rows_import_without_torch():
    names = [module_name(path) for path in FILES if row(module_name(path)) in TORCH_FREE_ROWS]
    names += ["portable_dit.models", "portable_dit.hooks"]
    names += [f"portable_dit.models.h3_image.{name}" for name in ("family", "spec", "places", "tokens")]
    code = f"import sys\nfor name in {names!r}: __import__(name)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_vendor_word_in_the_core(path):
    if path == PACKAGE / "cpu.py":
        return
    lines = path.read_text().splitlines()
    found = [f"line {n}: {line.strip()}" for n, line in enumerate(lines, 1) if VENDOR_WORDS.search(line)]
    assert not found, "ask capabilities what can be done, not who it is"


def test_the_vendor_words_are_found_where_they_are():
    for line in ("torch.cuda.graph", "is_npu()", "NCCL", 'device = "xpu:0"', "x_hip_y"):
        assert VENDOR_WORDS.search(line), line
    for line in ("chip", "ship", "ascending", "amdahl", "input"):
        assert not VENDOR_WORDS.search(line), line


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_can_be_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_no_file_is_named_for_having_no_place():
    banned = {"utils", "helpers", "common", "base", "manager", "misc"}
    assert not [path for path in FILES if path.stem in banned]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_broad_handlers_live_in_plugins_alone(path):
    if path in (PACKAGE / "plugins.py", PACKAGE / "models/h3_image/tokens.py"):
        return  # plugins are foreign code; the library of tokens has no error class of its own
    broad = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException"))
    ]
    assert not broad
