"""Invalid combinations of recipe fields, as far as they show without the data.

All contradictions of a recipe are reported at once, each with the fields it is about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reconv.recipe.rules.contradiction import Contradiction
from reconv.recipe.rules.data import augment_rules, color_jitter_rules, data_rules
from reconv.recipe.rules.engine import engine_rules, memory_rules, pipeline_rules, precision_rules
from reconv.recipe.rules.schedule import (
    batch_rules,
    durations_rules,
    end_of_run_rules,
    optimizer_rules,
    schedule_rules,
)
from reconv.recipe.rules.task import anchors_rules, model_rules, results_rules, task_rules

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe


def contradictions(recipe: Recipe) -> list[Contradiction]:
    """Every contradiction between the fields of a recipe."""
    rules = (
        *(durations_rules, model_rules, data_rules, augment_rules, color_jitter_rules, task_rules, anchors_rules),
        *(batch_rules, schedule_rules, optimizer_rules, end_of_run_rules, engine_rules, precision_rules),
        *(results_rules, memory_rules, pipeline_rules),
    )
    return [contradiction for rule in rules for contradiction in rule(recipe)]
