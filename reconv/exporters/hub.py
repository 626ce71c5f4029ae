"""`reconv push`: a trained classifier as a repository of the Hugging Face Hub, as timm and `--init hf://` read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reconv.build.package_networks import PackageNetwork, find_package_network, timm_names
from reconv.checkpoint.safetensors_bytes import encode
from reconv.checkpoint.weights_metadata import KEY, WeightsMetadata, to_header
from reconv.core.custom_code import TrustCode
from reconv.core.errors import UnreadableRunError, UsageError
from reconv.core.version import __version__
from reconv.data.transforms.host import resized_shorter_side
from reconv.exporters.model_card import markdown_text
from reconv.inference.backends.base import LogFunction, no_log
from reconv.inference.predictor import Predictor, find_model
from reconv.logging.formatting import metric_name, metric_text
from reconv.logging.run_dir import RunDir, read_summary
from reconv.models.frozen import head_patterns
from reconv.recipe.parts.code import names_code
from reconv.storage.hub import CONFIG_FILE, WEIGHTS_FILE, HubClient, HubRepo

CARD_FILE = "README.md"
_MAX_CLASSES_IN_CARD = 50


@dataclass(frozen=True, slots=True)
class PushResult:
    """Address and files of a model that was pushed."""

    repo: str  # hf://OWNER/MODEL
    page: str
    commit: str  # its address
    files: Mapping[str, int]  # names and bytes


def push(
    run: str | Path,
    repo: str,
    *,
    private: bool = False,
    force: bool = False,
    best: bool = False,
    weights: str = "auto",
    trust_code: TrustCode = False,
    log: LogFunction = no_log,
) -> PushResult:
    """Upload a classifier to hf://OWNER/MODEL: weights, config.json and a model card, in one commit.

    The repository is made if there is none. One that has a model already is refused, unless `force`.
    """
    target = HubRepo.parse(repo)
    client = HubClient(target)
    located = find_model(run, best, log)
    predictor = Predictor.from_located(
        located, weights=weights, recipe=None, device="cpu", backend="eager", trust_code=trust_code
    )
    files = hub_files(predictor, located.run, target)
    existing = client.files()
    taken = sorted(set(existing or ()) & {WEIGHTS_FILE, CONFIG_FILE, CARD_FILE, "pytorch_model.bin"})
    if taken and not force:
        raise UsageError(
            f"{target} has a model already",
            where=target.page,
            why=f"it has {', '.join(taken)}",
            hint="choose another name, or replace the files: --force (earlier commits stay on the hub)",
        )
    if existing is None:
        client.create(private=private)
    elif private:
        log(f"{target} exists: its visibility stays as it is")
    sizes = {name: len(content) for name, content in files.items()}
    log(f"uploading {', '.join(sizes)}: {sum(sizes.values()) / 1e6:,.1f} MB")
    commit = client.upload(files, f"{predictor.recipe.model.name}, trained with Reconv {__version__}")
    return PushResult(str(target), target.page, commit, sizes)


def hub_files(predictor: Predictor, run: RunDir | None, repo: HubRepo) -> dict[str, bytes]:
    """The files of the repository by name; raises `UsageError` for a model that others could not build."""
    if predictor.is_detector:
        raise UsageError(
            "detectors cannot be pushed",
            why="neither timm nor the hub's own programs have their network",
            hint="export the whole network: reconv export RUN --to onnx",
        )
    if names_code(predictor.recipe.model.name):
        raise UsageError(
            f"{predictor.recipe.model.name} is code of yours, which a weights file does not contain",
            hint="export the whole network: reconv export RUN --to onnx",
        )
    network = find_package_network(predictor.recipe, len(predictor.class_names), "timm")
    state = predictor.module.float().state_dict()
    names = timm_names(predictor.recipe.model.name, state) if network is not None else {name: name for name in state}
    metadata = WeightsMetadata(
        recipe=predictor.recipe,
        class_names=predictor.class_names if predictor.has_class_names else (),
        weights=predictor.weights,
        step=predictor.step,
        version=__version__,
        confidence=predictor.confidence,
    )
    header = to_header(metadata)
    if KEY not in header:
        raise UsageError("the classes and the recipe do not fit into the header of a safetensors file")
    tensors = {names[name]: tensor.detach().contiguous() for name, tensor in state.items()}
    return {
        WEIGHTS_FILE: encode(tensors, header),
        CONFIG_FILE: (json.dumps(config(predictor, network, names), indent=2, ensure_ascii=False) + "\n").encode(),
        CARD_FILE: card(predictor, network, run, repo).encode(),
    }


def config(predictor: Predictor, network: PackageNetwork | None, names: Mapping[str, str]) -> dict[str, Any]:
    """The content of config.json, in timm's format; `model_args` are what its network is built with."""
    preprocess, num_classes = predictor.recipe.data.preprocess, len(predictor.class_names)
    shorter, scale = resized_shorter_side(preprocess), preprocess.divide_by / 255
    head = next((names[name] for name in reversed(list(names)) if _is_head(predictor, name)), "")
    options = {} if network is None else {k: v for k, v in network.options.items() if k not in ("num_classes",)}
    return {
        "architecture": predictor.recipe.model.name if network is None else network.name,
        "num_classes": num_classes,
        "pretrained_cfg": {
            "custom_load": False,
            "input_size": [preprocess.channels, preprocess.size, preprocess.size],
            "fixed_input_size": False,
            "interpolation": preprocess.interpolation,
            "crop_pct": 1.0 if shorter is None else preprocess.size / shorter,
            "crop_mode": "squash" if shorter is None else "center",
            "mean": [value * scale for value in preprocess.mean],
            "std": [value * scale for value in preprocess.std],
            "num_classes": num_classes,
            "classifier": head.removesuffix(".weight"),
        },
        **({"model_args": options} if options else {}),
        "label_names": list(predictor.classes),
        "reconv": {"version": __version__, "network": predictor.recipe.model.name},
    }


def _is_head(predictor: Predictor, name: str) -> bool:
    patterns = tuple(pattern.removesuffix("*") for pattern in head_patterns(predictor.module))
    return name.endswith(".weight") and name.startswith(patterns)


def card(predictor: Predictor, network: PackageNetwork | None, run: RunDir | None, repo: HubRepo) -> str:
    """The model card: its front matter in YAML, how to use the model, and what it was measured to do."""
    recipe, preprocess = predictor.recipe, predictor.recipe.data.preprocess
    tags = ["image-classification", "reconv", *(["timm"] if network is not None else [])]
    timm_lines = [f"    model = timm.create_model('hf-hub:{repo.name}', pretrained=True)    # timm", ""]
    parameters = sum(parameter.numel() for parameter in predictor.module.parameters())
    crop = resized_shorter_side(preprocess)
    images = f"{preprocess.size} px" + ("" if crop is None else f", the center of a shorter side of {crop} px")
    names = [markdown_text(name) for name in predictor.classes[:_MAX_CLASSES_IN_CARD]]
    more = len(predictor.classes) - len(names)
    lines = [
        "---",
        f"library_name: {'timm' if network is not None else 'reconv'}",
        "pipeline_tag: image-classification",
        "tags:",
        *(f"- {tag}" for tag in tags),
        "---",
        "",
        f"# {repo.name.partition('/')[2]}",
        "",
        f"{markdown_text(recipe.model.name)} for {recipe.task}: {len(predictor.classes):,} classes, {parameters:,} "
        f"parameters. Trained with the recipe {markdown_text(recipe.name)} of Reconv {__version__}; these are the "
        f"{predictor.weights} weights" + ("." if predictor.step is None else f" of step {predictor.step:,}."),
        "",
        "## Use it",
        "",
        f"    reconv train finetune --data photos/ --init {repo}",
        f"    model = reconv.load('{repo}')                              # Python",
        *(timm_lines if network is not None else [""]),
        "## Results",
        "",
        _result(run),
        *_confidence_lines(predictor),
        "",
        "## Images",
        "",
        f"{images}, {preprocess.interpolation}. `config.json` has mean and standard deviation.",
        "",
        "## Classes",
        "",
        ", ".join(names) + (f" and {more:,} more, in `config.json`" if more > 0 else "") + ".",
        "",
    ]
    return "\n".join(lines)


def _result(run: RunDir | None) -> str:
    try:
        summary = {} if run is None else read_summary(run.path)
    except (OSError, ValueError, UnreadableRunError):
        summary = {}
    if not summary.get("metric"):
        return "It was not evaluated here."
    value = metric_text(summary["metric"], summary["value"])
    return f"{metric_name(summary['metric'])} {value} on {summary['num_samples'] or 0:,} validation images of its run."


def _confidence_lines(predictor: Predictor) -> list[str]:
    confidence = predictor.confidence
    if confidence is None:
        return []
    text = f"Its probabilities are softmax(logits / {confidence.temperature:g})"
    if confidence.coverage is not None:
        text += (
            f"; the classes with at least {confidence.threshold:.4g} have the right one for {confidence.coverage:.4g} "
            "of images like those it was validated on (split conformal prediction)"
        )
    return ["", f"{text}."]
