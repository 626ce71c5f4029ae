"""`reconv submit`: a class for each scheduler or engine, and the jobs that run directories belong to.

Nothing here imports torch: submitting and listing jobs is done on login nodes.

A submitted run has its directory before it starts, and every start of its job continues what is there.
"""
