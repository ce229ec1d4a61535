"""Runs vLLM's own unit tests of connectors against ours: ``make test-vllm-own``.

``python tests/integrations/vllm_own FOLDER`` takes the tests of vLLM's source distribution in FOLDER as they are. Where
they name a connector of vLLM's, or their mock of one, they get ours on a real daemon, in which stands what the mock
would have said it found. A test that makes no connector of ours fails here: it would prove nothing.
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
    # ``tests`` are vLLM's, before ours.
    sys.path[:0] = [str(folder), str(ROOT), str(HERE)]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "clients" / "python")))
    import models  # what huggingface_hub reads when it is imported is set in it

    models.pretend(folder / "hub")
    import pytest
    import substitutes

    wanted = [name for names in substitutes.TESTS.values() for name in names]
    # Neither their settings nor ours, which pytest would find in the folders above.
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
