"""`python -m portable_dit_cuda`: the devices, and why each optional kernel library is used here or not."""

from __future__ import annotations

import torch

from portable_dit_cuda import device
from portable_dit_cuda.probe import probe_libraries


def main() -> None:
    print(f"torch {torch.__version__}, built with CUDA {torch.version.cuda or 'none'}")
    reason = device.absence()
    if reason is not None:
        print(f"no device: {reason}")
        return
    for found in device.devices():
        print(f"{found.torch_device}  {found.name}  {found.arch}  {found.total_bytes / 2**30:.1f} GiB")
        probes = probe_libraries(found.index, torch.cuda.get_device_capability(found.index))
        for name, probe in probes.items():
            print(f"  {name:21} {probe.version or probe.reason}")


if __name__ == "__main__":
    main()
