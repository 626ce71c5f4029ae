"""What is pushed to a hub is what timm and `--init hf://` read; the token stays secret, and nothing is overwritten."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from export_examples import CLASSES, example_recipe, write_weights
from hub_server import TOKEN, Hub, serve_hub
from safetensors.torch import load, save

import reconv
from reconv.build.addresses import check_addresses
from reconv.build.package_networks import timm_names
from reconv.cli import main
from reconv.core.errors import CheckpointError, ReconvError, ResourceError, UsageError
from reconv.exporters.hub import push
from reconv.models import build_model
from reconv.recipe.schema import Recipe
from reconv.storage import hub as hub_module
from reconv.storage.given_addresses import is_given
from reconv.storage.hub import HubClient, HubRepo
from reconv.storage.object_stores.store import is_address


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub, and a home directory without anything of this user."""
    for name in ("HF_HOME", "HF_TOKEN_PATH", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RECONV_CACHE", str(tmp_path / "cache"))
    with serve_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


def probe(model: reconv.Predictor) -> torch.Tensor:
    shape = model.read.shape
    pixels = (
        np.random.default_rng(0).integers(0, 256, (4, *shape[1:], shape[0]), "u1").squeeze(-1 if shape[0] == 1 else ())
    )
    return model.logits([model.read(image) for image in pixels])


def test_a_pushed_run_is_loaded_with_its_classes_and_confidence(classifier: Path, hub: Hub) -> None:
    result = push(classifier, "hf://me/digits")
    files = hub.repos["me/digits"]
    assert set(result.files) == {"model.safetensors", "config.json", "README.md"} == set(files) - {".gitattributes"}
    assert hub.commits == [f"resnet8_cifar, trained with Reconv {reconv.__version__}"]
    own, found = reconv.load(classifier, device="cpu"), reconv.load("hf://me/digits", device="cpu")
    assert torch.equal(probe(found), probe(own))
    assert (found.classes, found.confidence, found.weights) == (own.classes, own.confidence, "ema")
    front, text = files["README.md"].decode().removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["pipeline_tag"] == "image-classification"
    assert "top-1" in text and "360 validation images" in text and "hf://me/digits" in text
    assert "/" + str(classifier).strip("/") not in text and TOKEN not in text


def test_networks_of_timm_have_its_names_and_its_config(hub: Hub, tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "weights.safetensors", example_recipe("mobilenet_v2"))
    push(weights, "hf://me/mobile")
    files = hub.repos["me/mobile"]
    config = json.loads(files["config.json"])
    assert (config["architecture"], config["num_classes"]) == ("mobilenetv2_100", len(CLASSES))
    assert config["label_names"] == list(CLASSES) and config["pretrained_cfg"]["classifier"] == "classifier"
    own = reconv.load(weights, device="cpu")
    preprocess = own.recipe.data.preprocess
    assert config["pretrained_cfg"]["input_size"] == [3, preprocess.size, preprocess.size]
    names = timm_names("mobilenet_v2", own.module.state_dict())
    assert set(load(files["model.safetensors"])) == set(names.values())
    assert "timm.create_model('hf-hub:me/mobile'" in files["README.md"].decode()
    found = reconv.load("hf://me/mobile", device="cpu", backend="eager")
    assert found.recipe.data.preprocess == preprocess
    torch.testing.assert_close(probe(found), probe(reconv.load(weights, device="cpu", backend="eager")))


@pytest.mark.parametrize("network", ["mobilenet_v2", "resnet18"])
def test_repositories_of_timm_are_initial_weights(hub: Hub, network: str) -> None:
    state = build_model(network, seed=4).state_dict()
    theirs = {timm_names(network, state)[name]: tensor for name, tensor in state.items()}
    architecture = {"mobilenet_v2": "mobilenetv2_100"}.get(network, network)
    pretrained = {
        "input_size": [3, 192, 192],
        "interpolation": "bicubic",
        "crop_pct": 0.96,
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.2, 0.2],
        "num_classes": 1000,
    }
    config = {"architecture": architecture, "num_classes": 1000, "pretrained_cfg": pretrained}
    hub.repos[f"timm/{architecture}.a1_in1k"] = {
        "model.safetensors": save(theirs),
        "config.json": json.dumps(config).encode(),
    }
    model = reconv.load(f"hf://timm/{architecture}.a1_in1k", device="cpu")
    assert model.recipe.model.name == network and len(model.classes) == 1000 and "tench" in model.classes[0]
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.module.state_dict().items())
    preprocess = model.recipe.data.preprocess
    assert (preprocess.size, preprocess.resize, preprocess.interpolation) == (192, 200, "bicubic")
    assert preprocess.mean == (0.5, 0.4, 0.3)


def test_a_recipe_starts_from_a_repository(hub: Hub, classifier: Path) -> None:
    push(classifier, "hf://me/digits")
    overrides = [("length", "1step", "test"), ("schedule.warmup", "0step", "test")]
    run = reconv.train("quickstart", init="hf://me/digits", out="run", overrides=overrides, device="cpu")
    assert run.summary["value"] > 0.8 and "init: hf://me/digits" in (run.folder / "recipe.yaml").read_text()
    assert is_address("hf://me/digits") and is_given("hf://me/digits")
    others = Recipe.model_validate({"model": {"init": "hf://them/unknown"}})
    with pytest.raises(UsageError, match="an address that you have not given"):
        check_addresses(others, "recipe.yaml")


def test_a_model_is_not_replaced_without_consent(classifier: Path, hub: Hub) -> None:
    push(classifier, "hf://me/digits", private=True)
    assert hub.private == {"me/digits"}
    with pytest.raises(UsageError, match="has a model already") as caught:
        push(classifier, "hf://me/digits")
    assert "config.json, model.safetensors" in caught.value.why and "--force" in caught.value.hint
    assert len(hub.commits) == 1
    lines: list[str] = []
    push(classifier, "hf://me/digits", force=True, private=False, log=lines.append)
    assert len(hub.commits) == 2
    assert sum(path.endswith("/storage/" + oid) for _, path, _ in hub.requests for oid in hub.objects) == 1  # known


def test_large_files_go_in_parts_and_failures_are_tried_again(
    classifier: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module.time, "sleep", lambda seconds: None)
    hub.chunk_bytes, hub.failures = 100_000, 2
    push(classifier, "hf://me/digits")
    assert len(hub.parts) == 4
    assert torch.equal(probe(reconv.load("hf://me/digits", device="cpu")), probe(reconv.load(classifier, device="cpu")))
    hub.failures = 3
    with pytest.raises(ResourceError, match="the hub failed"):
        push(classifier, "hf://me/other")


def test_the_token_is_read_as_the_hubs_programs_do_and_never_shown(
    classifier: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match="no token"):
        push(classifier, "hf://me/digits")
    file = tmp_path / "home" / ".cache" / "huggingface" / "token"
    file.parent.mkdir(parents=True)
    file.write_text("hf_wrong_secret\n")
    for arguments in (
        ["push", str(classifier), "hf://me/digits"],
        ["push", "--debug", str(classifier), "hf://me/digits"],
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    shown = "".join(capfd.readouterr())
    assert "status 401" in shown and "hf_wrong_secret" not in shown
    file.write_text(f"{TOKEN}\n")
    push(classifier, "hf://me/digits", private=True)
    with pytest.raises(SystemExit):
        main(["predict", "hf://me/digits", "missing.png"])
    assert TOKEN not in "".join(capfd.readouterr())
    reconv.load("hf://me/digits", device="cpu")
    assert all(had_token for _, path, had_token in hub.requests if path.startswith("/api/"))
    assert not any(had_token for _, path, had_token in hub.requests if path.startswith(("/storage", "/cdn")))


def test_a_host_that_the_hub_names_for_its_files_gets_no_token(classifier: Path, hub: Hub) -> None:
    hub.verifies_elsewhere = True
    push(classifier, "hf://me/digits")
    assert ("POST", "/storage/verify", False) in hub.requests
    assert not any(had_token for _, path, had_token in hub.requests if path.startswith("/storage"))


def test_what_is_no_repository_or_no_model_for_others_is_refused(
    classifier: Path, detector: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in ("hf://digits", "hf://me/../you", "hf://me/a/b", "https://me/digits", "hf://me/a@../b"):
        with pytest.raises(UsageError, match="not the address of a model"):
            HubRepo.parse(address)
    assert HubRepo.parse("hf:/timm/resnet18.a1_in1k") == HubRepo("timm/resnet18.a1_in1k")  # from a Path
    assert str(HubRepo.parse("hf://me/a@v1.0")) == "hf://me/a@v1.0"
    with pytest.raises(UsageError, match="detectors"):
        push(detector, "hf://me/detector")
    with pytest.raises(CheckpointError, match="404"):
        reconv.load("hf://me/absent", device="cpu")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    with pytest.raises(UsageError, match="not an https address"):
        HubClient(HubRepo("me/a"))


@pytest.mark.parametrize(
    "config", [b"[", b"\xff", b'{"architecture": "resnet18", "pretrained_cfg": {"input_size": ["x"]}}']
)
def test_a_malformed_config_is_an_error(hub: Hub, config: bytes) -> None:
    hub.repos["a/b"] = {"model.safetensors": save({"fc.weight": torch.zeros(2, 2)}), "config.json": config}
    with pytest.raises(ReconvError, match=r"config\.json of hf://a/b"):
        reconv.load("hf://a/b", device="cpu")
