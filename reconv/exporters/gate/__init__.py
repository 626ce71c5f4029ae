"""The gate of an export: the exported file must give the outputs of the trained model."""
