"""The gate of squeeze-and-excitation."""
