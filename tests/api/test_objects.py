"""Networks, datasets, losses, transforms, metrics and callbacks that Python passes to `train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_code import Blur, Brighten, Count, LazyNet, MacroRecall, Net, Squares, focal
from torch import nn

import reconv
from reconv.build.saved_model import read_saved_model
from reconv.checkpoint.locate import locate
from reconv.core.custom_code import CustomCodeError
from reconv.core.errors import UsageError
from reconv.logging.event_log import read_events
from reconv.logging.events import EvalFinished, Event, LogMessage, ScalarLogged, TrainProgress
from reconv.recipe.loader import load

SHORT = [
    ("length", "2step", "test"),
    ("schedule.warmup", "1step", "test"),
    ("batch.size", "16", "test"),
    ("save.every", "2step", "test"),
]


def train(out: str, **given: Any) -> Path:
    overrides = [*SHORT, *((name, value, "test") for name, value in given.pop("overrides", {}).items())]
    return reconv.train("quickstart", out=out, overrides=overrides, **given).folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read_saved_model(locate(run), weights="auto", recipe=None).tensors


def test_a_run_of_objects_names_their_import_paths_and_can_be_evaluated() -> None:
    events: list[Event] = []
    run = train(
        "run",
        data=(Squares("train", 48), Squares("val", 48)),
        model=Net,
        loss=focal,
        host_transforms=[Blur()],
        device_transforms=[Brighten],
        metrics=[MacroRecall],
        callbacks=[Count()],
        on_event=events.append,
    )
    recipe = load(str(run / "recipe.yaml")).recipe
    assert (recipe.model.name, recipe.loss.name) == ("own_code:Net", "own_code:focal")
    assert recipe.data.source == "python:Squares"
    names = [(entry.name, entry.on_device) for entry in recipe.augment.extra]
    assert names == [("python:Blur", False), ("own_code:Brighten", True)]
    assert [e.value for e in events if isinstance(e, ScalarLogged) and e.name == "count/steps"] == [1, 2]
    [evaluation] = [event for event in events if isinstance(event, EvalFinished)]
    [again] = reconv.evaluate(run)  # everything was passed in this process, so nothing is imported
    assert again.metrics == dict(evaluation.metrics) and "macro_recall" in again.metrics


def test_a_module_keeps_its_weights_and_is_not_changed() -> None:
    module = Net(10, in_channels=1)
    with torch.no_grad():
        module.fc.bias.fill_(5)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run = train("run", model=module, callbacks=[])
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert type(module.bn) is nn.BatchNorm2d
    trained = weights(run)
    assert trained.keys() == before.keys() - {"bn.num_batches_tracked"} or trained.keys() == before.keys()
    assert trained["fc.bias"].mean() > 4


def test_a_class_in_a_function_cannot_be_imported_and_is_passed_again() -> None:
    class Local(Net):
        pass

    run = train("run", model=Local)
    assert load(str(run / "recipe.yaml")).recipe.model.name == "python:Local"
    train("other", model=Local)
    assert weights(run).keys() == weights(Path("other")).keys()


def test_objects_that_cannot_be_pickled_are_refused_with_several_devices() -> None:
    with pytest.raises(UsageError, match="cannot be sent to other processes"):
        train("run", loss=lambda logits, targets: logits.sum(dim=1), devices=2)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": [1, 2]}, "pass a path, or a pair of datasets"),
        ({"model": 3}, "is not a model"),
        ({"loss": 3}, "is not a loss"),
        ({"loss": focal, "overrides": {"loss.options": {"gama": 2}}}, "gama"),
        ({"loss": lambda logits, targets: logits}, r"returns a tensor \[6, 10\]"),
        ({"callbacks": [object()]}, "is not a callback"),
        ({"model": lambda num_classes: 3}, "not a torch.nn.Module"),
        ({"model": lambda num_classes: nn.Flatten()}, r"returns a tensor \[2, 64\]"),
        ({"model": nn.BatchNorm1d}, "cannot be called with num_classes"),
    ],
)
def test_objects_of_the_wrong_kind_are_refused_without_a_run_directory(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train("run", **given)
    assert not Path("run").exists()


def test_lazy_modules_get_their_sizes_from_the_images_of_the_run() -> None:
    run = train("run", model=LazyNet, callbacks=[])
    tensors = weights(run)
    assert tensors["0.weight"].shape == (6, 1, 3, 3) and tensors["4.weight"].shape == (10, 6 * 6 * 6)
    module = LazyNet(10)
    train("other", model=module)  # the same weights, as they follow from the seed
    assert isinstance(module[0], nn.LazyConv2d)
    [evaluation] = reconv.evaluate(run)
    assert evaluation.num_samples == 360


def test_a_lazy_network_that_does_not_take_the_images_is_an_error_of_its_code() -> None:
    with pytest.raises(CustomCodeError, match="which initializes its lazy modules"):
        train("run", model=nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyConv3d(4, 5), nn.LazyLinear(10)))
    assert not Path("run").exists()


def test_a_reduced_loss_trains_as_the_built_in_one_does() -> None:
    def last_loss(out: str, **given: Any) -> float:
        overrides = {"log.every": "1step", "loss.label_smoothing": 0.0}
        events = read_events(train(out, overrides=overrides, **given) / "events.jsonl")
        return [event.loss for event in events if isinstance(event, TrainProgress)][-1]

    assert last_loss("run", loss=nn.CrossEntropyLoss()) == pytest.approx(last_loss("built-in"), rel=1e-6)
    notes = [e.text for e in read_events(Path("run/events.jsonl")) if isinstance(e, LogMessage)]
    assert sum("reduction='mean' is now 'none'" in text for text in notes) == 1
