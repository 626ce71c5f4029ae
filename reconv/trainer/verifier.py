"""`engine.verify`: finds bits that hardware gets wrong, and goes back to the last state that was proved right.

A step is a function of state, batches and step number, so that computing it twice gives the same bits. Three proofs:

    at rest   Weights, statistics, optimizer state and EMA change in the update alone. Their digests are taken after it
              and compared before the next one.
    replay    A step is computed again from a copy of the state: with `full` every step, from batches that were loaded
              again, with `sample` one of SAMPLE_STEPS, from the same batches. On a CPU three of four of these are
              probes: a step of some of the images is computed twice and taken back, which takes a third of the time.
              Ranks also compute the gradients of each other's batches, by turns.
    ranks     Data-parallel ranks have the same state, and compare its digest.

Copies of the two states that were proved last are kept in memory. What a rank finds is agreed on by all, which go back
together. The second finding at a rank ends the run: its hardware is not to be trusted.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.bits import StateBlock, StateDigests, row_digests
from reconv.core.errors import FaultyDeviceError, RecipeError
from reconv.core.message import message
from reconv.data.transforms.mixup import first_rows
from reconv.device import Device
from reconv.distributed.process_group import ProcessGroup
from reconv.logging.events import WrongBits
from reconv.logging.run_logger import RunLogger
from reconv.trainer.progress import Counters, ProgressSums
from reconv.trainer.step import StepResult, TrainStep

if TYPE_CHECKING:
    from reconv.trainer.run import TrainingRun
    from reconv.trainer.train_state import TrainState

SAMPLE_STEPS = 100  # of these one is computed again: a fault that stays is found within as many steps
STEPS_PER_REPLAY = 4  # sampled ones, of which one is computed again whole and the others are probes
_PROBE_SHARE = 8  # a probe has one of so many images
_MIN_PROBE = 2  # batch normalization needs two
MAX_FINDINGS = 2  # at one rank
_STEPS_PER_READ = 16  # on a device that the host would have to wait for


@message
@dataclass(frozen=True, slots=True)
class Finding:
    """Bits that are wrong on a rank."""

    rank: int
    step: int  # steps done before
    tensor: str
    how: Literal["at rest", "replay", "other rank", "ranks", "image", "checkpoint"]


class WrongBitsError(Exception):
    """Raised on all ranks where the run must go back; `findings` are those of all ranks."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__(", ".join(f"{finding.tensor} of rank {finding.rank}" for finding in findings))
        self.findings = tuple(findings)

    @property
    def last_step(self) -> int | None:
        """The last step to which the run may go back, if not any.

        It is before a checkpoint that is not on disk, so that all that happens at its step happens again: the
        evaluation, the end of the run, and the save.
        """
        return min((finding.step - 1 for finding in self.findings if finding.how == "checkpoint"), default=None)


@dataclass(frozen=True, slots=True)
class ProvedState:
    """A state that was proved right: its tensors in one block of memory with their digests, and the counters."""

    counters: Counters
    block: Tensor
    rows: Tensor
    progress: ProgressSums
    micro_groups: int

    def is_right(self) -> bool:
        """True if the copy itself has not changed."""
        return torch.equal(row_digests(self.block).cpu(), self.rows)


@dataclass(slots=True)
class Verifier:
    """Runs training steps and proves them; every rank makes the same calls."""

    mode: Literal["sample", "full"]
    digests: StateDigests
    device: Device
    process_group: ProcessGroup
    logger: RunLogger
    exchanges_batches: bool  # whether ranks compute the gradients of each other's batches
    take_wrong_images: Callable[[], Sequence[str]] = lambda: ()  # since the last call
    findings: list[Finding] = field(default_factory=list)  # of this rank, not yet agreed on
    num_findings: Counter[int] = field(default_factory=Counter)  # by rank
    num_replays: int = 0
    _full_until: int = 0  # the step before which every step is computed again, also where the mode is `sample`
    _proved: list[ProvedState] = field(default_factory=list)  # the newest first
    _read: Callable[[], Tensor] | None = None

    @classmethod
    def for_run(cls, run: TrainingRun, train_state: TrainState) -> Verifier | None:
        """The verifier that a recipe asks for; None where it is off."""
        mode, kind = run.recipe.engine.verify, run.device.kind
        if mode == "off":
            return None
        if kind not in ("cpu", "cuda"):
            raise RecipeError(
                f"engine.verify is not supported on {kind}",
                why=f"{kind} has not been shown to compute the same bits twice",
                hint="--set engine.verify=off",
            )
        group = run.process_group
        return cls(
            mode,
            StateDigests(StateBlock(all_tensors(train_state))),
            run.device,
            group,
            run.logger,
            exchanges_batches=group.world_size > 1 and run.plan.devices_per_group == 1,
            take_wrong_images=run.datasets.wrong_images.take if run.datasets.wrong_images else lambda: (),
        )

    @property
    def rank(self) -> int:
        return self.process_group.rank

    # Steps

    def run_step(
        self, train_step: TrainStep, step: int, micro_batches: Sequence[Batch], again: Sequence[Batch]
    ) -> StepResult:
        """Train on one global batch, and prove the step if it is sampled; `again` has the same samples."""
        is_sampled = (step + 1) % SAMPLE_STEPS == 0
        is_full = self.mode == "full" or step < self._full_until
        is_probed = self.device.kind == "cpu" and (step + 1) // SAMPLE_STEPS % STEPS_PER_REPLAY != 0
        probe = _probe(micro_batches) if is_sampled and is_probed and not is_full else None
        if probe is not None:
            return self._run_probed(train_step, step, micro_batches, [probe])
        if self.exchanges_batches and (is_sampled or step < self._full_until):
            of_other = self._gradients_of_other(train_step, step, micro_batches)
            if not is_full:
                return self._run_compared(train_step, step, micro_batches, of_other)
            own = train_step.local_gradients(step, micro_batches, train_step.strategy.keeps_passes_apart(self.rank))
            self._compare_gradients(step, int(own), *of_other)
        if (is_sampled or is_full) and train_step.strategy.repeats_bits:
            return self._run_twice(train_step, step, micro_batches, again)
        result = train_step(step, micro_batches)
        self._poll(step)
        return result

    def _run_twice(
        self, train_step: TrainStep, step: int, micro_batches: Sequence[Batch], again: Sequence[Batch]
    ) -> StepResult:
        """Train on one global batch twice, from the same state."""
        digests, block = self.digests, self.digests.block
        before = digests.state()
        views = block.views(before)
        rows_before = row_digests(before)
        with train_step.strategy.recording() as first_gradients:
            train_step(step, micro_batches)
        first = digests.rows.clone()
        block.copy_to_state(views)
        digests.rows.copy_(rows_before)
        with train_step.strategy.recording() as second_gradients:
            result = train_step.repeat(step, again)
        self.num_replays += 1
        self._read_found()
        tensor = block.first_difference(first, digests.rows)
        if tensor:
            # The wrong gradient of one rank reaches the weights of all: the others are not to blame.
            is_own = self.process_group.world_size == 1 or _sum(first_gradients) != _sum(second_gradients)
            self._add(step, tensor, "replay" if is_own else "ranks")
        self.agree(step)
        return result

    def _run_probed(
        self, train_step: TrainStep, step: int, micro_batches: Sequence[Batch], probe: Sequence[Batch]
    ) -> StepResult:
        """Train on one global batch, after a step of some of its images was computed twice and taken back.

        Where ranks exchange batches, they compute the gradients of each other's images instead.
        """
        if self.exchanges_batches:
            of_other = self._gradients_of_other(train_step, step, probe)
            own = train_step.local_gradients(step, probe, train_step.strategy.keeps_passes_apart(self.rank))
            self._compare_gradients(step, int(own), *of_other)
        elif train_step.strategy.repeats_bits:
            digests, block = self.digests, self.digests.block
            recorded, before, computed = digests.rows.clone(), digests.state(), []
            for _ in range(2):
                train_step.repeat(step, probe)
                computed.append(digests.rows.clone())
                block.copy_to_state(block.views(before))
                digests.rows.copy_(recorded)
            self.num_replays += 1
            self._read_found()
            if tensor := block.first_difference(*computed):
                self._add(step, tensor, "replay")
            self.agree(step)
        result = train_step(step, micro_batches)
        self._poll(step)
        return result

    def _run_compared(
        self, train_step: TrainStep, step: int, micro_batches: Sequence[Batch], of_other: tuple[int, int]
    ) -> StepResult:
        """Train on one global batch, whose gradients another rank has computed, too."""
        with train_step.strategy.recording() as own:
            result = train_step(step, micro_batches)
        self._read_found()
        self._compare_gradients(step, _sum(own), *of_other)
        return result

    def _gradients_of_other(self, train_step: TrainStep, step: int, micro_batches: Sequence[Batch]) -> tuple[int, int]:
        """Another rank, at each call the next one, and the digest of the gradients of its batches, computed here."""
        size = self.process_group.world_size
        shift = 1 + step // SAMPLE_STEPS % (size - 1)
        other = (self.rank - shift) % size
        theirs = self.process_group.exchange_batches(micro_batches, shift)
        self.num_replays += 1
        return other, int(train_step.local_gradients(step, theirs, train_step.strategy.keeps_passes_apart(other)))

    def _compare_gradients(self, step: int, own: int, other: int, of_other: int) -> None:
        computed = self.process_group.all_gather((own, other, of_other))
        suspects: Counter[int] = Counter()
        for rank, (_, owner, digest) in enumerate(computed):
            if computed[owner][0] != digest:
                suspects.update((rank, owner))
        # A rank that is wrong differs from two others; of two ranks either may be.
        if suspects and suspects[self.rank] == max(suspects.values()):
            self._add(step, "gradients", "other rank")
        self.agree(step)

    # Findings

    def _add(self, step: int, tensor: str, how: Literal["at rest", "replay", "other rank", "ranks"]) -> None:
        self.findings.append(Finding(self.rank, step, tensor, how))

    def _poll(self, step: int) -> None:
        """Take what the checks of earlier steps have found, without waiting for the device."""
        if self.device.kind == "cpu":
            self._read_found()
        elif step % _STEPS_PER_READ == 0:
            if self._read is not None:
                self._take(self._read())
            self._read = self.device.copy_to_host(self.digests.found)

    def _read_found(self) -> None:
        """Wait for the device and take what the checks have found."""
        self._read = None
        self._take(self.digests.found.cpu())

    def _take(self, found: Tensor) -> None:
        described = self.digests.describe(found)
        if described is not None and not any(finding.how == "at rest" for finding in self.findings):
            self._add(described[1], described[0], "at rest")

    def check_now(self, step: int, is_saving: bool = False) -> bool:
        """Prove the state between two steps: before it is evaluated, saved or kept. Returns what `agree` does."""
        self.digests.check(step)
        self._read_found()
        if self.process_group.world_size > 1 and not any(self.process_group.all_gather(bool(self.findings))):
            self._compare_ranks(step)
        return self.agree(step, is_saving)

    def _compare_ranks(self, step: int) -> None:
        """Find the ranks whose state is not that of most ranks."""
        own = int(self.digests.rows.sum())
        totals = self.process_group.all_gather(own)
        if len(set(totals)) == 1:
            return
        all_rows = self.process_group.all_gather(self.digests.rows.cpu())
        common, votes = Counter(totals).most_common(1)[0]
        differing = next(rows for rows, total in zip(all_rows, totals, strict=True) if total != common)
        tensor = self.digests.block.first_difference(all_rows[totals.index(common)], differing)
        if own != common or votes * 2 <= len(totals):
            self._add(step, tensor, "ranks")

    def after_divergence(self, step: int) -> WrongBitsError:
        """Findings of all ranks, which may be none; every step is computed again until after this one."""
        self._full_until = step + 1
        self._read_found()
        gathered = self.process_group.all_gather(self.findings)
        return WrongBitsError([finding for of_rank in gathered for finding in of_rank])

    def agree(self, step: int, is_saving: bool = False) -> bool:
        """Raise what any rank has found; called by all ranks at the same step. Returns whether any of them `is_saving`.

        An image that was wrong in memory has been read again: it counts, but nothing was computed from it.
        """
        images = [Finding(self.rank, step, name, "image") for name in self.take_wrong_images()]
        gathered = self.process_group.all_gather((self.findings, images, is_saving))
        self.findings = []
        findings = [finding for of_rank, _, _ in gathered for finding in of_rank]
        wrong_images = list(chain.from_iterable(of_rank for _, of_rank, _ in gathered))
        for finding in wrong_images:
            self.num_findings[finding.rank] += 1
            self.logger.log(event_of(finding, step))
        if findings:
            raise WrongBitsError([finding for finding in findings if finding.how != "ranks"] or findings)
        if wrong_images and self.faulty_ranks():
            raise WrongBitsError(wrong_images)
        return any(saves for _, _, saves in gathered)

    def count(self, findings: Sequence[Finding]) -> None:
        """Count findings, each rank once; images have been counted."""
        self.num_findings.update({finding.rank for finding in findings if finding.how != "image"})

    def faulty_ranks(self) -> list[int]:
        """The ranks that were found wrong for the second time; of two that differ from each other, both."""
        return sorted(rank for rank, number in self.num_findings.items() if number >= MAX_FINDINGS)

    # Proved states

    def start(self) -> None:
        """Digest the state that training begins with."""
        self.findings, self._read = [], None
        self.digests.reset()
        self.digests.record()

    def wants_copy(self, step: int) -> bool:
        """True if the state after this many steps is to be kept."""
        return self.mode == "full" or (step % SAMPLE_STEPS == 0 and step > self._proved[0].counters.step)

    def keep(self, counters: Counters, progress: ProgressSums, micro_groups: int, hold_older: bool) -> None:
        """Keep a copy of the state, which `check_now` has proved; `hold_older`: the older one of two stays."""
        values = self.digests.state()
        block = values if self.mode == "full" or self.device.kind == "cpu" else self.device.copy_to_host(values)()
        proved = ProvedState(copy.deepcopy(counters), block, self.digests.rows.cpu().clone(), progress, micro_groups)
        if len(self._proved) > 1:
            newer, older = (state.counters.step for state in self._proved)
            # `full` keeps every state: the older one should not be wrong for the same reason as the newest.
            hold_older = hold_older or (self.mode == "full" and newer - older < SAMPLE_STEPS)
            self._proved.pop(0 if hold_older else 1)
        self._proved.insert(0, proved)

    def restore(self, last_step: int | None) -> ProvedState | None:
        """Go back to the newest state up to a step whose copy is right on all ranks; None: there is none."""
        while self._proved:
            state = self._proved[0]
            is_early = last_step is None or state.counters.step <= last_step
            if is_early and all(self.process_group.all_gather(state.is_right())):
                block = self.digests.block
                block.copy_to_state(block.views(state.block.to(block.device)))
                self.start()
                return state
            self._proved.pop(0)
        return None


def all_tensors(train_state: TrainState) -> dict[str, Tensor]:
    """Every tensor of the network and its optimizer that an update alone may change, as PART.NAME."""
    parts: dict[str, Mapping[str, Tensor]] = dict(train_state.state_dict())
    buffers = train_state.network.model.named_buffers()
    parts["constants"] = {name: buffer for name, buffer in buffers if name not in parts["model"]}
    tensors = {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


def _probe(micro_batches: Sequence[Batch]) -> Batch | None:
    """Some images of a global batch; None if there are so few that a probe would not save time."""
    first, total = micro_batches[0], sum(map(len, micro_batches))
    size = min(len(first), max(_MIN_PROBE, total // _PROBE_SHARE))
    if size < _MIN_PROBE or 4 * size > total:
        return None
    return first_rows(first, size)


def event_of(finding: Finding, to_step: int) -> WrongBits:
    """The event of a finding after which the run continues from a step."""
    return WrongBits(finding.step, finding.rank, finding.tensor, finding.how, to_step)


def faulty_device_error(
    ranks: Sequence[int], findings: Sequence[Finding], step: int, is_saved: bool
) -> FaultyDeviceError:
    """The error that ends a run in which a rank had wrong bits twice."""
    last = next((finding for finding in reversed(findings) if finding.rank in ranks), findings[-1])
    resume = "run the same command with --resume on other hardware"
    return FaultyDeviceError(
        f"rank {' or '.join(map(str, ranks))} had wrong bits for the second time: {last.tensor} at step {last.step} "
        f"({last.how})",
        why="its device, or the memory of one or the other, is defective",
        hint=f"{resume}; it continues from step {step}, which is proved right" if is_saved else resume,
    )


def _sum(digests: Sequence[Tensor]) -> int:
    return int(torch.stack(list(digests)).sum()) if digests else 0
