"""How ragged prompts share the tiles of a GPU kernel: the C++ engine's packing, and the one of `loopkernels` that stands in
for it."""

import importlib.util

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from looped.backends import cpu, device

needs_engine = pytest.mark.skipif(not cpu.is_there(), reason="the C++ engine is not built")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

batches = st.lists(st.integers(0, 257), max_size=60)
tiles = st.sampled_from([16, 32, 64, 128])


def pack(lengths, tile_rows):
    return device._engine.pack(np.asarray(lengths, dtype=np.int64), tile_rows)


@needs_engine
@settings(max_examples=200, deadline=None)
@given(lengths=batches, tile_rows=tiles)
def test_every_prompt_has_rows_of_its_own(lengths, tile_rows):
    seen, rows_before = [], np.inf
    for group in pack(lengths, tile_rows):
        assert group.slot_rows < rows_before  # one group for each size, most rows first
        rows_before = group.slot_rows
        taken = set()
        assert len(group.order) == len(group.places)
        for prompt, (tile, row) in zip(group.order.tolist(), group.places.tolist(), strict=True):
            assert lengths[prompt] <= group.slot_rows
            assert row % 16 == 0
            assert row + group.slot_rows <= tile_rows or (row == 0 and group.slot_rows % tile_rows == 0)
            rows = set(range(tile * tile_rows + row, tile * tile_rows + row + group.slot_rows))
            assert not rows & taken
            taken |= rows
        assert taken == set(range(len(taken)))  # no slot is left out before the last
        longest_first = [lengths[prompt] for prompt in group.order]
        assert longest_first == sorted(longest_first, reverse=True)
        seen += group.order.tolist()
    assert sorted(seen) == list(range(len(lengths)))


@needs_engine
@settings(max_examples=100, deadline=None)
@given(lengths=batches, tile_rows=tiles, seed=st.integers(0, 2**20))
def test_rows_of_a_prompt_follow_from_its_length_alone(lengths, tile_rows, seed):
    """So that its sums, which go over its own rows, do not depend on the batch; and equal ones keep their order."""
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    rows = {}
    for group in pack([lengths[i] for i in shuffled], tile_rows):
        for place, prompt in enumerate(group.order.tolist()):
            rows[lengths[shuffled[prompt]]] = group.slot_rows
            before = group.order.tolist()[:place]
            assert all(p < prompt for p in before if lengths[shuffled[p]] == lengths[shuffled[prompt]])
    for length, expected in rows.items():
        (alone,) = pack([length], tile_rows)
        assert alone.slot_rows == expected
        assert alone.places.tolist() == [[0, 0]]


@needs_engine
@needs_triton
@settings(max_examples=100, deadline=None)
@given(lengths=batches, tile_rows=tiles)
def test_both_packings_are_one(lengths, tile_rows):
    theirs = device.kernels().groups_of(lengths, tile_rows)
    ours = device.groups_of(lengths, tile_rows)
    assert [rows for rows, _ in ours] == [rows for rows, _ in theirs]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    assert all(order.dtype == torch.int32 for _, order in ours)


@needs_triton
def test_without_the_engine_loopkernels_packs(monkeypatch):
    monkeypatch.setattr(device, "_engine", None)
    ((rows, order),) = device.groups_of([3, 9, 5], 64)
    assert (rows, order.tolist()) == (16, [1, 2, 0])


@needs_engine
def test_what_cannot_be_packed_is_told():
    with pytest.raises(ValueError, match="prompt 1 has length -4, which must be 0 or more"):
        pack([3, -4], 64)
    with pytest.raises(ValueError, match="tile_rows must be a power of two of at least 16, got 48"):
        pack([3], 48)
    with pytest.raises(ValueError, match="pack: lengths must be C-contiguous int64"):
        device._engine.pack(np.array([3, 4], dtype=np.int32), 64)
    assert pack([], 64) == []
