"""Several processes that train one model: launching them, collectives, parallel strategies and failures of ranks.

Imports nothing, so that the command line can read the launch environment without importing torch.
"""
