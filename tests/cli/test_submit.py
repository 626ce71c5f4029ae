"""`reconv submit` from the command line, with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fake_slurm import FakeSlurm
from run_example import write_run

import reconv.cli as cli
from reconv.distributed.environment import NodeEnv, read_node_env

SLURM = ["submit", "quickstart", "--to", "slurm", "--nodes", "2", "--devices-per-node", "2", "--device", "cpu"]
TRAINJOB = ["submit", "quickstart", "--to", "trainjob", "--image", "reconv:1.0", "--runs-claim", "runs"]
SKYPILOT = ["submit", "quickstart", "--to", "skypilot", "--device", "cpu", "--out", "s3://bucket/runs/1"]
KUBERNETES = ["submit", "quickstart", "--to", "kubernetes", "--image", "reconv:1.0", "--runs-claim", "runs"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm.install(tmp_path / "bin")
    for name, value in fake.variables.items():
        monkeypatch.setenv(name, value)
    return fake


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_job_gets_a_run_directory_with_its_script_and_passes_options_on(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--epochs", "3", "--set", "batch.group=16", "--set", "description=two words", "--lr", "0.05"]
    assert run(*SLURM, *options, "--json") == 0
    folder = tmp_path / "runs/quickstart/1"
    script = folder / "slurm.sh"
    result = json.loads(capsys.readouterr().out)
    assert result == {
        "job_id": "4711",
        "run": str(folder),
        "script": str(script),
        "log": str(folder / "logs/slurm-4711.log"),
    }
    assert slurm.words("sbatch") == ["--parsable", str(script)]
    assert slurm.run(script, 0).returncode == 0
    reconv = [sys.executable, "-m", "reconv"]
    words = ["--epochs", "3.0", "--lr", "0.05", "--device", "cpu", *options[2:6]]
    assert slurm.words("srun")[2:] == [*reconv, "train", "quickstart", "--out", str(folder), "--resume", *words]


def test_a_run_that_is_queued_is_not_submitted_again_and_one_that_was_stopped_is(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "mine", stop_at=100, exit_code=75, with_images=False)
    (slurm.folder / "queue").write_text("4711|PENDING|Priority|\n")
    assert run(*SLURM, "--out", "mine") == 2  # without --resume
    assert "add --resume" in capsys.readouterr().err
    assert run(*SLURM, "--out", "mine", "--resume") == 0
    assert "submitted job 4711: continues the run" in capsys.readouterr().out
    assert run(*SLURM, "--out", "mine", "--resume") == 2
    assert "job 4711 is already pending" in capsys.readouterr().err
    (slurm.folder / "queue").write_text("")
    slurm.run(folder / "slurm.sh", 0)
    assert slurm.words("srun")[2:] == [sys.executable, "-m", "reconv", "resume", str(folder), "--device", "cpu"]


def test_a_dry_run_prints_the_script_and_leaves_nothing(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert run(*SLURM, "--dry-run") == 0
    script = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n" in script
    assert sorted(tmp_path.rglob("*")) == before


def test_a_job_that_slurm_refuses_leaves_no_run_directory(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_REFUSAL", "Invalid partition name specified")
    assert run(*SLURM, "--partition", "none") == 2
    assert "Invalid partition name specified" in capsys.readouterr().err
    assert list((tmp_path / "runs/quickstart").iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["submit", "resnet50", "--to", "slurm"], "needs a dataset"),
        (["submit", "resnet50", "--to", "slurm", "--data", "nowhere"], "does not exist on this machine"),
        ([*SLURM, "--batch-size", "2"], "2 samples"),
        ([*SLURM, "--set", "optimizer.momentum=-1"], "optimizer.momentum"),
        ([*SLURM, "--image", "x"], "--image cannot be combined with --to slurm"),
        ([*SLURM, "--resume"], "--resume needs the run directory"),
        ([*SLURM, "--out", "bin/srun/run"], "cannot be written"),
        ([*SLURM, "--time", "5", "--stop-before", "300"], "too little time"),
        ([*KUBERNETES, "--time", "5"], "--time cannot be combined with --to kubernetes"),
        (KUBERNETES[:-2], "--runs-claim"),
        ([*SLURM, "--out", "s3://bucket/run"], "--out must be a folder with --to slurm"),
        ([*SLURM, "--secret", "keys"], "--secret cannot be combined with --to slurm"),
        (["submit", "resnet50", *KUBERNETES[2:]], "needs a dataset in the pods"),
        ([*SLURM, "--nodes", "1:2"], "--nodes 1:2 cannot be combined with --to slurm"),
        ([*SLURM, "--nodes", "0"], "not a number of machines"),
        ([*TRAINJOB[:-2]], "the run needs a place"),
        ([*TRAINJOB, "--spot"], "--spot cannot be combined with --to trainjob"),
        ([*SKYPILOT, "--out", "runs/1"], "the address of an object store"),
        ([*SKYPILOT, "--out", "https://host/run"], "a run cannot be kept at"),
        ([*SKYPILOT, "--accelerators", "H100:8"], "--accelerators H100:1"),
        ([*SKYPILOT, "--device", "cuda"], "needs --accelerators"),
        ([*SKYPILOT, "--name", "-"], "not the name of a task"),
        (["submit", "quickstart", "--to", "ray"], "--to ray needs --out"),
    ],
)
def test_what_would_fail_later_is_refused_before_anything_is_submitted(
    args: list[str], message: str, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args) in (2, 3, 6)
    assert message in capsys.readouterr().err
    assert not (slurm.folder / "sbatch-words").exists()
    assert not Path("runs").exists()


def test_manifests_hold_the_users_recipe_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base.yaml").write_text("extends: quickstart\nseed: 3\n")
    (tmp_path / "my.yaml").write_text("extends: base.yaml\nlength: 2ep\n")
    assert run("submit", "my.yaml", *KUBERNETES[2:], "--nodes", "2", "--lr", "0.05") == 0
    assert "kubectl apply -f my.yaml" not in capsys.readouterr().out  # it must not replace the recipe
    found = {document["kind"]: document for document in yaml.safe_load_all((tmp_path / "my-job.yaml").read_text())}
    assert sorted(found["ConfigMap"]["data"]) == ["base.yaml", "my.yaml"]
    script = found["Job"]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert "reconv train /etc/reconv/my.yaml --out /runs/my --resume --lr 0.05 &" in script


def test_a_trainjob_starts_reconv_on_every_node_with_its_volumes(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("extends: quickstart\nseed: 3\n")
    options = [
        "--nodes",
        "2",
        "--devices-per-node",
        "4",
        "--secret",
        "keys/RECONV_SECRET",
        "--command",
        "reconv-$(HOME)",
    ]
    assert run("submit", "my.yaml", *TRAINJOB[2:], *options, "--set", "batch.group=8") == 0
    config, job = yaml.safe_load_all((tmp_path / "my-job.yaml").read_text())
    assert list(config["data"]) == ["my.yaml"]
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["command"][:5] == ["reconv-$$(HOME)", "train", "/etc/reconv/my.yaml", "--out", "/runs/my"]
    # Kubernetes replaces $(HOME), but not $$(HOME)
    assert trainer["env"][0]["valueFrom"] == {"secretKeyRef": {"name": "keys", "key": "RECONV_SECRET"}}
    patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pod = patch["template"]["spec"]["template"]["spec"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]} == {"shm", "runs", "recipe"}


def test_a_sky_task_names_its_nodes_to_reconv_and_is_recovered_after_a_saved_stop(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("extends: quickstart\nseed: 3\n")
    options = ["--nodes", "2", "--set", "batch.group=8", "--spot", "--manifest", "task.yaml"]
    assert run("submit", "my.yaml", *SKYPILOT[2:], *options) == 0
    task = yaml.safe_load((tmp_path / "task.yaml").read_text())
    assert task["num_nodes"] == 2
    assert task["resources"]["use_spot"] is True
    assert 75 in task["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert task["file_mounts"] == {"~/reconv-recipe/my.yaml": str(tmp_path / "my.yaml")}
    variables = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    script = task["run"].rpartition("reconv train")[0] + "env"
    shown = subprocess.run(["sh", "-c", script], env={**os.environ, **variables}, capture_output=True, text=True)
    found = dict(line.split("=", 1) for line in shown.stdout.splitlines() if line.startswith("PET_"))
    assert read_node_env(found) == NodeEnv(1, 2, 1, "10.0.0.1", 29500)


def test_submitting_and_listing_import_no_torch(slurm: FakeSlurm) -> None:
    script = """
import json, sys
from reconv.cli import main
for args in json.loads(sys.argv[1]):
    try:
        main(args)
    except SystemExit as end:
        assert end.code == 0, (args, end.code)
assert not {"torch", "numpy", "ray", "kubeflow_trainer_api", "sky"} & set(sys.modules)
"""
    ray = ["submit", "quickstart", "--to", "ray", "--out", "run", "--dry-run"]
    commands = [SLURM, KUBERNETES, TRAINJOB, SKYPILOT, ray, ["status", "runs"]]
    subprocess.run([sys.executable, "-c", script, json.dumps(commands)], check=True, capture_output=True)
