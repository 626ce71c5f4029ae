"""A validation error in words: which field, what it takes, what it was given, what was probably meant.

Owns the sentences. Refuses to know where the value stood. Invariant: one field, one sentence, whatever number of
errors the validator reports for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from reconv.recipe.fields import suggest
from reconv.recipe.presets import nearest
from reconv.recipe.renamed import renamed_field, renamed_value

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "`key: value` lines",
    "model_type": "`key: value` lines",
    "model_attributes_type": "`key: value` lines",
    "none_required": "null",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number not below {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number not above {le}",
    "too_long": "{max_length} values",
    "string_too_long": "at most {max_length} letters",
    "string_pattern_mismatch": "letters, digits, spaces and . + - _",
}


def explain(path: Sequence[str], errors: Sequence[ErrorDetails]) -> str:
    """One sentence for all errors of one field."""
    name = ".".join(path)
    if any(error["type"] == "extra_forbidden" for error in errors):
        now = renamed_field(name, _given(errors))
        if now is not None:
            return f"{name}: {now}"
        near = suggest(name)
        if near == name:
            nested = " { ".join(f"{key}:" for key in near.split("."))
            return f"{name}: unknown key; in a file sections are nested: {nested} ..."
        return f"{name}: unknown key" + (f"; did you mean {near}?" if near else "")
    if any(error["type"] == "missing" for error in errors):
        short_list = isinstance(errors[0]["loc"][-1], int)
        return f"{name}: too few values in the list" if short_list else f"{name}: missing"
    if any(error["loc"][-1] == "[key]" for error in errors):
        return f"{name}: an option's name is letters, digits and _"
    if name.startswith("model.options."):
        kinds = "a number, a word, true, false, null or a list of one of these"
        return f"{name}: takes {kinds}; not {_show(_given(errors))}"
    wanted = list(dict.fromkeys(_wanted(error) for error in errors))
    given = _given(errors)
    return f"{name}: takes {', or '.join(wanted)}; not {_show(given)}{_hint(name, errors, given)}"


def _given(errors: Sequence[ErrorDetails]) -> Any:
    return errors[0]["input"]


def _wanted(error: ErrorDetails) -> str:
    context = {k: f"{v:g}" if isinstance(v, float) else v for k, v in error.get("ctx", {}).items()}
    if error["type"] == "literal_error":
        words = _words(error)
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if error["type"] == "value_error":
        return str(context["error"])
    return _WANTED[error["type"]].format(**context) if error["type"] in _WANTED else error["msg"]


def _words(error: ErrorDetails) -> list[str]:
    text = str(error.get("ctx", {}).get("expected", ""))
    return [word.strip().strip("'") for word in text.replace(" or ", ", ").split(", ")]


def _hint(name: str, errors: Sequence[ErrorDetails], given: Any) -> str:
    if not isinstance(given, str):
        return ""
    if (now := renamed_value(name, given)) is not None:
        return f"; {given} was renamed to {now}"
    near = nearest(given, [word for error in errors if error["type"] == "literal_error" for word in _words(error)])
    if near:
        return f"; did you mean {near}?"
    wants_number = any(error["type"] in ("int_type", "float_type") for error in errors)
    return " (a number is written without quotes)" if wants_number and given.strip().isdigit() else ""


def _show(value: Any) -> str:
    """A value as it would stand in YAML, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
