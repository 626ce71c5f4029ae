"""`reconv plan`: predicts the speed, time and cost of a recipe on devices that are not here. No torch."""
