"""From one form of a data set to another: what becomes of a sample, which file it goes to, and doing all of it."""
