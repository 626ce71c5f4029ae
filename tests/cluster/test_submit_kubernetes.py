"""The manifests of `reconv submit --to kubernetes`, and the script that starts the processes of a pod."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from reconv.cluster.submit.kubernetes import KubernetesJob, job_name, manifests, start_script
from reconv.core.errors import UsageError

JOB = KubernetesJob(
    name="digits",
    image="registry.example/reconv:1.0",
    nodes=2,
    devices_per_node=8,
    command=["reconv", "train", "quickstart", "--out", "/runs/digits", "--resume", "--set", "name=$(HOSTNAME) 'x'"],
    run="/runs/digits",
    runs_claim="runs",
    data_claim="imagenet",
    stop_before_s=600,
    recipe_files={"my.yaml": "extends: quickstart\n\n# Comment: with a colon\nseed: 3\n"},
)


def documents(job: KubernetesJob) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(manifests(job))}


def test_each_node_is_a_pod_of_an_indexed_job_that_a_headless_service_names() -> None:
    found = documents(JOB)
    assert sorted(found) == ["ConfigMap", "Job", "Service"]
    spec = found["Job"]["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("16", "8")
    assert variables["MASTER_ADDR"] == "digits-0.digits"  # pod 0 of the subdomain of the service
    assert pod["subdomain"] == found["Service"]["metadata"]["name"] == "digits"
    assert found["Service"]["spec"]["clusterIP"] == "None"
    assert pod["terminationGracePeriodSeconds"] == 600
    assert container["resources"]["limits"] == {"cpu": "32", "memory": "32Gi", "nvidia.com/gpu": "8"}
    assert found["ConfigMap"]["data"] == JOB.recipe_files
    assert "name=$$(HOSTNAME) " in container["command"][2]  # Kubernetes replaces $(HOSTNAME), but not $$(HOSTNAME)


def test_every_mount_has_a_volume_and_the_recipe_its_config_map() -> None:
    pod = documents(JOB)["Job"]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"shm": "/dev/shm", "runs": "/runs", "data": "/data", "recipe": "/etc/reconv"}
    assert sorted(volume["name"] for volume in pod["volumes"]) == sorted(mounts)


def test_a_stop_is_not_a_failure_and_an_error_that_would_repeat_ends_the_job() -> None:
    rules = documents(JOB)["Job"]["spec"]["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]
    }
    assert by_code == {2: "FailJob", 3: "FailJob", 4: "FailJob", 5: "FailJob", 75: "Ignore"}


def test_devices_follow_the_option() -> None:
    limits = {
        device: set(
            documents(replace(JOB, device=device))["Job"]["spec"]["template"]["spec"]["containers"][0]["resources"][
                "limits"
            ]
        )
        for device in ("cpu", "cuda", "hpu")
    }
    assert limits == {
        "cpu": {"cpu", "memory"},
        "cuda": {"cpu", "memory", "nvidia.com/gpu"},
        "hpu": {"cpu", "memory", "habana.ai/gaudi"},
    }


@pytest.mark.parametrize(
    "change",
    [
        {"name": "Digits"},
        {"name": "d" * 60},
        {"image": "a b"},
        {"runs_claim": "x y"},
        {"memory_per_node": "64"},
        {"run": "runs/x"},
        {"run": "/runs/x\nkind: Secret"},
    ],
)
def test_names_that_kubernetes_refuses_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        manifests(replace(JOB, **change))  # type: ignore[arg-type]


def test_a_recipe_gives_a_valid_name() -> None:
    assert [job_name(name) for name in ("resnet50", "My Recipe_2", "50 shades", "-")] == [
        "resnet50",
        "my-recipe-2",
        "run-50-shades",
        "run",
    ]


PROCESS = """#!/bin/bash
trap 'echo "$RANK stopped" >> "$LOG"; exit 75' TERM
printf '%s\\n' "$RANK $LOCAL_RANK $*" >> "$LOG"
[ "$1" != wait ] || for ((i = 0; i < 600; i++)); do sleep 0.1; done
exit "$LOCAL_RANK"
"""


def start_pod(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    program = folder / "program"
    program.write_text(PROCESS)
    program.chmod(0o755)
    variables = {"JOB_COMPLETION_INDEX": "2", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
    environment = {**os.environ, **variables, "LOG": str(folder / "log")}
    return subprocess.Popen(["bash", "-c", start_script([str(program), *words])], env=environment)


def test_a_pod_starts_its_ranks_and_exits_with_their_largest_code(tmp_path: Path) -> None:
    assert start_pod(tmp_path, "two words", "$(x)").wait(30) == 2
    assert sorted((tmp_path / "log").read_text().splitlines()) == [f"{6 + i} {i} two words $(x)" for i in range(3)]


def test_a_pod_passes_sigterm_on_and_waits_until_all_ranks_have_saved(tmp_path: Path) -> None:
    pod, log = start_pod(tmp_path, "wait"), tmp_path / "log"
    deadline_s = time.monotonic() + 30
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(30) == 75
    assert sorted(log.read_text().splitlines())[1::2] == ["6 stopped", "7 stopped", "8 stopped"]


STORED = replace(
    JOB,
    command=["reconv", "train", "quickstart", "--out", "s3://b/runs/1", "--resume", "--data", "s3://b/imagenet"],
    run="s3://b/runs/1",
    data="s3://b/imagenet",
    runs_claim=None,
    data_claim=None,
    cache_size="100G",
    secrets=("s3-keys", "wandb"),
    service_account="trainer",
)


def test_a_run_in_a_store_needs_no_claim_and_has_time_to_upload() -> None:
    pod = documents(STORED)["Job"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["runs"] == {"name": "runs", "emptyDir": {}}
    assert volumes["cache"]["emptyDir"] == {"sizeLimit": "100Gi"}
    assert not any("persistentVolumeClaim" in volume for volume in volumes.values())
    assert {"secretRef": {"name": "s3-keys"}} in container["envFrom"]
    assert len(container["envFrom"]) == 2
    assert pod["serviceAccountName"] == "trainer"
    assert pod["terminationGracePeriodSeconds"] == JOB.stop_before_s + 300
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert variables["RECONV_CACHE"] == mounts["cache"]
    assert int(variables["RECONV_CACHE_LIMIT"]) < 100 << 30
    assert container["workingDir"] == mounts["runs"]  # a run in a store is in `runs/` below it


def test_only_the_pod_of_rank_0_is_probed_where_pods_share_no_volume(tmp_path: Path) -> None:
    probe = documents(STORED)["Job"]["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["exec"]["command"]
    assert "/runs/runs/s3/b/runs/1/alive" in probe[-1]
    command = [word.replace("/runs/runs", str(tmp_path)) for word in probe]
    alive = tmp_path / "s3/b/runs/1/alive"

    def is_healthy(index: int) -> bool:
        environ = {**os.environ, "JOB_COMPLETION_INDEX": str(index)}
        return subprocess.run(command, env=environ, stderr=subprocess.DEVNULL, check=False).returncode == 0

    assert [is_healthy(0), is_healthy(1)] == [False, True]
    alive.parent.mkdir(parents=True)
    alive.touch()
    assert [is_healthy(0), is_healthy(1)] == [True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "https://host/run"}, "cannot be kept at https"),
        ({"run": "s3://"}, "not the address"),
        ({"runs_claim": "runs"}, "--runs-claim cannot be combined"),
        ({"run": "/runs/x"}, "needs a place"),
        ({"secrets": ("Keys!",)}, "--secret 'Keys!'"),
        ({"cache_size": "much"}, "--cache-size"),
    ],
)
def test_what_a_run_in_a_store_cannot_have_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        manifests(replace(STORED, **changes))
