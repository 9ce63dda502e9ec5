"""Tolerances of the tests, in one place, with where they come from."""

FP64 = 1e-10  # two float64 evaluations of one formula that sum in another order, over tens of loops of a contracting map
NEWTON_SCHULZ_IN_BF16 = 0.03  # of a matrix: 15 products of bfloat16 factors, each rounded by up to 2^-9, add up to 15 / 512
FP32 = 1e-5  # relative error of float32 against float64 where the map contracts
EAGER_BATCH = 1e-6  # eager: library GEMMs choose their kernel, and so the order of sums, by size
