"""From a recipe's text to its fields: files, overrides, origins, and what follows from them."""
