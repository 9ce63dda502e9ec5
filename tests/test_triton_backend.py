"""The Triton backend where no GPU is: what it says, and what it leaves alone."""

import subprocess
import sys

import pytest
import torch
from models import icl_model

import looped
from looped.backends import device, triton_decode
from looped.backends import triton as backend
from looped.weights import weights_of


def test_importing_the_package_imports_no_triton():
    code = "import sys, looped; sys.exit(any(name.split('.')[0] in ('triton', 'loopkernels') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_device_is_named_where_it_is_no_gpu():
    model = icl_model(dtype=torch.float32)
    with pytest.raises(ValueError, match="run on a GPU and the model is on cpu"):
        looped.solve(model, [torch.randn(4, 3)], backend="triton")
    assert looped.solve(model, [torch.randn(4, 3)]).backend in ("cpu", "eager")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_state_of_the_backend_is_reported(monkeypatch):
    if device.is_there():
        assert backend.describe() == "Triton is here, but no GPU is"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
        for target, said in (
            ("sm_90", "works (a card, sm_90); widths up to 256 in bf16, 256 in bf16x3, 128 in tf32"),
            ("sm_70", "no launch for a card (sm_70)"),
        ):
            monkeypatch.setattr(backend.kernels(), "target_of", lambda device, target=target: target)
            assert backend.describe() == said
        monkeypatch.setattr(backend.kernels(), "target_of", lambda device: "sm_90")
        monkeypatch.setattr("loopkernels.table.VERSION", (3, 5))
        assert "need Triton 3.6 or newer" in backend.describe()
    monkeypatch.setattr(backend, "kernels", lambda: "Triton is not in this installation")
    assert backend.describe() == "Triton is not in this installation"


@pytest.mark.skipif(not device.is_there(), reason="Triton is not installed")
def test_decoding_names_a_triton_that_is_too_old(monkeypatch):
    fields = dict(input_kind="tokens", vocab_size=61, readout="vocabulary", d_model=16, n_heads=2, n_positions=64)
    model = looped.LoopedTransformer(looped.LoopedConfig(**fields))
    monkeypatch.setattr(triton_decode, "is_interpreted", lambda: True)
    assert triton_decode.why_not(model) is None
    monkeypatch.setattr("loopkernels.table.VERSION", (3, 5))
    assert "for sm_90 need Triton 3.6 or newer" in triton_decode.why_not(model)


@pytest.mark.skipif(not device.is_there(), reason="Triton is not installed")
def test_weights_are_packed_again_after_repack_and_after_edits_that_can_be_seen():
    model = icl_model(dtype=torch.float32)
    weights = weights_of(model)
    first = backend.packed(model.config, weights)["core"]
    with torch.no_grad():
        model.core[0].mlp.proj.weight.data.mul_(2)
    assert backend.packed(model.config, weights)["core"] is first  # what `repack` is for
    looped.repack(model)
    second = backend.packed(model.config, weights)["core"]
    assert torch.equal(second.w_down.float(), 2 * first.w_down.float())
    with torch.no_grad():
        model.core[0].mlp.proj.weight.mul_(2)
    assert torch.equal(backend.packed(model.config, weights)["core"].w_down.float(), 4 * first.w_down.float())


def test_repack_takes_a_model_that_was_never_packed():
    model = icl_model()
    before = looped.solve(model, [torch.ones(4, 3, dtype=torch.float64)], n_loops=2).y[0]
    looped.repack(model)
    assert torch.equal(looped.solve(model, [torch.ones(4, 3, dtype=torch.float64)], n_loops=2).y[0], before)
