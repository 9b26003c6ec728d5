"""`python -m portable_dit_rocm`: the devices, and why each optional kernel library is used here or not."""

from __future__ import annotations

import torch

from portable_dit_rocm import chips, device
from portable_dit_rocm.probe import probe_libraries


def main() -> None:
    print(f"torch {torch.__version__}, built with ROCm {torch.version.hip or 'none'}")
    reason = device.absence()
    if reason is not None:
        print(f"no device: {reason}")
        return
    for found in device.devices():
        print(f"{found.torch_device}  {found.name}  {found.arch}  {found.total_bytes / 2**30:.1f} GiB")
        probes = probe_libraries(found.index, found.arch)
        for name, probe in probes.items():
            print(f"  {name:12} {probe.version or probe.reason}")
        libraries = frozenset(name for name, probe in probes.items() if probe.version is not None)
        formats = chips.native_formats(found.arch, libraries)
        print(f"  multiplies   {', '.join(sorted(formats)) or 'no 8-bit format'} in its matrix units")


if __name__ == "__main__":
    main()
