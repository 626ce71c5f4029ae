"""ImageNet as downloaded: the original tar archives and the labels of the validation images."""
