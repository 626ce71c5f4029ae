"""The model of `reconv plan` beside published scaling."""
