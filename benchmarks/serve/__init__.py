"""`reconv serve` beside LitServe, and long runs of it."""
