"""Runs vLLM's own unit tests of connectors against ours: ``make test-vllm-own``.

``python tests/integrations/vllm_own FOLDER`` runs the unchanged tests of vLLM's source distribution in FOLDER. When a
test names one of vLLM's connectors or its mock of a connector, it gets ours on a real daemon. The daemon has the tokens
that the mock would have reported. A test that creates no connector of ours fails here, because it would prove nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {HERE.relative_to(ROOT)} FOLDER, with vLLM's source distribution")
    folder = Path(sys.argv[1]).resolve()
    os.chdir(folder)
    # The package ``tests`` must be vLLM's, not ours.
    sys.path[:0] = [str(folder), str(ROOT), str(HERE)]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "clients" / "python")))
    import models  # sets variables that huggingface_hub reads at its import

    models.pretend(folder / "hub")
    import pytest
    import substitutes

    wanted = [name for names in substitutes.TESTS.values() for name in names]
    # pytest must use neither vLLM's settings nor ours, which it would find in the folders above.
    flags = [
        "-q",
        "-rs",
        "--noconftest",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:warnings",
    ]
    return int(pytest.main([*flags, *wanted], [substitutes.Plugin()]))


if __name__ == "__main__":
    sys.exit(main())
