"""The guard against kernels that hang ends the process: it must not be set where no kernel runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_slow_tests_elsewhere_are_not_ended(tmp_path: Path) -> None:
    """Beside the GPU tests, with their guard set to a moment."""
    slow = tmp_path / "test_slow.py"
    slow.write_text("import time\ndef test_slow():\n    time.sleep(3)\n")
    program = (
        "import sys, pytest, tests.conftest, tests.gpu.conftest as gpu\n"
        "gpu.TEST_SECONDS = 1.0\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]], plugins=[gpu, tests.conftest]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(slow)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
