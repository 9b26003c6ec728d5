"""The system prompts that come with a checkpoint. Torch-free.

They are long fixed texts in a Python file of the publisher's. The file is read as a syntax tree and never
run: an assignment of a string to a known name is a prompt, everything else is passed over.
"""

from __future__ import annotations

import ast
from pathlib import Path

from portable_dit.errors import WeightsError

FILE = "system_prompt.py"
# What people call a prompt -> what the file calls it.
NAMES = {
    "en_unified": "unified_system_prompt_en",
    "en_vanilla": "t2i_system_prompt_en_vanilla",
    "en_recaption": "t2i_system_prompt_en_recaption",
    "en_think_recaption": "t2i_system_prompt_en_think_recaption",
}


def read_system_prompts(folder: Path) -> dict[str, str]:
    """The texts by name, as far as the checkpoint has them; {} when it brings no such file."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except PermissionError:
        raise
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:  # the last two: too deep
        raise WeightsError(
            f"{path}: not readable as Python ({error or 'nested too deep'}). Restore it from the checkpoint."
        ) from error
    texts = {
        target.id: statement.value.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    return {name: texts[stored] for name, stored in NAMES.items() if stored in texts}
