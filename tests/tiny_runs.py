"""Trains, with a single step, the runs that the README pages train and the PYTHON.md pages load."""

from pathlib import Path

from tests.programs import call

NAMES = {
    "gmlp_lm": "enwik8_gmlp",
    "perception": "perception",
    "reservoir": "iwslt_ffn_res",
}
"""{paper: name of the configuration}."""


def write_tiny_run(paper: str, folder: Path) -> Path:
    """Writes the run to the same folder below `folder` as the command of the README. Returns the workdir."""
    name = NAMES[paper]
    workdir = folder / "runs" / f"{name}_tiny"
    once = [f"--config.{field}=1" for field in ("train.steps", "eval.steps", "checkpoint.steps")]
    options = [f"--workdir={workdir}", "--config.eval.test=false", *once]
    call(f"{paper}.train", f"--config=configs/{name}.py:tiny", *options)
    return workdir
