"""Validation errors as messages: the field, what it accepts, what it got and what was probably meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from reconv.recipe.presets import nearest
from reconv.recipe.schema import fields_of, suggest
from reconv.recipe.units import DURATION

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a section of `key: value` lines",
    "model_type": "a section of `key: value` lines",
    "model_attributes_type": "a section of `key: value` lines",
    "none_required": "null",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "too_long": "{max_length} values",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "letters, digits, spaces and . + - _",
}


def explain(path: Sequence[str], errors: Sequence[ErrorDetails]) -> str:
    """One message for all errors of one field."""
    name = ".".join(path)
    if any(error["type"] == "extra_forbidden" for error in errors):
        near = suggest(name)
        if near == name:
            nested = " { ".join(f"{key}:" for key in near.split("."))
            return f"{name}: unknown key; in a file, nest the sections: {nested} ..."
        section = name.rpartition(".")[0]
        known = f"; {section} has {', '.join(fields_of(section))}" if fields_of(section) else ""
        return f"{name}: unknown key" + (f"; did you mean {near}?" if near else known)
    if any(error["type"] == "missing" for error in errors):
        short_list = isinstance(errors[0]["loc"][-1], int)
        return f"{name}: too few values in the list" if short_list else f"{name}: missing"
    if any(error["loc"][-1] == "[key]" for error in errors):
        return f"{name}: the name of an option must consist of letters, digits and _"
    if ".options." in name:
        accepted = "a number, text, true, false, null or a list of numbers or text"
        return f"{name}: must be {accepted}, not {_show(_given(errors))}"
    given = _given(errors)
    expected = list(dict.fromkeys(_duration(name, given, _expected(error)) for error in errors))
    return f"{name}: must be {', or '.join(expected)}, not {_show(given)}{_hint(name, errors, given)}"


def _given(errors: Sequence[ErrorDetails]) -> Any:
    return errors[0]["input"]


def _expected(error: ErrorDetails) -> str:
    context = {k: f"{v:g}" if isinstance(v, float) else v for k, v in error.get("ctx", {}).items()}
    if error["type"] == "literal_error":
        words = _words(error)
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if error["type"] == "value_error":
        return str(context["error"])
    return _EXPECTED[error["type"]].format(**context) if error["type"] in _EXPECTED else error["msg"]


def _duration(name: str, given: Any, expected: str) -> str:
    """Durations that a field accepts, with units that this field takes and the number that was given."""
    if expected != DURATION:
        return expected
    units = ["ep", "step"] if name == "length" else ["ep", "step", "%", *(["min"] if name == "save.every" else [])]
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool) and given > 0
    if is_number and given != int(given):
        units.remove("step")
    if is_number and given > 100 and "%" in units:
        units.remove("%")
    numbers = dict.fromkeys(units, f"{given:g}") if is_number else {"ep": "90", "step": "5000", "%": "10", "min": "15"}
    examples = [numbers[unit] + unit for unit in units]
    return f"a duration with its unit, as in {' or '.join(filter(None, (', '.join(examples[:-1]), examples[-1])))}"


def _words(error: ErrorDetails) -> list[str]:
    text = str(error.get("ctx", {}).get("expected", ""))
    return [word.strip().strip("'") for word in text.replace(" or ", ", ").split(", ")]


def _hint(name: str, errors: Sequence[ErrorDetails], given: Any) -> str:
    if not isinstance(given, str):
        return ""
    near = nearest(given, [word for error in errors if error["type"] == "literal_error" for word in _words(error)])
    if near:
        return f"; did you mean {near}?"
    wants_number = any(error["type"] in ("int_type", "float_type") for error in errors)
    return "; write a number without quotes" if wants_number and given.strip().isdigit() else ""


def _show(value: Any) -> str:
    """A value as YAML has it, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
