"""Training: throughput, time to result, accuracy and its variants, beside other libraries."""
