"""`reconv submit`: job scripts for Slurm, manifests for Kubernetes, and the jobs that run directories belong to.

Nothing here imports torch: submitting and listing jobs is done on login nodes.
"""
