"""The sections of a recipe: fields, their types and their descriptions."""
