"""Empty driver libraries, so that the real torch_npu can be imported on a machine without CANN.

    python driver_stubs.py UNPACKED_WHEEL OUT

makes in OUT a library for each that torch_npu needs and this system lacks, with every symbol that it looks
for. All functions answer 1, which is an error: no device is ever found, and nothing computes. What works is
what needs no device: the operators' schemas and the vendor's own meta kernels, which check shapes and types.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

SYSTEM = (
    "libc.so.6",
    "libm.so.6",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
)
OURS = re.compile(r"libc10|libtorch|libtensorpipe|libnpu_profiler|ld-linux|libpython|^_|^\[")
CHIP = "Ascend910B4"  # some meta kernels ask for which chip they check
TEXT = re.compile(r"(Msg|Name|String)$")  # these give a text, for which an error number is no pointer
DATA = ("_ZTV", "_ZTI", "_ZTS", "_ZGV", "_ZTT")  # tables and names of C++ classes, which are no functions


def names(library: Path, which: str) -> set[str]:
    """Dynamic symbols of a library: which is "undefined" or "defined"."""
    done = subprocess.run(
        ["nm", "-D", f"--{which}-only", library], capture_output=True, text=True, check=True
    )
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines() if " w " not in line}


def needed(library: Path) -> set[str]:
    done = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    return set(re.findall(r"NEEDED.*\[(.*)\]", done.stdout))


def source(symbols: Iterable[str]) -> str:
    """C that defines them all."""
    lines = []
    for number, symbol in enumerate(sorted(symbols)):
        if symbol.startswith(DATA):
            lines.append(f'char d{number}[512] __asm__("{symbol}") = {{0}};')
        elif TEXT.search(symbol):
            text = CHIP if "SocName" in symbol else ""
            function = f"char *f{number}(void)"
            lines.append(f'{function} __asm__("{symbol}"); {function} {{ return "{text}"; }}')
        else:
            lines.append(f'int f{number}(void) __asm__("{symbol}"); int f{number}(void) {{ return 1; }}')
    return "\n".join(lines) + "\n"


def make_stubs(wheel: Path, out: Path) -> list[Path]:
    """The libraries in out; the first holds all symbols, and the others need it."""
    out.mkdir(parents=True, exist_ok=True)
    libraries = [path for path in (wheel / "torch_npu").rglob("*.so") if "dynamo" not in path.parts]
    lacking = sorted({name for path in libraries for name in needed(path)} - set(SYSTEM))
    lacking = [name for name in lacking if not OURS.search(name)]
    wanted = set().union(*(names(path, "undefined") for path in libraries))
    there = [path for path in (Path(torch.__file__).parent / "lib").glob("*.so*") if path.is_file()]
    system = [found for name in SYSTEM if (found := _system(name)) is not None]
    known = set().union(*(names(path, "defined") for path in (*libraries, *there, *system)))
    symbols = {s for s in wanted - known if not s.startswith(("Py", "_Py", "__cxa", "__gmon"))}
    (out / "stubs.c").write_text(source(symbols))
    first, *others = lacking
    made = [out / first]
    _compile(made[0], [str(out / "stubs.c")])
    for name in others:
        made.append(out / name)
        _compile(made[-1], ["-x", "c", "/dev/null", "-x", "none", "-Wl,--no-as-needed", str(made[0])])
    return made


def _compile(library: Path, arguments: list[str]) -> None:
    command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "-Wl,-rpath,$ORIGIN"]
    subprocess.run([*command, "-o", str(library), *arguments], check=True)


def _system(name: str) -> Path | None:
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    found = Path(done.stdout.strip())
    return found if found.is_absolute() and found.exists() else None


if __name__ == "__main__":
    for path in make_stubs(Path(sys.argv[1]), Path(sys.argv[2])):
        print(path)
