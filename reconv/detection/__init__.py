"""Box mathematics of single-shot detectors, on batches of tensors.

Anchors, matching, box coding, hard negatives, NMS and losses equal brute force (tests/detection,
tests/tasks/test_detection.py).
"""
