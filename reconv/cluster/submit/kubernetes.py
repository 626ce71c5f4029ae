"""Manifests that train a run on Kubernetes: an indexed Job with one pod per node, and a headless Service.

Each pod starts one process per device. A pod that is asked to stop saves and exits with 75, which does not count as a
failure; errors that would repeat end the Job. The run is on a volume that all pods share, or in an object store; then
the pods have nothing but scratch space, and a new one takes the run back from the store.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from reconv.core.errors import ExitCode, UsageError
from reconv.storage.object_stores.store import as_url, is_url, local_folder

if TYPE_CHECKING:
    from reconv.cluster.submit.target import Request, Submitted

RUNS, DATA, RECIPES, CACHE = "/runs", "/data", "/etc/reconv", "/cache"  # where the volumes are in the pods
WRITABLE_STORES = ("s3", "gs", "az")
_PORT = 29500
_RETRIES_PER_NODE = 10
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_MAX_NAME = 52  # pods are NAME-INDEX, and the name of a pod is a label of at most 63 characters
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_UPLOAD_S = 300  # for the last checkpoint of a pod that is asked to stop, after it was saved
_CACHE_FILL = 0.9  # of the volume: a pod that exceeds its size is evicted
_SIZE = re.compile(r"(\d+)([KMGT])")
_GPU_RESOURCES = {"cpu": None, "hpu": "habana.ai/gaudi"}  # by --device; else NVIDIA's
# The same error would follow from the same command.
_FINAL = (ExitCode.USAGE, ExitCode.DATA, ExitCode.CHECKPOINT, ExitCode.DIVERGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesJob:
    """Facts that decide the manifests of a run."""

    name: str
    image: str
    nodes: int
    devices_per_node: int
    command: Sequence[str]  # trains the run, and continues it if it has been started
    run: str  # the run directory in the pods, or the address of the run in an object store
    data: str | None = None  # as given to the command
    device: str = "auto"
    namespace: str | None = None
    runs_claim: str | None = None
    data_claim: str | None = None
    cpus_per_device: int = 4
    memory_per_node: str = "32G"
    shm_size: str = "8G"
    cache_size: str = "50G"  # of data in an object store
    secrets: Sequence[str] = ()  # NAME, all of whose keys become environment variables, or NAME/KEY
    service_account: str | None = None
    stop_before_s: int = 300
    recipe_files: Mapping[str, str] = field(default_factory=dict)  # text by file name, in `RECIPES`

    @property
    def is_in_store(self) -> bool:
        """True if the run is kept in an object store."""
        return is_url(self.run)

    @property
    def local_run(self) -> str:
        """The run directory in a pod."""
        return str(local_folder(as_url(self.run), Path(RUNS, "runs"))) if self.is_in_store else self.run

    @property
    def stop_s(self) -> int:
        """Seconds that a pod may take to end: a step, a save, and the upload of what it has saved."""
        return self.stop_before_s + (_UPLOAD_S if self.is_in_store else 0)

    def check(self) -> None:
        """Raise `UsageError` for names that Kubernetes would refuse."""
        names = [("--name", self.name), ("--namespace", self.namespace), ("--runs-claim", self.runs_claim)]
        names += [("--data-claim", self.data_claim), ("--service-account", self.service_account)]
        names += [("--secret", secret.partition("/")[0]) for secret in self.secrets]
        for option, name in names:
            if name is not None and (_LABEL.fullmatch(name) is None or len(name) > _MAX_NAME):
                raise UsageError(
                    f"{option} {name!r} is not a name in Kubernetes",
                    hint=f"use lower-case letters, digits and '-', at most {_MAX_NAME}",
                )
        self._check_run()
        if _IMAGE.fullmatch(self.image) is None:
            raise UsageError(f"--image {self.image!r} is not the name of an image", hint="as in registry/reconv:1.0")

    def _check_run(self) -> None:
        if self.is_in_store:
            scheme = as_url(self.run).partition(":")[0]
            if scheme not in WRITABLE_STORES:
                raise UsageError(f"a run cannot be kept at {scheme}://", hint="use s3://, gs:// or az://")
            if self.runs_claim is not None:
                raise UsageError(
                    "--runs-claim cannot be combined with a run in an object store", hint="leave one of the two out"
                )
        elif self.runs_claim is None:
            raise UsageError(
                "the run needs a place",
                hint="add --runs-claim NAME, or --out with an address such as s3://bucket/runs/1",
            )
        elif re.fullmatch(r"/[^\x00-\x1f\x7f]*", self.run) is None:
            raise UsageError(
                f"--out {self.run!r} is not a folder in the pods",
                hint=f"use an absolute path, as in {RUNS}/{self.name}",
            )


def job_name(text: str) -> str:
    """A name that Kubernetes accepts, made of a recipe's."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_MAX_NAME].rstrip("-")
    return name if _LABEL.fullmatch(name) else f"run-{name}"[:_MAX_NAME].rstrip("-")


def manifests(job: KubernetesJob) -> str:
    """The manifests as YAML; raises `UsageError` for values that cannot be used."""
    job.check()
    documents = [config_map(job)] if job.recipe_files else []
    documents += [_service(job), _job(job)]
    return _HEADER.format(name=job.name, nodes=job.nodes, devices=job.devices_per_node, run=job.run) + as_yaml(
        documents
    )


def as_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Documents as YAML, with texts of several lines as they are."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


def metadata(job: KubernetesJob) -> dict[str, Any]:
    namespace = {"namespace": job.namespace} if job.namespace is not None else {}
    return {"name": job.name, **namespace, "labels": {"app.kubernetes.io/name": "reconv"}}


def config_map(job: KubernetesJob) -> dict[str, Any]:
    """The user's own recipe, as it was when the manifests were written."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job),
        "immutable": True,
        "data": dict(job.recipe_files),
    }


def _service(job: KubernetesJob) -> dict[str, Any]:
    """Gives each pod a name, under which rank 0 is found before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job.name},
            "ports": [{"name": "ranks", "port": _PORT}],
        },
    }


def _job(job: KubernetesJob) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(job),
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": _RETRIES_PER_NODE * job.nodes,
            "podReplacementPolicy": "Failed",  # not before the old pod has saved and ended
            "podFailurePolicy": {
                "rules": [
                    _on_exit_codes("FailJob", [int(code) for code in _FINAL]),
                    _on_exit_codes("Ignore", [int(ExitCode.PREEMPTED)]),
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {
                "metadata": {"labels": {"app.kubernetes.io/name": "reconv"}},
                "spec": {
                    "subdomain": job.name,
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": job.stop_s,
                    **({"serviceAccountName": job.service_account} if job.service_account is not None else {}),
                    "containers": [_container(job)],
                    "volumes": [volume for volume, _ in volumes(job)],
                },
            },
        },
    }


def _on_exit_codes(action: str, codes: list[int]) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": "reconv", "operator": "In", "values": codes}}


def _container(job: KubernetesJob) -> dict[str, Any]:
    variables = {
        "MASTER_ADDR": f"{job.name}-0.{job.name}",
        "MASTER_PORT": str(_PORT),
        "WORLD_SIZE": str(job.nodes * job.devices_per_node),
        "LOCAL_WORLD_SIZE": str(job.devices_per_node),
    }
    variables |= cache_variables(job)
    whole = [secret for secret in job.secrets if "/" not in secret]
    return {
        "name": "reconv",
        "image": job.image,
        "command": ["bash", "-c", start_script(escaped(job.command))],
        **({"workingDir": RUNS} if job.is_in_store else {}),
        "env": [*({"name": name, "value": value} for name, value in variables.items()), *secret_variables(job)],
        **({"envFrom": [{"secretRef": {"name": name}} for name in whole]} if whole else {}),
        "ports": [{"name": "ranks", "containerPort": _PORT}],
        "resources": resources(job),
        "startupProbe": {**_alive_within(job, 1), "periodSeconds": 10, "failureThreshold": 180},
        "livenessProbe": {**_alive_within(job, 15), "periodSeconds": 60, "failureThreshold": 1},
        "volumeMounts": [mount for _, mount in volumes(job)],
    }


def resources(job: KubernetesJob) -> dict[str, Any]:
    """The limits and requests of a pod's container."""
    gpu = _GPU_RESOURCES.get(job.device.partition(":")[0], "nvidia.com/gpu")
    limits = {
        "cpu": str(job.cpus_per_device * job.devices_per_node),
        "memory": _quantity("--memory-per-node", job.memory_per_node),
        **({gpu: str(job.devices_per_node)} if gpu is not None else {}),
    }
    return {"limits": limits, "requests": dict(limits)}


def cache_variables(job: KubernetesJob) -> dict[str, str]:
    """Variables that set the place and limit of the cache in a pod."""
    if not _needs_cache(job):
        return {}
    return {"RECONV_CACHE": CACHE, "RECONV_CACHE_LIMIT": str(int(_CACHE_FILL * _cache_bytes(job)))}


def secret_variables(job: KubernetesJob) -> list[dict[str, Any]]:
    """The environment variables of single keys of Secrets, each of the key's name."""
    pairs = [secret.split("/", 1) for secret in job.secrets if "/" in secret]
    return [{"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} for name, key in pairs]


def escaped(command: Sequence[str]) -> list[str]:
    """A command in which Kubernetes replaces nothing: it reads $(NAME) as a variable, and $$ as a single one."""
    return [word.replace("$", "$$") for word in command]


def _alive_within(job: KubernetesJob, minutes: int) -> dict[str, Any]:
    """A probe of `alive`, which rank 0 touches after steps and evaluation batches."""
    test = f'test -n "$(find {shlex.quote(job.local_run + "/alive")} -mmin -{minutes})"'
    if job.is_in_store:  # only the pod of rank 0 has it; the others end if that one does
        test = f'test "$JOB_COMPLETION_INDEX" != 0 || {test}'
    return {"exec": {"command": ["sh", "-c", test]}, "timeoutSeconds": 10}


def volumes(job: KubernetesJob) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each volume with its mount."""
    shm: dict[str, Any] = {"medium": "Memory", "sizeLimit": _quantity("--shm-size", job.shm_size)}
    found: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"name": "shm", "emptyDir": shm}, {"name": "shm", "mountPath": "/dev/shm"})
    ]
    if job.is_in_store:
        found.append(({"name": "runs", "emptyDir": {}}, {"name": "runs", "mountPath": RUNS}))
    if _needs_cache(job):
        cache = {"name": "cache", "emptyDir": {"sizeLimit": _quantity("--cache-size", job.cache_size)}}
        found.append((cache, {"name": "cache", "mountPath": CACHE}))
    if job.runs_claim is not None:
        runs = {"name": "runs", "persistentVolumeClaim": {"claimName": job.runs_claim}}
        found.append((runs, {"name": "runs", "mountPath": RUNS}))
    if job.data_claim is not None:
        data = {"name": "data", "persistentVolumeClaim": {"claimName": job.data_claim, "readOnly": True}}
        found.append((data, {"name": "data", "mountPath": DATA, "readOnly": True}))
    if job.recipe_files:
        recipe = {"name": "recipe", "configMap": {"name": job.name}}
        found.append((recipe, {"name": "recipe", "mountPath": RECIPES, "readOnly": True}))
    return found


def _needs_cache(job: KubernetesJob) -> bool:
    return job.data is not None and is_url(job.data)


def _cache_bytes(job: KubernetesJob) -> int:
    quantity = _quantity("--cache-size", job.cache_size)
    return int(quantity[:-2]) << (10 * (1 + "KMGT".index(quantity[-2])))


def _quantity(option: str, size: str) -> str:
    """A size such as 64G as Kubernetes writes it: 64Gi."""
    match = _SIZE.fullmatch(size)
    if match is None:
        raise UsageError(f"{option} {size!r} is not a size", hint="use a number and a unit, as in 64G")
    return f"{match[1]}{match[2]}i"


def start_script(command: Sequence[str]) -> str:
    """Starts the processes of a pod, passes SIGTERM on to them, and exits with their largest exit code."""
    return _START.replace("COMMAND", shlex.join(command))


_HEADER = """\
# Written by `reconv submit --to kubernetes`: {nodes} pods with {devices} processes each train {run}.
#   kubectl apply -f FILE           start, or start again after a stop: the run continues
#   kubectl logs -f job/{name}
#   kubectl delete -f FILE          stop: the run saves within terminationGracePeriodSeconds
"""

_START = """\
set -u
# The name of the first pod exists once that has started.
for _ in {1..300}; do
  getent hosts "$MASTER_ADDR" > /dev/null && break
  sleep 2
done
pids=()
trap 'kill -TERM "${pids[@]}" 2> /dev/null' TERM
for ((local_rank = 0; local_rank < LOCAL_WORLD_SIZE; local_rank++)); do
  export LOCAL_RANK=$local_rank RANK=$((JOB_COMPLETION_INDEX * LOCAL_WORLD_SIZE + local_rank))
  COMMAND &
  pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
  wait "$pid"
  status=$?
  while kill -0 "$pid" 2> /dev/null; do  # the signal has only interrupted the wait
    wait "$pid"
    status=$?
  done
  if [ "$status" -gt "$code" ]; then code=$status; fi
done
exit "$code"
"""


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


# The target

POD_OPTIONS = frozenset(
    (
        *("image", "namespace", "runs_claim", "data_claim", "shm_size", "cache_size", "secrets", "service_account"),
        "manifest",
    )
)


class KubernetesTarget:
    """Writes the manifests of an indexed Job, for clusters without an operator."""

    options = POD_OPTIONS

    def text(self, request: Request) -> str:
        """The manifests."""
        return manifests(job_of(request))

    def submit(self, request: Request) -> Submitted:
        """Write the manifests to a file for kubectl."""
        job = job_of(request)
        return write_manifests(request, job, manifests(job))


def write_manifests(request: Request, job: KubernetesJob, text: str) -> Submitted:
    """Write manifests to the file of --manifest, or to one of the job's name."""
    from reconv.cluster.submit.target import Submitted
    from reconv.core.text import count
    from reconv.storage.files import write_atomic

    file = Path(request.options["manifest"] or f"{job.name}-job.yaml")
    write_atomic(file, text)
    size = f"{count(request.num_devices, 'device')} of {count(job.nodes, 'pod')}"
    return Submitted(
        {"manifest": str(file), "name": job.name, "run": job.run},
        [
            f"wrote {file}: {size}, run directory {job.run}",
            f"  start: {shlex.join(['kubectl', 'apply', '-f', str(file)])}",
        ],
    )


def job_of(request: Request) -> KubernetesJob:
    """The job of a request; raises `UsageError` for what its pods would lack."""
    from reconv.recipe.load.extends import own_files
    from reconv.recipe.parts.data import NEED_NO_PATH

    options, resolved, words = request.options, request.check(), list(request.train_words)
    needs_data = resolved.recipe.data.source not in NEED_NO_PATH and options["data"] is None
    if options["image"] is None:
        raise UsageError(f"--to {options['target']} needs --image", hint="see `reconv submit --help`")
    if needs_data and options["data_claim"] is not None:
        words += ["--data", DATA]
    elif needs_data:
        raise UsageError(
            f"{resolved.recipe.name} needs a dataset in the pods",
            hint="add --data-claim NAME, or --data with a path or URL that the pods can read",
        )
    files = own_files(request.recipe)
    if len({file.name for file in files}) < len(files) or len({file.parent for file in files}) > 1:
        raise UsageError(
            "the recipe extends files in other folders, which the pods do not have",
            where=", ".join(map(str, files)),
            hint="put them into one folder, or extend a preset",
        )
    name = options["name"] or job_name(resolved.recipe.name)
    run = options["out"] or f"{RUNS}/{name}"
    source = f"{RECIPES}/{files[0].name}" if files else request.recipe
    optional = ("cpus_per_device", "memory_per_node", "shm_size", "cache_size", "service_account")
    return KubernetesJob(
        name=name,
        image=options["image"],
        nodes=request.num_nodes,
        devices_per_node=options["devices_per_node"],
        command=[*request.program(), "train", source, "--out", run, "--resume", *words],
        run=run,
        device=options["device"],
        namespace=options["namespace"],
        runs_claim=options["runs_claim"],
        data_claim=options["data_claim"],
        data=resolved.recipe.data.path,
        secrets=options["secrets"],
        stop_before_s=options["stop_before"],
        recipe_files={file.name: file.read_text(encoding="utf-8") for file in files},
        **{field: options[field] for field in optional if options[field] is not None},
    )
