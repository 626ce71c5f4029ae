"""`reconv export`: a trained model as a file of another runtime, proven to give the same numbers there."""
