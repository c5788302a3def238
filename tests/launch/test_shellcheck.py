"""Shellcheck on the launchers, on .ci/run and on the generated Slurm batch file."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.standins import Checkout

ROOT = Path(__file__).parents[2]
PROGRAM = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which(
    "shellcheck"
)


@pytest.mark.skipif(not PROGRAM, reason="shellcheck is not installed")
def test_shell_scripts(tmp_path):
    job = tmp_path / "job.sh"
    checkout = Checkout(tmp_path)
    (checkout.root / "c.py").touch()
    printed = checkout.run(
        checkout.root / "launch" / "gpu.sh", "slurm", "--dry-run", "c.py", "it's"
    )
    assert printed.returncode == 0, printed.stderr
    job.write_text(printed.stdout.split("\n", 1)[1].split("\n\n# submit")[0] + "\n")
    scripts = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run", job]
    result = subprocess.run(
        [PROGRAM, "--external-sources", *scripts], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout
