"""A step of an experiment for a GPU, on one that is not there: no tensor may stay on the processor."""

import pathlib
import subprocess
import sys

from lab import modes


def test_a_step_on_a_gpu_leaves_no_tensor_on_the_wrong_device():
    script = pathlib.Path(__file__).with_name("absent_gpu.py")
    notebook = modes.NOTEBOOKS / "evidence" / "33_ablations.ipynb"
    command = [sys.executable, str(script), str(notebook), "ablation-cifar-whole"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    assert "ablation-cifar-whole {" in done.stdout
