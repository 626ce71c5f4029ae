"""The TrainJob that trains a run under Kubeflow Trainer v2: the operator makes the pods and names the nodes.

Each pod runs `reconv train`, which reads the operator's PET_* variables and starts one rank per device. The operator's
runtime decides what a failed pod does; a pod that starts again continues the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reconv.cluster.submit import kubernetes
from reconv.cluster.submit.kubernetes import KubernetesJob

if TYPE_CHECKING:
    from reconv.cluster.submit.target import Request, Submitted

_API = "trainer.kubeflow.org"
DEFAULT_RUNTIME = "torch-distributed"  # that the operator's own manifests install
_NODES = "node"  # the name of the training pods and of their container, in every runtime of the operator


class TrainJobTarget:
    """Writes a TrainJob, for clusters with the operator of Kubeflow Trainer."""

    options = kubernetes.POD_OPTIONS | {"runtime"}

    def text(self, request: Request) -> str:
        """The manifests."""
        return manifests(kubernetes.job_of(request), request.options["runtime"] or DEFAULT_RUNTIME)

    def submit(self, request: Request) -> Submitted:
        """Write the manifests to a file for kubectl."""
        job = kubernetes.job_of(request)
        text = manifests(job, request.options["runtime"] or DEFAULT_RUNTIME)
        return kubernetes.write_manifests(request, job, text)


def manifests(job: KubernetesJob, runtime: str) -> str:
    """The manifests as YAML; raises `UsageError` for values that cannot be used."""
    job.check()
    documents = [kubernetes.config_map(job)] if job.recipe_files else []
    header = _HEADER.format(name=job.name, nodes=job.nodes, devices=job.devices_per_node, run=job.run)
    return header + kubernetes.as_yaml([*documents, train_job(job, runtime)])


def train_job(job: KubernetesJob, runtime: str) -> dict[str, Any]:
    """The TrainJob itself."""
    variables = [{"name": name, "value": value} for name, value in kubernetes.cache_variables(job).items()]
    variables += kubernetes.secret_variables(job)
    return {
        "apiVersion": f"{_API}/v1alpha1",
        "kind": "TrainJob",
        "metadata": kubernetes.metadata(job),
        "spec": {
            "runtimeRef": {"apiGroup": _API, "kind": "ClusterTrainingRuntime", "name": runtime},
            "trainer": {
                "image": job.image,
                "numNodes": job.nodes,
                "numProcPerNode": job.devices_per_node,
                "command": _command(job),
                **({"env": variables} if variables else {}),
                "resourcesPerNode": kubernetes.resources(job),
            },
            "runtimePatches": [{"manager": "reconv/submit", "trainingRuntimeSpec": _patch(job)}],
        },
    }


def _command(job: KubernetesJob) -> list[str]:
    """The command of a pod, in the folder for runs if the run has no volume of its own."""
    command = kubernetes.escaped(job.command)
    return ["sh", "-c", f'cd {kubernetes.RUNS} && exec "$$@"', "sh", *command] if job.is_in_store else command


def _patch(job: KubernetesJob) -> dict[str, Any]:
    """The volumes of the pods, and how long they may take to save: a TrainJob itself has no field for them."""
    mounts = [mount for _, mount in kubernetes.volumes(job)]
    pod = {
        "terminationGracePeriodSeconds": job.stop_s,
        **({"serviceAccountName": job.service_account} if job.service_account is not None else {}),
        "volumes": [volume for volume, _ in kubernetes.volumes(job)],
        "containers": [{"name": _NODES, "volumeMounts": mounts}],
    }
    nodes = {"name": _NODES, "template": {"spec": {"template": {"spec": pod}}}}
    return {"template": {"spec": {"replicatedJobs": [nodes]}}}


_HEADER = """\
# Written by `reconv submit --to trainjob`: {nodes} nodes with {devices} processes each train {run}.
#   kubectl apply -f FILE           start, or start again after a stop: the run continues
#   kubectl get trainjob {name}
#   kubectl delete -f FILE          stop: the run saves within terminationGracePeriodSeconds
"""
