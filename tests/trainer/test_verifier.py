"""`engine.verify`: flipped bits are found, and the run ends with the bits of an undisturbed one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from bit_flips import AT_REST, IN_FLIGHT, TINY, Flip, Outcome, last_bits, run_with
from golden_data import write_photo_folder
from ranks import in_ranks

import reconv
from reconv.core.batch import Batch
from reconv.core.errors import DivergedError, ExitCode, FaultyDeviceError, RecipeError
from reconv.logging.event_log import latest_by_step, read_events
from reconv.logging.events import TrainProgress, WrongBits
from reconv.trainer import verifier
from reconv.trainer.loop import Trainer
from reconv.trainer.step import StepResult, TrainStep
from reconv.trainer.verifier import Verifier

Run = Callable[..., Outcome]
LONG = {**TINY, "length": "14step", "save.every": "off", "evaluate.every": "off"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """The last checkpoint of the undisturbed run without engine.verify."""
    bits = run_with(tmp_path_factory.mktemp("undisturbed") / "run", None, TINY).bits
    assert len(bits) > 100
    return bits


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def start(mode: str, flip: Flip | None, settings: Mapping[str, str] = TINY, **options: object) -> Outcome:
        return run_with(tmp_path / "run", flip, {**settings, "engine.verify": mode}, **options)

    return start


@pytest.mark.parametrize("mode", ["sample", "full"])
def test_an_undisturbed_run_has_the_same_bits_and_no_alarm(
    run: Run, expected: Mapping[str, bytes], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "SAMPLE_STEPS", 3)  # three probes, and the last step again
    outcome = run(mode, None)
    assert outcome.bits == expected
    assert (outcome.found, outcome.error) == ((), None)
    assert outcome.num_replays == (12 if mode == "full" else 4)


@pytest.mark.parametrize("target", [*AT_REST, *IN_FLIGHT])
def test_full_survives_every_kind_of_flip(run: Run, expected: Mapping[str, bytes], target: str, tmp_path: Path) -> None:
    outcome = run("full", Flip(target=target, step=1, seed=4))
    assert outcome.struck
    assert outcome.error is None
    assert outcome.bits == expected
    if target == "kept copy":  # it was not needed
        return
    finding = outcome.found[0]
    how = {"checkpoint": "checkpoint", "cache": "image"}.get(target, "replay" if target in IN_FLIGHT else "at rest")
    assert (finding.rank, finding.how) == (0, how)
    if how == "at rest":
        assert outcome.struck[0].startswith(f"{finding.tensor}[")
        assert (finding.step, finding.to_step) == (1, 1)
    steps = [
        event.step
        for event in latest_by_step(read_events(tmp_path / "run" / "events.jsonl"))
        if isinstance(event, TrainProgress)
    ]
    assert steps == [6, 12]


@pytest.mark.parametrize("target", ["weights", "weights in use", "optimizer", "ema", "statistics", "checkpoint"])
def test_sample_finds_what_changes_at_rest(run: Run, expected: Mapping[str, bytes], target: str) -> None:
    outcome = run("sample", Flip(target=target, step=5, seed=1))
    assert outcome.struck
    assert len(outcome.found) == 1
    assert outcome.bits == expected


@pytest.mark.parametrize("mode", ["sample", "full"])
def test_the_last_checkpoint_is_saved_again_if_it_was_wrong_in_memory(
    run: Run, expected: Mapping[str, bytes], mode: str
) -> None:
    outcome = run(mode, Flip(target="checkpoint", step=9, seed=1))
    assert [(event.step, event.how) for event in outcome.found] == [(12, "checkpoint")]
    assert outcome.error is None
    assert outcome.bits == expected


@pytest.mark.parametrize(("num_damaged", "to_step"), [(1, 0), (2, 6)])
def test_a_copy_that_is_wrong_itself_is_not_used(
    run: Run, expected: Mapping[str, bytes], num_damaged: int, to_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older copy is taken, which is that of the beginning; if that is wrong, too, the newest checkpoint."""
    restore = Verifier.restore

    def restore_after_damage(self: Verifier, last_step: int | None) -> object:
        for state in self._proved[:num_damaged]:
            state.block[0, 0] ^= 1 << 20
        return restore(self, last_step)

    monkeypatch.setattr(Verifier, "restore", restore_after_damage)
    outcome = run("full", Flip(target="gradients", step=7, seed=2))
    assert [event.to_step for event in outcome.found] == [to_step]
    assert outcome.bits == expected


def test_a_fault_that_stays_ends_the_run_and_its_checkpoint_is_right(
    run: Run, expected: Mapping[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "SAMPLE_STEPS", 4)
    outcome = run("sample", Flip(target="activations", step=5, seed=3, is_persistent=True))
    assert isinstance(outcome.error, FaultyDeviceError)
    assert outcome.error.code == ExitCode.FAULTY_DEVICE
    assert "rank 0 had wrong bits for the second time" in str(outcome.error)
    assert [(event.step, event.to_step) for event in outcome.found] == [(7, 4), (7, 4)]
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-000000004"]
    overrides = [(name, value, "--set") for name, value in TINY.items()]
    reconv.train("quickstart", out=tmp_path / "run", overrides=overrides, resume=True)
    assert last_bits(tmp_path / "run") == expected


@pytest.mark.parametrize("target", ["gradients", "activations", "update"])
def test_a_probe_of_some_images_finds_a_fault_that_stays(
    run: Run, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "SAMPLE_STEPS", 4)
    sizes: list[int] = []
    repeat = TrainStep.repeat

    def repeat_and_note(self: TrainStep, step: int, batches: Sequence[Batch]) -> StepResult:
        sizes.append(sum(map(len, batches)))
        return repeat(self, step, batches)

    monkeypatch.setattr(TrainStep, "repeat", repeat_and_note)
    outcome = run("sample", Flip(target=target, step=1, seed=3, is_persistent=True))
    assert isinstance(outcome.error, FaultyDeviceError)
    assert [(event.step, event.how, event.to_step) for event in outcome.found] == [(3, "replay", 0)] * 2
    assert sizes == [2, 2] * 2  # of eight


def test_images_are_read_again_from_the_files_of_a_cache(tmp_path: Path, run: Run) -> None:
    photos = {
        **TINY,
        "data.source": "folder",
        "data.path": str(write_photo_folder(tmp_path / "photos")),
        "data.cache": "ram",
        "data.subset_percent": "100",
        "data.preprocess.size": "32",
        "data.preprocess.resize": "36",
    }
    undisturbed = run_with(tmp_path / "undisturbed", None, photos)
    plain = run_with(tmp_path / "plain", Flip(target="cache", step=3, seed=5), photos)
    outcome = run("sample", Flip(target="cache", step=3, seed=5), photos)
    assert plain.bits != undisturbed.bits
    assert outcome.bits == undisturbed.bits
    assert [event.how for event in outcome.found] == ["image"]
    assert outcome.found[0].tensor.endswith(".jpg")


def test_a_run_that_diverges_by_itself_still_does(tmp_path: Path) -> None:
    overrides = [(n, v, "--set") for n, v in {**LONG, "schedule.lr": "1e30", "engine.verify": "sample"}.items()]
    events: list[object] = []
    with pytest.raises(DivergedError):
        reconv.train("quickstart", out=tmp_path / "run", overrides=overrides, on_event=events.append)
    assert not [event for event in events if isinstance(event, WrongBits)]


def test_a_flip_that_makes_a_step_diverge_is_no_divergence(run: Run) -> None:
    def strike(trainer: Trainer) -> None:
        weight = next(trainer.step.model.parameters())
        struck: list[int] = []

        def once(gradient: torch.Tensor) -> torch.Tensor:
            struck.append(1)
            return gradient * torch.nan if len(struck) == 9 else gradient

        weight.register_hook(once)

    settings = {**LONG, "save.every": "14step"}
    undisturbed = run("sample", None, settings)
    outcome = run_with(Path("struck"), None, {**settings, "engine.verify": "sample"}, setup=strike)
    assert outcome.error is None
    assert outcome.bits == undisturbed.bits


def test_what_cannot_be_computed_again_is_refused(tmp_path: Path) -> None:
    for field, value in (
        ("memory.offload_optimizer", "true"),
        ("model.freeze_until", "3step"),
        ("data.preload", "device"),
    ):
        overrides = [(n, v, "--set") for n, v in {**LONG, field: value, "engine.verify": "full"}.items()]
        with pytest.raises(RecipeError, match=f"{field}: .*not supported with engine.verify"):
            reconv.train("quickstart", out=tmp_path / "run", overrides=overrides)


def of_rank(folder: str, flip: Flip | None, settings: Mapping[str, str], sample_steps: int) -> Outcome:
    verifier.SAMPLE_STEPS = sample_steps
    return run_with(Path(folder), flip, settings)


RANKS = {**TINY, "batch.size": "16", "evaluate.every": "off"}


def test_a_rank_with_wrong_gradients_is_named(tmp_path: Path) -> None:
    """Ordered reduction gives the bits of one process, so that it need not be trained in ranks without the fault."""
    settings = {**RANKS, "parallel.reduce": "ordered"}
    expected = run_with(tmp_path / "plain", None, settings).bits
    flip = Flip(target="gradients", step=6, seed=1, rank=1)
    outcomes = in_ranks(2, of_rank, str(tmp_path / "full"), flip, {**settings, "engine.verify": "full"}, 4)
    assert outcomes[1].struck and not outcomes[0].struck
    assert [(event.rank, event.how, event.to_step) for event in outcomes[0].found] == [(1, "replay", 6)]
    assert outcomes[0].bits == expected


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["fast", "ordered"])
def test_a_rank_that_is_always_wrong_in_the_same_way_is_seen_by_the_other(tmp_path: Path, reduce: str) -> None:
    settings = {**RANKS, "parallel.reduce": reduce, "engine.verify": "sample"}
    undisturbed = in_ranks(2, of_rank, str(tmp_path / "none"), None, settings, 4)
    assert (undisturbed[0].found, undisturbed[0].num_replays) == ((), 3)
    flip = Flip(target="gradients", step=5, seed=3, rank=1, is_persistent=True, is_fixed=True)
    outcomes = in_ranks(2, of_rank, str(tmp_path / "fixed"), flip, settings, 4)
    assert {(event.how, event.to_step) for event in outcomes[0].found} == {("other rank", 4)}
    assert [type(outcome.error) for outcome in outcomes] == [FaultyDeviceError] * 2
