"""`python -m portable_dit_xpu`: the devices, what each can do, and what is in the way."""

from __future__ import annotations

import torch

from portable_dit_xpu import device, extension
from portable_dit_xpu.backend import describe


def main() -> None:
    print(f"torch {torch.__version__}, {'built' if torch.xpu._is_compiled() else 'not built'} for XPU")
    advice = extension.advice()
    if advice is not None:
        print(advice)
    reason = device.absence()
    if reason is not None:
        print(f"no device: {reason}")
        return
    found = device.devices()
    for one in found:
        can = describe(one, count=len(found))
        print(f"{one.torch_device}  {one.name}  {one.arch}  {one.total_bytes / 2**30:.1f} GiB")
        print(f"  computes in {', '.join(sorted(can.dtypes))}; float64 {'yes' if can.float64 else 'no'}")
        print(
            f"  multiplies {', '.join(sorted(can.native_formats)) or 'no 8-bit format'} in its matrix units"
        )
        print(f"  graphs {'on request' if can.graphs.supported else 'need torch 2.11'}")


if __name__ == "__main__":
    main()
