"""`python -m portable_dit_ascend`: the devices, what each can do, and what is in the way."""

from __future__ import annotations

import torch

from portable_dit_ascend import device
from portable_dit_ascend.backend import describe


def main() -> None:
    print(f"torch {torch.__version__}")
    reason = device.absence()
    if reason is not None:
        print(f"no device: {reason}")
        return
    found = device.devices()
    for one in found:
        can = describe(one, count=len(found))
        size = f"{one.total_bytes / 2**30:.1f} GiB"
        print(f"{one.torch_device}  {one.name}  {one.arch}  {size}  {one.driver or ''}")
        if one.arch not in device.SERVED:
            print(f"  not served: this package knows {', '.join(device.SERVED)}")
        print(f"  computes in {', '.join(sorted(can.dtypes))}; float64 no")
        print(
            f"  multiplies {', '.join(sorted(can.native_formats)) or 'no 8-bit format'} in its matrix units"
        )
        print("  graphs on request; a failed capture ends the process")


if __name__ == "__main__":
    main()
