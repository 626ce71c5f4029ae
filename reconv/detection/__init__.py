"""Box mathematics on batches: default boxes, matching, coding, losses' sums, decoding, suppression."""
