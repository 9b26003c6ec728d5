"""`python -m portable_dit_musa`: the devices, and whether MATE is used here or why not."""

from __future__ import annotations

import torch

from portable_dit_musa import chips, device
from portable_dit_musa.probe import probe_mate


def main() -> None:
    print(f"torch {torch.__version__}")
    reason = device.absence()
    if reason is not None:
        print(f"no device: {reason}")
        return
    for found in device.devices():
        print(f"{found.torch_device}  {found.name}  {found.arch}  {found.total_bytes / 2**30:.1f} GiB")
        mate = probe_mate(found.index, found.arch)
        print(f"  mate         {mate.version or mate.reason}")
        libraries = frozenset({chips.MATE} if mate.version else ())
        formats = chips.native_formats(found.arch, libraries)
        print(f"  multiplies   {', '.join(sorted(formats)) or 'no 8-bit format'} in its matrix units")


if __name__ == "__main__":
    main()
