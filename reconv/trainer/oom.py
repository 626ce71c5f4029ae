"""Out of memory: a step is repeated with smaller micro-batches, and the error says what to change.

The global batch and its groups stay as they are; a micro-batch is always a whole number of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reconv.core.batch import Batch
from reconv.core.errors import ResourceError
from reconv.device import is_out_of_memory
from reconv.trainer.step import UPDATE_STARTED, StepResult, TrainStep

if TYPE_CHECKING:
    from reconv.trainer.prepare_run import PreparedRun


@dataclass(slots=True)
class MicroBatchSize:
    """The largest micro-batch known to fit, in groups; saved in checkpoints."""

    max_groups: int

    def halve(self, tried: int) -> None:
        """Take half of the groups that were tried, or the next smaller number that divides them.

        Splitting again then splits at the same places, so a resumed run adds gradients in the same order.
        """
        self.max_groups = next(size for size in range(tried // 2, 0, -1) if tried % size == 0)


@dataclass(frozen=True, slots=True)
class OomRetry:
    """Repeats a step that ran out of memory with micro-batches of half the size."""

    micro_batch_size: MicroBatchSize
    release_memory: Callable[[], None]  # returns the allocator's cached memory to the device
    warn: Callable[[str, int], None]  # text, step

    def run(self, train_step: TrainStep, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Run the step, with smaller and smaller micro-batches until it fits."""
        while True:
            split = self._split(micro_batches)
            try:
                return train_step.run_once(step, split)
            except Exception as error:
                num_groups = max(len(batch.groups) for batch in split)
                can_repeat = UPDATE_STARTED not in getattr(error, "__notes__", ())
                if not (is_out_of_memory(error) and can_repeat and num_groups > 1):
                    raise
            # Outside the handler: the traceback of the error holds the activations that did not fit.
            before = max(len(batch) for batch in split)
            self.micro_batch_size.halve(num_groups)
            train_step.reset()
            self.release_memory()
            after = max(len(batch) for batch in self._split(micro_batches))
            self.warn(f"out of memory with micro-batches of {before}: repeating the step with {after}", step)

    def _split(self, micro_batches: Sequence[Batch]) -> list[Batch]:
        return [part for batch in micro_batches for part in batch.split(self.micro_batch_size.max_groups)]


def out_of_memory_error(run: PreparedRun) -> ResourceError:
    """The error for a run that does not fit, with the largest micro-batch to try next."""
    recipe, plan = run.recipe, run.plan
    # With one process `auto` has already tried every size down to one group.
    is_smallest = recipe.batch.micro == "auto" and run.process_group.world_size == 1
    if plan.micro_groups > 1 and not is_smallest:
        why = f"micro-batches of {plan.micro_batch} images do not fit"
        then = f"use smaller ones, also with --resume: --set batch.micro={plan.micro_groups // 2 * plan.group}"
    elif recipe.batch.group == "micro":
        why = f"micro-batches of {plan.micro_batch} images do not fit"
        smaller = max(1, plan.micro_batch // 2)
        then = f"use smaller ones: --set batch.micro={smaller} (each is a batch norm group: results change)"
    else:
        why = f"a batch norm group of {min(plan.group, plan.micro_batch)} images does not fit, and groups are not split"
        saving = (
            "" if recipe.memory.activation_checkpointing != "off" else "--set memory.activation_checkpointing=auto, or "
        )
        then = f"{saving}smaller groups: --set batch.group=N (results change)"
    return ResourceError("out of memory", where=run.device.describe(), why=why, then=then)
