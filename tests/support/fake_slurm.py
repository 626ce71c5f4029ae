"""Stand-ins for Slurm's commands: a batch script runs here, with the exit code and job state that a test chooses."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

SRUN = """#!/bin/bash
printf '%s\\0' "$@" > "$FAKE_SLURM/srun-words"
env > "$FAKE_SLURM/srun-environment"
pwd > "$FAKE_SLURM/srun-folder"
exit "$FAKE_CODE"
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$FAKE_SLURM/scontrol-calls"
exit "${FAKE_SCONTROL_CODE:-0}"
"""
SQUEUE = """#!/bin/bash
for word in "$@"; do
  case $word in
    --jobs=*) echo "$FAKE_STATE"; exit ;;
  esac
done
cat "$FAKE_SLURM/queue" 2> /dev/null || true
"""
SBATCH = """#!/bin/bash
printf '%s\\0' "$@" > "$FAKE_SLURM/sbatch-words"
[ -z "${FAKE_REFUSAL:-}" ] || { echo "sbatch: error: $FAKE_REFUSAL" >&2; exit 1; }
echo "4711;cluster"
"""
PROGRAMS = {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE, "sbatch": SBATCH, "sleep": "#!/bin/sh\n"}


@dataclass(frozen=True)
class FakeSlurm:
    """A folder with the programs, and what they were called with."""

    folder: Path

    @classmethod
    def install(cls, folder: Path) -> FakeSlurm:
        folder.mkdir()
        for name, text in PROGRAMS.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        return cls(folder)

    @property
    def variables(self) -> dict[str, str]:
        return {"PATH": f"{self.folder}:{os.environ['PATH']}", "FAKE_SLURM": str(self.folder)}

    def run(self, script: Path, code: int, state: str = "RUNNING", **more: str) -> subprocess.CompletedProcess[str]:
        """Run a batch script whose ranks end with this code while Slurm has the job in this state."""
        job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "FAKE_CODE": str(code), "FAKE_STATE": state}
        environment = {**os.environ, **self.variables, **job, **more}
        return subprocess.run(
            ["bash", str(script)], env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    def words(self, program: str) -> list[str]:
        """The arguments of the last call."""
        return (self.folder / f"{program}-words").read_text().split("\0")[:-1]

    def requeues(self) -> int:
        """How often the job was asked to be requeued."""
        calls = self.folder / "scontrol-calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return lines.count("requeue 4711")
