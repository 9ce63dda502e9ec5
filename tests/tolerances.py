"""Tolerances of the tests, in one place, with where they come from."""

FP64 = 1e-10  # two float64 evaluations of one formula that sum in another order, over tens of loops of a contracting map
FP32 = 1e-5  # relative error of float32 against float64 where the map contracts
EAGER_BATCH = 1e-6  # eager: library GEMMs choose their kernel, and so the order of sums, by size
