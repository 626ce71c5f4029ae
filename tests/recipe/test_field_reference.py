"""The reference of recipe fields, and the completion that is made from it."""

from __future__ import annotations

import click
import pytest
import yaml

from reconv.cli.commands.recipes import model_option_references
from reconv.cli.commands.train import train
from reconv.cli.options import complete_fields, complete_models
from reconv.core.errors import UsageError
from reconv.models import model_names, model_spec
from reconv.recipe.field_reference import explain_field, field_names, field_references, matching_fields
from reconv.recipe.model_names import MODEL_NAMES
from reconv.recipe.schema import schema_fields


def completions(function: object, typed: str) -> list[str]:
    context, option = click.Context(train), next(param for param in train.params if param.name == "settings")
    return [item.value for item in function(context, option, typed)]  # type: ignore[operator]


def test_every_field_of_the_schema_has_a_description_and_a_type() -> None:
    references = field_references()
    assert set(references) == set(schema_fields()) and len(references) > 150
    assert [name for name, field in references.items() if not field.description.endswith((".", ")"))] == []
    assert [name for name, field in references.items() if "a value" in field.kind] == []


def test_a_field_is_explained_with_range_choices_and_default() -> None:
    (momentum,) = explain_field("optimizer.momentum")
    assert (momentum.kind, momentum.default) == ("a number, at least 0 and below 1", "0.9")
    (group,) = explain_field("batch.group")
    assert group.choices == ("all", "micro") and group.default == "all"
    (milestones,) = explain_field("schedule.milestones")
    assert milestones.kind == "a list of durations, as in 90ep, 5000step, 10% or 15min"
    section, *fields = explain_field("ema")
    assert section.is_section and [field.name for field in fields] == ["ema.decay", "ema.warmup"]


def test_an_unknown_field_is_an_error_with_the_closest_one() -> None:
    with pytest.raises(UsageError) as error:
        explain_field("optimizer.momentun")
    assert "optimizer.momentum" in error.value.why


def test_fields_are_found_by_a_part_of_their_name_or_a_pattern() -> None:
    assert [field.name for field in matching_fields("ema.")] == ["ema.decay", "ema.warmup"]
    assert {field.name for field in matching_fields("*.warmup")} == {"schedule.warmup", "ema.warmup"}
    assert [field.name for field in matching_fields()] == field_names()
    with pytest.raises(UsageError) as error:
        matching_fields("optimizer.momentun")
    assert "optimizer.momentum" in error.value.why


@pytest.mark.parametrize("network", MODEL_NAMES[::6])
def test_every_option_of_a_network_has_a_description_a_type_and_the_default_of_that_network(network: str) -> None:
    options = {option.name: option for option in model_option_references(network)}
    assert len(options) > 9
    assert [name for name, option in options.items() if not option.description.endswith(".")] == []
    assert [name for name, option in options.items() if "a value" in option.kind] == []
    spec = model_spec(network)
    for name, option in options.items():
        value = yaml.safe_load(option.default)
        expected = getattr(spec, name.removeprefix("model.options."))
        assert value == (list(expected) if isinstance(expected, tuple) else expected) or float(value) == expected


def test_set_completes_fields_and_then_their_choices() -> None:
    assert "schedule.warmup=" in completions(complete_fields, "schedule.w")
    assert completions(complete_fields, "precision.mode=bf") == ["precision.mode=bf16", "precision.mode=bf16-all"]
    assert completions(complete_fields, "nothing=") == []
    assert len(completions(complete_fields, "")) == len(field_names())


def test_model_completes_every_network_without_importing_it() -> None:
    assert set(MODEL_NAMES) == set(model_names()) and len(MODEL_NAMES) == len(model_names())
    assert "resnet50" in completions(complete_models, "resnet5")
