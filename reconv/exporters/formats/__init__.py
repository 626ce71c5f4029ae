"""One file per format of an exported model: its target and its writer."""
