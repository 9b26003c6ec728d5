"""Plans of packaged recipes, each on the recorded machine that its folder is named for."""

from pathlib import Path

from portable_dit.capabilities import Capabilities
from portable_dit.machine_file import load_machine
from portable_dit.models.spec import ModelSpec, Workload
from portable_dit.plan import Plan, make_plan
from portable_dit.recipe import load_recipe

MACHINES = Path(__file__).parents[1] / "data" / "machines"
FILE_OF = {
    "a100": "a100-80gb",
    "a2": "ascend-a2",
    "a3": "ascend-a3",
    "a5": "ascend-a5",
    "rtx4090": "rtx-4090",
    "rtx5080": "rtx-5080",
    "rtx5090": "rtx-5090",
    "rtx6000d": "rtx-6000d",
    "rtxpro6000": "rtx-pro-6000",
}


def machine_of(name: str) -> Capabilities:
    """The machine of a recipe "vendor/card/...": the file is named as the card, or as FILE_OF says."""
    card = name.split("/")[1]
    return load_machine(MACHINES / f"{FILE_OF.get(card, card)}.json")


def planned(name: str, workload: Workload, *, spec: ModelSpec, **overrides: object) -> Plan:
    """The strict plan of a recipe on its machine."""
    recipe = load_recipe(name, overrides)
    return make_plan(recipe, spec, machine_of(name), None, workload, strict=True)
