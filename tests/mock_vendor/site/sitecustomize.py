"""Makes a Python process one on a mocked vendor's machine, before anything of ours is imported.

Read by Python itself at its start, since process.py puts this folder on the path; so worker processes and
the command line are on the same machine. MOCK_VENDOR=rocm:gfx942 calls `mock_rocm.install("gfx942")`.
"""

import os
import sys
import traceback

if os.environ.get("MOCK_VENDOR"):
    from importlib import import_module

    is_whole = False
    try:
        vendor, _, variant = os.environ["MOCK_VENDOR"].partition(":")
        import_module(f"mock_{vendor}").install(variant)
        is_whole = True
    finally:
        if not is_whole:  # Python would go on with half a machine
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)
