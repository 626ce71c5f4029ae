"""The trace a recipe asks for.

Owns where traces lie and whether a range can be traced. Refuses to know the profiler. Invariant: a range that no step
of the run falls into is refused before the run, or said.
"""

from __future__ import annotations

from reconv.checkpoint.run_dir import RunDir
from reconv.device import Device
from reconv.errors import UsageError
from reconv.logging.clock import RunClock
from reconv.logging.run_logger import RunLogger
from reconv.recipe.plan import Plan
from reconv.recipe.schema import Recipe
from reconv.trainer.profiler import StepProfiler

NO_STEP = (0, 0)  # steps count from 1


def refuse_profile_beyond_end(recipe: Recipe, plan: Plan) -> None:
    """Refuse a range whose last step the run will not reach."""
    if recipe.profile != "off" and recipe.profile[1] > plan.total_steps:
        raise UsageError(
            f"step {recipe.profile[1]} cannot be traced",
            where="profile",
            why=f"the run has {plan.total_steps:,} steps",
            then=f"--profile {max(1, plan.total_steps - 3)},{plan.total_steps}",
        )


def build_trace(
    recipe: Recipe, folder: RunDir, device: Device, from_step: int, logger: RunLogger, clock: RunClock
) -> StepProfiler:
    """The trace of a run; without a range it never starts."""
    first, last = NO_STEP if recipe.profile == "off" else recipe.profile
    if (first, last) != NO_STEP and last <= from_step:
        logger.warning(f"nothing is traced: steps {first} to {last} are done already", from_step)
    return StepProfiler(first, last, folder.path / "traces", device, logger, clock.paused)
