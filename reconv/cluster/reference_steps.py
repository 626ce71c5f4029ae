"""`reconv doctor --gpu`: trains on each GPU twice, and compares the bits with each other and with a reference."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from reconv.cluster.environment_checks import CheckResult, Level
from reconv.core.compat import installed_version

TOPIC = "reference steps"
REFERENCES = Path(__file__).with_name("reference_steps.json")  # digests by `machine_key` and training

_BASE: Mapping[str, object] = {
    "length": "8step",
    "schedule.warmup": "1step",
    "log.every": "1step",
    "evaluate.every": "4step",
    "engine.num_threads": 1,
    "engine.deterministic": True,
    "data.num_workers": 0,
}
# The trainings of tests/golden with these names: a network for handwritten digits, in float32 and in bfloat16.
TRAININGS: Mapping[str, Mapping[str, object]] = {
    "quickstart": {**_BASE, "save.every": "12step"},
    "bf16": {**_BASE, "save.every": "3step", "precision.mode": "bf16"},
}


def check_gpus() -> Iterator[CheckResult]:
    """The results of every CUDA GPU that this process sees."""
    import torch

    for index in range(torch.cuda.device_count()):
        yield from check_device(f"cuda:{index}", machine_key(index))
    if torch.cuda.device_count() == 0:
        advice = "run it on the machine with the GPU; `reconv doctor` says why torch sees none"
        yield CheckResult(TOPIC, "gpu", None, "no GPU: nothing was computed", "missing", advice)


def check_device(device: str, key: str) -> Iterator[CheckResult]:
    """The result of each training on a device."""
    known = json.loads(REFERENCES.read_text()).get(key, {})
    for name in TRAININGS:
        try:
            first, second = train(name, device), train(name, device)
        except Exception as error:
            advice = "a step that cannot be computed; `reconv train quickstart` says more"
            yield CheckResult(TOPIC, f"{device} {name}", None, f"{type(error).__name__}: {error}", "wrong", advice)
            continue
        yield compared(f"{device} {name}", first, second, known.get(name), key)


def compared(name: str, first: str, second: str, reference: str | None, key: str) -> CheckResult:
    """The verdict on the digests of two equal trainings."""
    level: Level = "wrong"
    advice = "take this device out of service; docs/how-to/silent-data-corruption.md"
    if first != second:
        text = "computed other bits the second time"
    elif reference is None:
        level, advice = "ok", ""
        text = f"the same bits twice; no reference for {key}"
    elif first != reference:
        text = f"the same bits twice, but not those of other devices with {key}"
    else:
        level, advice = "ok", ""
        text = f"the same bits twice, and those of the reference for {key}"
    return CheckResult(TOPIC, name, first if level == "ok" else None, text, level, advice)


def machine_key(index: int) -> str:
    """The names and versions that decide the bits of a GPU."""
    import torch

    triton = ".".join((installed_version("triton") or "none").split(".")[:2])
    name = torch.cuda.get_device_name(index)
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton}"


def train(name: str, device: str) -> str:
    """The digest of the weights after a training."""
    from reconv.trainer.run import TrainingRun

    overrides = [(field, value, "reconv doctor") for field, value in TRAININGS[name].items()]
    with tempfile.TemporaryDirectory(prefix="reconv-doctor-", ignore_cleanup_errors=True) as folder:
        run_folder = Path(folder) / "run"
        with TrainingRun.open("quickstart", overrides, out=run_folder, device=device) as run:
            run.trainer().fit()
        last = sorted((run_folder / "checkpoints").glob("step-*"))[-1]
        return digest(last / "model.safetensors")


def digest(file: Path) -> str:
    """A digest of the names, types, shapes and bytes of the tensors of a file, not of its header."""
    import safetensors.torch
    import torch

    result = hashlib.sha256()
    for name, tensor in sorted(safetensors.torch.load_file(file).items()):
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        result.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()[:32]
