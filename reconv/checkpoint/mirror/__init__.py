"""A copy of a run in an object store: `--out s3://...` writes it, and `--resume` on another machine takes it back."""
