"""`reconv data review`: wrong labels, copies, leaks, outliers and small classes of a dataset, for a human to decide."""
