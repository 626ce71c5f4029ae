"""Manifests of `reconv submit` are read by the packages that they are for, and a TrainJob's command trains.

Needs: pip install kubeflow kubeflow-trainer-api. SkyPilot is large: SKYPILOT_PYTHON may name the interpreter of an
environment that has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from reconv.cli import main

pytestmark = pytest.mark.external
RECONV = [sys.executable, "-m", "reconv"]
SHORT = ["--set", "batch.group=8", "--set", "parallel.reduce=ordered", "--set", "engine.num_threads=1", "--epochs", "1"]
READ_TASK = """
import json, os, sys
os.environ["SKYPILOT_DISABLE_USAGE_COLLECTION"] = "1"
import sky
for file in sys.argv[1:]:
    try:
        print(json.dumps(sky.Task.from_yaml(file).num_nodes))
    except Exception as error:
        print(json.dumps(str(error)[:200]))
"""


def submit(*words: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["submit", "quickstart", *words])
    assert not end.value.code


def train_job(*words: str) -> Any:
    submit("--to", "trainjob", "--image", "reconv:1.0", "--manifest", "job.yaml", *words, *SHORT)
    return next(d for d in yaml.safe_load_all(Path("job.yaml").read_text()) if d["kind"] == "TrainJob")


@pytest.mark.parametrize(
    "words",
    [
        ["--runs-claim", "runs"],
        ["--out", "s3://bucket/1", "--secret", "keys/AWS_ACCESS_KEY_ID", "--service-account", "s", "--namespace", "n"],
        ["--runs-claim", "runs", "--data-claim", "data", "--nodes", "2", "--runtime", "mine"],
    ],
)
def test_every_field_of_a_trainjob_is_one_of_the_operators(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    monkeypatch.chdir(tmp_path)
    job = train_job(*words)
    # The models drop fields that they do not know, and refuse wrong types.
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    job["spec"]["trainer"]["numNode"] = 2
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() != job


def test_the_nodes_of_a_trainjob_train_the_weights_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = train_job("--runs-claim", "runs", "--nodes", "2", "--out", str(tmp_path / "run"), "--device", "cpu")
    words = [word.replace("$$", "$") for word in job["spec"]["trainer"]["command"]]
    variables = {  # those of the operator's torch plug-in
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": str(job["spec"]["trainer"]["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "29731",
        "OMP_NUM_THREADS": "1",
    }
    nodes = [
        subprocess.Popen([*RECONV, *words[1:]], env={**os.environ, **variables, "PET_NODE_RANK": str(rank)})
        for rank in range(2)
    ]
    assert [node.wait(240) for node in nodes] == [0, 0]
    subprocess.run([*RECONV, "train", "quickstart", "--quiet", "--out", "alone", *SHORT], check=True, timeout=240)
    files = [next(Path(out, "checkpoints").glob("step-*/model.safetensors")) for out in ("run", "alone")]
    assert files[0].read_bytes() == files[1].read_bytes()


def run_words(arguments: dict[str, list[str]]) -> None:
    """Runs in the environment that the back end has made; its source is sent there, and gets `func_args` as one."""
    import subprocess
    import sys

    subprocess.run([sys.executable, "-m", *arguments["words"]], check=True)


def test_the_local_back_end_of_kubeflows_sdk_runs_the_command_of_a_trainjob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: the back end makes a virtual environment, and installs torch and Reconv into it."""
    trainer = pytest.importorskip("kubeflow.trainer", reason="pip install kubeflow")
    monkeypatch.chdir(tmp_path)
    job = train_job("--runs-claim", "runs", "--out", str(tmp_path / "run"), "--device", "cpu")
    words = [word.replace("$$", "$") for word in job["spec"]["trainer"]["command"]]
    subprocess.run([*RECONV, "train", "quickstart", "--quiet", "--out", "alone", *SHORT], check=True, timeout=240)
    client = trainer.TrainerClient(backend_config=trainer.LocalProcessBackendConfig(cleanup_venv=True))
    packages = [f"torch=={torch.__version__}", f"reconv @ {Path(__file__).parents[2].as_uri()}"]
    custom = trainer.CustomTrainer(func=run_words, func_args={"words": words}, packages_to_install=packages)
    name = client.train(runtime=client.get_runtime(client.list_runtimes()[0].name), trainer=custom)
    ended = client.wait_for_job_status(name, status={"Complete", "Failed"}, timeout=900)
    assert ended.status == "Complete", "\n".join(client.get_job_logs(name))[-6000:]
    files = [next(Path(out, "checkpoints").glob("step-*/model.safetensors")) for out in ("run", "alone")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_skypilot_reads_the_task_and_refuses_a_misspelt_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.environ.get("SKYPILOT_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import sky"], capture_output=True).returncode:
        pytest.skip("SkyPilot is not installed")
    monkeypatch.chdir(tmp_path)
    place = ["--nodes", "2", "--out", "s3://bucket/1", "--accelerators", "H100:1", "--spot"]
    submit("--to", "skypilot", "--manifest", "task.yaml", *place, "--secret", "AWS_ACCESS_KEY_ID", *SHORT)
    text = Path("task.yaml").read_text()
    Path("misspelt.yaml").write_text(text.replace("use_spot", "use_spots"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    shown = subprocess.run(
        [python, "-c", READ_TASK, "task.yaml", "misspelt.yaml"], capture_output=True, text=True, check=True
    )
    good, bad = (json.loads(line) for line in shown.stdout.splitlines()[-2:])
    assert good == 2, good
    assert "use_spots" in bad
