"""Runs with initial weights: matching, missing and unexpected keys, and frozen parameters."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import reconv
from reconv.checkpoint.safetensors_bytes import encode
from reconv.checkpoint.store import CheckpointStore
from reconv.cli import main
from reconv.core.errors import CheckpointError, ExitCode, PreemptedError, RecipeError, UsageError
from reconv.logging.event_log import read_events
from reconv.logging.events import Event, LogMessage, TrainProgress
from reconv.logging.run_dir import RunDir
from reconv.models import build_model

SHORT = {"length": "6step", "schedule.warmup": "1step", "save.every": "6step", "evaluate.every": "off"}
FIXTURES = Path(__file__).parents[1] / "checkpoint/interop/fixtures/tensorflow"

Run = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Train the quickstart recipe for some steps; the run directory."""

    def train(name: str, resume: bool = False, on_event: Callable[[Event], None] | None = None, **given: str) -> Path:
        settings = {**SHORT, **{field.replace("__", "."): value for field, value in given.items()}}
        overrides = [(field, value, "--set") for field, value in settings.items()]
        out = tmp_path / name
        return reconv.train("quickstart", out=out, overrides=overrides, resume=resume, on_event=on_event).folder

    return train


def tensors_of(folder: Path, part: str = "model") -> dict[str, Tensor]:
    newest = CheckpointStore(RunDir(folder).checkpoints).newest().path
    assert newest is not None
    return safetensors.torch.load_file(newest / f"{part}.safetensors")


def notes_of(folder: Path) -> list[str]:
    return [event.text for event in read_events(RunDir(folder).events) if isinstance(event, LogMessage)]


def weights_file(path: Path, num_classes: int) -> Path:
    """A ten-class network's weights under other classes, with one tensor too many."""
    model = build_model("resnet8_cifar", num_classes=num_classes, in_channels=1)
    draw = torch.Generator().manual_seed(5)
    tensors = {n: torch.rand(t.shape, generator=draw) + 0.5 for n, t in model.state_dict().items() if t.ndim}
    torch.save({"state_dict": {f"module.{n}": t for n, t in tensors.items()} | {"module.extra": torch.ones(1)}}, path)
    return path


def test_run_logs_loaded_missing_and_unexpected_keys(run: Run, tmp_path: Path) -> None:
    file = weights_file(tmp_path / "w.pth", num_classes=4)
    notes = notes_of(run("tuned", model__init=str(file)))
    text = next(note for note in notes if note.startswith("weights from"))
    assert "tensors loaded" in text
    assert "1 unexpected: extra" in text
    assert "2 with another shape: fc.weight [4, 64] -> [10, 64], fc.bias [4] -> [10]" in text
    assert "initialized from the seed: fc.weight, fc.bias" in notes


def test_freeze_backbone_trains_only_the_head_and_saves_all_weights(run: Run, tmp_path: Path) -> None:
    file = weights_file(tmp_path / "w.pth", num_classes=4)
    folder = run("tuned", model__init=str(file), model__freeze_backbone="true", ema__decay="0.5")
    given = {n.removeprefix("module."): t for n, t in torch.load(file)["state_dict"].items()}
    for part in ("model", "ema"):
        after = tensors_of(folder, part)
        counters = {n for n in after if n.endswith("num_batches_tracked")}
        assert set(after) - counters == set(given) - {"extra"}
        moved = {n for n in set(after) - counters if n not in ("fc.weight", "fc.bias") and not after[n].equal(given[n])}
        assert moved == set()
        assert all(int(after[n]) == 0 for n in counters)
    assert {n.rpartition("momentum.")[2] for n in tensors_of(folder, "optimizer")} == {"fc.weight", "fc.bias"}
    start = build_model("resnet8_cifar", num_classes=10, in_channels=1).state_dict()["fc.weight"]
    assert not tensors_of(folder)["fc.weight"].equal(start)
    assert any("650 parameters are trained (fc.weight, fc.bias)" in note for note in notes_of(folder))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["num_trained"] == 650 < summary["num_parameters"]
    assert "650 trained, " in (folder / "report.html").read_text()


def test_trainable_pattern_trains_matching_parameters(run: Run) -> None:
    first = run("first")
    folder = run("second", model__init=str(first), model__trainable="[layer3.*, fc.*]")
    before, after = tensors_of(first), tensors_of(folder)
    moved = {name for name in after if not after[name].equal(before[name])}
    assert moved and {name.partition(".")[0] for name in moved} == {"layer3", "fc"}
    assert "layer3.0.bn1.running_mean" in moved


def test_frozen_run_resumes_bitwise_without_the_initial_weights(run: Run, tmp_path: Path) -> None:
    file = weights_file(tmp_path / "w.pth", num_classes=4)
    settings = {"model__init": str(file), "model__freeze_backbone": "true", "ema__decay": "0.9", "log__every": "1step"}
    whole = run("whole", **settings)

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PreemptedError):
        run("parts", on_event=stop, **settings)
    file.unlink()
    resumed = run("parts", resume=True, **settings)
    for part in ("model", "ema", "optimizer"):
        one, other = tensors_of(whole, part), tensors_of(resumed, part)
        assert one.keys() == other.keys() and len(one) >= 2
        assert [name for name in one if not one[name].equal(other[name])] == []


def test_run_initialized_from_a_run_uses_its_ema_weights(run: Run) -> None:
    first = run("first", ema__decay="0.9")
    tiny_step = {"schedule__lr": "1e-30", "optimizer__weight_decay": "0"}
    second = run("second", model__init=str(first), **tiny_step)
    assert tensors_of(second)["fc.weight"].equal(tensors_of(first, "ema")["fc.weight"])
    assert not tensors_of(first, "ema")["fc.weight"].equal(tensors_of(first)["fc.weight"])
    named = CheckpointStore(RunDir(first).checkpoints).newest().path
    assert named is not None
    third = run("third", model__init=str(named / "model.safetensors"), **tiny_step)
    assert tensors_of(third)["fc.weight"].equal(tensors_of(first)["fc.weight"])


@pytest.mark.parametrize("padding", ["same", "torch"])
def test_run_initialized_from_tensorflow_weights_logs_the_padding(run: Run, padding: str) -> None:
    settings = {
        "model__name": "resnet50",
        "model__options": f"{{depths: [2, 1, 1], width: 4, padding: {padding}}}",
        "model__init": str(FIXTURES / "official"),
        "data__source": "synthetic",
        "data__num_samples": "64",
        "data__num_classes": "10",  # the checkpoint has eleven: the first is the background
        "data__preprocess": "{size: 32, resize: null, channels: 3, mean: [0, 0, 0], std: [1, 1, 1]}",
        "length": "1step",
    }
    notes = notes_of(run("tf", **settings))
    kept = next(note for note in notes if "tensors loaded" in note)
    assert not any(word in kept for word in ("missing", "unexpected", "another shape"))
    assert any("model.options.padding=same" in note for note in notes) == (padding == "torch")


def test_a_detector_initialized_from_tensorflow_weights_needs_no_padding(tmp_path: Path) -> None:
    settings = {
        "model.options.backbone": "resnet50",
        "model.options.depths": [2, 1, 1],
        "model.options.width": 4,
        "model.init": str(FIXTURES / "official"),
        "data.num_samples": 4,
        "batch.size": 2,
        "length": "1step",
        "schedule.warmup": "0step",
        "evaluate.every": "off",
    }
    overrides = [(name, value, "test") for name, value in settings.items()]
    notes = notes_of(reconv.train("quickstart-detection", out=tmp_path / "run", overrides=overrides).folder)
    assert any("tensors loaded" in note for note in notes)
    assert not any("padding" in note for note in notes)


@pytest.mark.parametrize("name", ["absent.pth", "absent/model.ckpt-3"])
def test_missing_initial_weights_exit_4_and_create_no_run_directory(run: Run, tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="initial weights were not found") as caught:
        run("a", model__init=name)
    assert caught.value.code == ExitCode.CHECKPOINT
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("damage", ["empty", "cut", "no weights", "no run", "pipe"])
def test_unreadable_initial_weights_create_no_run_directory(run: Run, tmp_path: Path, damage: str) -> None:
    good = weights_file(tmp_path / "good.pth", num_classes=10)
    bad = tmp_path / "bad.pth"
    match damage:
        case "empty":
            bad.touch()
        case "cut":
            bad.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
        case "no weights":
            bad.write_text("<html>404</html>")
        case "no run":
            bad.mkdir()
        case "pipe":
            os.mkfifo(bad)
    with pytest.raises(CheckpointError) as caught:
        run("a", model__init=str(bad))
    assert caught.value.where == str(bad)
    assert not (tmp_path / "a").exists()
    run("a", model__init=str(good))


class Folder(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""


def test_weights_from_a_url_are_cached_for_the_next_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECONV_CACHE", str(tmp_path / "cache"))
    file = weights_file(tmp_path / "w.pth", num_classes=10)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Folder, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}/w.pth"
        first = run("first", model__init=address)
        server.shutdown()
        thread.join()
    notes = notes_of(first)
    assert any(note.startswith(f"{address}: ") and "not published" in note for note in notes)
    assert not any("from the cache" in note for note in notes)
    second, third = run("second", model__init=address), run("third", model__init=str(file))
    assert any("from the cache" in note for note in notes_of(second))
    for name, tensor in tensors_of(third).items():
        assert tensor.equal(tensors_of(first)[name]) and tensor.equal(tensors_of(second)[name])


def test_init_and_freeze_options(tmp_path: Path) -> None:
    file = weights_file(tmp_path / "w.pth", num_classes=4)
    settings = [word for field, value in SHORT.items() for word in ("--set", f"{field}={value}")]
    out = ["train", "quickstart", "--out", str(tmp_path / "run"), "--quiet", *settings]
    for words, code in ((["--freeze"], ExitCode.USAGE), (["--init", str(file), "--freeze"], ExitCode.OK)):
        with pytest.raises(SystemExit) as end:
            main([*out, *words])
        assert end.value.code == code
    assert any("650 parameters are trained" in note for note in notes_of(tmp_path / "run"))


def test_weights_without_matching_names_exit_4(run: Run, tmp_path: Path) -> None:
    torch.save({"features.0.weight": torch.ones(3)}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="do not match the model"):
        run("a", model__init=str(tmp_path / "w.pth"))


def test_contradictory_freeze_settings_are_an_error(run: Run) -> None:
    with pytest.raises(RecipeError, match=r"model\.init"):
        run("a", model__trainable="[fc.*]")
    with pytest.raises(RecipeError, match=r"model\.trainable"):
        run("a", model__trainable="[fc.*]", model__freeze_backbone="true", model__init="w.pth")
    first = run("first")
    with pytest.raises(UsageError, match=r"layr4"):
        run("b", model__trainable="['layr4.*']", model__init=str(first))


def test_weights_file_in_a_checkpoint_needs_no_recipe(run: Run) -> None:
    folder = run("run", ema__decay="0.9")
    checkpoint = CheckpointStore(RunDir(folder).checkpoints).newest().path
    assert checkpoint is not None
    for part, weights in (("model", "raw"), ("ema", "ema")):
        [whole] = reconv.evaluate(folder, weights=weights)
        [bare] = reconv.evaluate(checkpoint / f"{part}.safetensors")
        assert (bare.weights, bare.metrics, bare.step) == (weights, whole.metrics, 6)
    elsewhere = folder.parent / "bare.safetensors"
    elsewhere.write_bytes(encode(safetensors.torch.load_file(checkpoint / "model.safetensors")))
    with pytest.raises(UsageError, match="--recipe"):
        reconv.evaluate(elsewhere)
    assert (
        reconv.evaluate(elsewhere, recipe="quickstart")[0].metrics == reconv.evaluate(folder, weights="raw")[0].metrics
    )


def test_freezing_with_weights_of_another_model_is_an_error(tmp_path: Path) -> None:
    network = build_model("resnet8_cifar", num_classes=10, in_channels=1)
    few = {name: tensor for name, tensor in network.state_dict().items() if name.startswith(("conv1", "bn1"))}
    safetensors.torch.save_file(few, tmp_path / "few.safetensors")
    given = [("model.init", str(tmp_path / "few.safetensors"), "--init"), ("length", "1step", "--set")]
    given += [("schedule.warmup", "1step", "--set"), ("evaluate.every", "off", "--set")]
    reconv.train("quickstart", out=tmp_path / "free", overrides=given)
    with pytest.raises(CheckpointError, match="another model"):
        reconv.train(
            "quickstart", out=tmp_path / "run", overrides=[*given, ("model.freeze_backbone", "true", "--freeze")]
        )


def test_decay_rule_that_matches_no_norm_creates_no_run_directory(tmp_path: Path) -> None:
    given = [("model.name", "mobilenet_v2", "--model"), ("optimizer.weight_decay_exclude", "nvidia-by-name", "--set")]
    with pytest.raises(UsageError, match="nvidia-by-name"):
        reconv.train("synthetic", out=tmp_path / "run", overrides=given)
    assert not (tmp_path / "run").exists()
