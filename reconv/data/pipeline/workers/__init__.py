"""Threads and processes that fill the rows of batches."""
