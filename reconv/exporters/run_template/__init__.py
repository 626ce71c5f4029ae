"""The source of `run.py`: `run_main` with the `load_model` of one runtime. They import nothing of Reconv."""
