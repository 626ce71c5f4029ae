"""Reading, decoding and remote data."""
