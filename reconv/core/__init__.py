"""The ground floor: errors, random numbers, batches, custom code, processes. Needs no other package of Reconv."""
