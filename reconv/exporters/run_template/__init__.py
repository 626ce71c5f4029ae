"""The source of `run.py`: `main` with the `load_model` of one runtime. They import nothing of Reconv.

Its pixels equal those of `eval_transform` (tests/inference/export).
"""
