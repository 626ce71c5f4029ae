"""One writer per format of an exported model."""
