"""The JSON Schema of a recipe file, for completion and checks in editors.

An editor sees one file at a time, so nothing is required; rules between fields are checked when a recipe is loaded.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from reconv.recipe.parts.code import parse_name
from reconv.recipe.schema import Recipe
from reconv.recipe.units import BadImages, Duration

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEXTS: dict[Any, JsonSchemaValue] = {
    Duration.parse: {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*(ep|step|%|min)\s*$"},
    BadImages.parse: {"type": "string", "pattern": r"^\s*(stop|skip\s+up\s+to\s+[0-9]+)\s*$"},
}


class _RecipeSchema(GenerateJsonSchema):
    """Types that only Reconv has, as the text they are written as."""

    def function_plain_schema(self, schema: core_schema.PlainValidatorFunctionSchema) -> JsonSchemaValue:
        return dict(_TEXTS[schema["function"]["function"]])

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        """Schema of a field that is read before it is checked, so that `2^-3`, `a,b` or a name may be written."""
        inner = self.generate_inner(schema["schema"])
        if "enum" in inner:  # 16.16 is a number in YAML
            numbers = [float(word) for word in inner["enum"] if word.replace(".", "").isdigit()]
            return {"enum": [*inner["enum"], *numbers]} if numbers else inner
        if inner.get("type") == "object" and schema["function"]["function"] is not parse_name:
            return inner
        return {"anyOf": [inner, {"type": ["string", "boolean", "object"]}]}

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Defaults stand in the descriptions: the objects of sections would repeat the whole schema."""
        return self.generate_inner(schema["schema"])


def recipe_json_schema() -> dict[str, Any]:
    """The schema of a recipe file: `extends` and every section and field, with its description."""
    schema = Recipe.model_json_schema(schema_generator=_RecipeSchema)
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)
    extends = {"type": "string", "description": "The preset or file that this recipe changes."}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return {"$schema": SCHEMA_DIALECT, **schema, "title": "Reconv recipe"}
