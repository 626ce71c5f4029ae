"""Detection metrics beside pycocotools, and evaluations of detectors."""
