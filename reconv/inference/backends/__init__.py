"""Ways to run a trained network: as trained, or folded, fused and captured, or by another runtime."""
