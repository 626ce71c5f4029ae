"""Commands of other programs, read as they were typed, and what they are here."""
