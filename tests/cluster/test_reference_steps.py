"""`reconv doctor --gpu`: devices that compute other bits are named; the CPU stands in for a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from golden_runs import BASE, GPU_SETTINGS, RUNS, machine_key, read_values

from reconv.cli import main
from reconv.cluster import reference_steps
from reconv.cluster.reference_steps import REFERENCES, TRAININGS, check_device, compared, train


def test_the_trainings_and_references_are_those_of_the_golden_runs() -> None:
    golden = read_values("cuda")["torch 2.11.0+cu130, NVIDIA H200"]
    shipped = json.loads(REFERENCES.read_text())["NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0, Triton 3.6"]
    for name, settings in TRAININGS.items():
        assert settings == {**BASE, **RUNS[name].settings, **GPU_SETTINGS}
        assert shipped[name] == golden[name]["digests"]["model"]


def test_a_training_has_the_bits_of_its_golden_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = read_values("cpu").get(machine_key())
    settings = {**BASE, **RUNS["quickstart"].settings}
    monkeypatch.setattr(reference_steps, "TRAININGS", {"quickstart": settings})
    [result] = check_device("cpu", "this CPU")
    assert (result.level, result.text) == ("ok", "the same bits twice; no reference for this CPU")
    if stored is not None:
        assert result.value == stored["quickstart"]["digests"]["model"]


def test_a_device_that_computes_other_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter(("0", "1"))

    def defective(train: Callable[[str, str], str]) -> Callable[[str, str], str]:
        def run(name: str, device: str) -> str:
            monkeypatch.setattr(reference_steps, "TRAININGS", {name: {**TRAININGS[name], "seed": next(seeds)}})
            return train(name, device)

        return run

    monkeypatch.setattr(reference_steps, "TRAININGS", {"quickstart": TRAININGS["quickstart"]})
    monkeypatch.setattr(reference_steps, "train", defective(train))
    [result] = check_device("cpu", "this CPU")
    assert (result.level, result.text) == ("wrong", "computed other bits the second time")


@pytest.mark.parametrize(
    ("second", "reference", "level", "text"),
    [
        ("a", "a", "ok", "the same bits twice, and those of the reference for KEY"),
        ("a", None, "ok", "the same bits twice; no reference for KEY"),
        ("a", "b", "wrong", "the same bits twice, but not those of other devices with KEY"),
        ("b", "a", "wrong", "computed other bits the second time"),
    ],
)
def test_verdicts(second: str, reference: str | None, level: str, text: str) -> None:
    result = compared("cuda:0 quickstart", "a", second, reference, "KEY")
    assert (result.level, result.text) == (level, text)


def test_without_a_gpu_the_command_says_that_nothing_was_computed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--gpu"])
    assert end.value.code == 2
    assert "no GPU: nothing was computed" in capsys.readouterr().out
